"""A user's own arrays: .npz, .npy beside its labels, .safetensors; and files that are not arrays."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from lockstep.training import config
from lockstep.training.contract import UserError
from lockstep.training.data import shards, sources
from lockstep.training.data.shards import Manifest, Samples
from lockstep.training.data.sources import arrays
from lockstep.training.data.sources.arrays import held_out

GENERATOR = np.random.default_rng(0)
IMAGES = GENERATOR.integers(0, 256, (120, 4, 5, 3), dtype=np.uint8)
LABELS = GENERATOR.integers(0, 3, 120)
VECTORS = GENERATOR.normal(size=(120, 7))


def _made(root: Path, **options: object) -> Manifest:
    return Manifest.read(shards.prepare(config.Data(source="arrays", root=str(root), options=options, num_shards=2)))


def _write(folder: Path, kind: str, samples: np.ndarray, labels: np.ndarray) -> dict[str, str]:
    if kind == "npy":
        np.save(folder / "x.npy", samples)
        np.save(folder / "y.npy", labels)
        return {"train": "x.npy", "train_labels": "y.npy"}
    if kind == "safetensors":
        safetensors.numpy.save_file({"samples": samples, "labels": labels}, folder / "a.safetensors")
        return {"train": "a.safetensors"}
    (np.savez_compressed if kind == "packed" else np.savez)(folder / "train.npz", samples=samples, labels=labels)
    return {}


@pytest.mark.parametrize("kind", ["npz", "packed", "npy", "safetensors"])
@pytest.mark.parametrize("samples", [IMAGES, VECTORS, VECTORS.astype(">f2")], ids=["images", "vectors", "half"])
def test_every_format_gives_the_same_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, samples: np.ndarray
) -> None:
    if kind == "safetensors":
        samples = samples.astype(samples.dtype.newbyteorder("="))  # the format has one order
    monkeypatch.setattr("lockstep.training.data.sources.raw.PIECE_BYTES", 7 * samples[0].nbytes)  # 18 pieces
    made = _made(tmp_path, **_write(tmp_path, kind, samples, LABELS.astype(np.uint8)), classes=["a", "b", "c"])
    held = held_out(120, 0.1)
    stored = samples if samples.dtype == np.uint8 else samples.astype(np.float32)
    raw = sources.Raw((stored[~held], LABELS[~held]), (stored[held], LABELS[held]), ["a", "b", "c"])
    assert made.checksum == shards.write(raw, tmp_path / "same", "array", 2).checksum
    assert made.classes == ["a", "b", "c"] and 0 < held.sum() < 40
    assert np.array_equal(held_out(1000, 0.1)[:120], held), "rows that are added change no other's draw"


def test_a_test_file_and_shards_of_ours(tmp_path: Path) -> None:
    """What holds `images`, as a shard does, is read, too."""
    np.savez(tmp_path / "train.npz", samples=IMAGES[:100], labels=LABELS[:100])
    safetensors.numpy.save_file({"images": IMAGES[100:], "labels": LABELS[100:]}, tmp_path / "val.safetensors")
    made = _made(tmp_path, test="val.safetensors")
    assert (made.count("train"), made.count("test"), made.classes) == (100, 20, ["class 0", "class 1", "class 2"])
    images, labels = Samples.open(made, "test", 0, 20).all()
    assert np.array_equal(images.numpy(), IMAGES[100:]) and np.array_equal(labels.numpy(), LABELS[100:])
    os.utime(tmp_path / "val.safetensors", ns=(1, 1))
    before = (made.directory / "manifest.json").stat().st_mtime_ns
    assert (_made(tmp_path, test="val.safetensors").directory / "manifest.json").stat().st_mtime_ns != before


class _Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, (Path("bomb-went-off"),))  # type: ignore[return-value]


def _npy(array: np.ndarray, change: Callable[[bytes], bytes] = lambda data: data) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return change(file.getvalue())


def _npz(path: Path, **members: bytes) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)


GOOD = {"samples": _npy(IMAGES), "labels": _npy(LABELS)}


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({**GOOD, "samples": _npy(IMAGES, lambda data: data[:-5])}, "it is cut off or corrupt"),
        ({**GOOD, "samples": _npy(IMAGES, lambda data: data + b"x")}, "it is cut off or corrupt"),
        ({**GOOD, "samples": b"nothing"}, "cannot read .*train.npz"),
        ({**GOOD, "samples": _npy(IMAGES, lambda data: data.replace(b"(120, 4", b"(-12, 4"))}, "cannot read|it is corrupt"),
        ({**GOOD, "labels": _npy(LABELS[:-1])}, r"labels of int64 \[119\] for 120 samples"),
        ({**GOOD, "labels": _npy(LABELS.astype(float))}, "expected whole numbers"),
        ({**GOOD, "labels": _npy(LABELS - 1)}, "labels -1 … .*expected 0 … 65535"),
        ({"samples": GOOD["samples"]}, "has no array 'labels'"),
        ({"data": GOOD["samples"]}, "has no array 'samples'"),
        ({**GOOD, "samples": _npy(np.asfortranarray(IMAGES))}, "Fortran order"),
        ({**GOOD, "samples": _npy(np.ascontiguousarray(np.repeat(IMAGES, 2, 2).transpose(0, 3, 1, 2)))}, "channels last"),
        ({**GOOD, "samples": _npy(IMAGES.astype(np.int64))}, r"expected uint8 images \[n, h, w, c\]"),
        ({**GOOD, "samples": _npy(np.where(VECTORS > 2, np.nan, VECTORS))}, "has a value that is not a finite"),
        ({**GOOD, "samples": _npy(np.array(["a"] * 120))}, "expected whole numbers or floats"),
        ({"samples": _npy(IMAGES[:0]), "labels": _npy(LABELS[:0])}, "has no samples"),
    ],
)  # fmt: skip
def test_an_npz_that_is_none(tmp_path: Path, members: dict[str, bytes], message: str) -> None:
    _npz(tmp_path / "train.npz", **members)
    with pytest.raises(UserError, match=message) as caught:
        _made(tmp_path)
    assert "\n" not in str(caught.value) and not [path for path in (tmp_path / "shards").iterdir() if path.is_dir()]


def test_no_pickle_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    objects = np.empty(120, object)
    objects[:] = _Bomb()
    _npz(tmp_path / "train.npz", samples=_npy(objects), labels=GOOD["labels"])
    with pytest.raises(UserError, match="holds Python objects, which are not read"):
        _made(tmp_path)
    (tmp_path / "train.npz").write_bytes(pickle.dumps(_Bomb()))
    with pytest.raises(UserError, match="cannot read"):
        _made(tmp_path)
    assert not (tmp_path / "bomb-went-off").exists()


def test_a_packed_array_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _npz(tmp_path / "train.npz", samples=_npy(np.zeros((100, 64, 64, 3), np.uint8)), labels=_npy(LABELS[:100]))
    monkeypatch.setattr(arrays, "MOST_PACKED", 1 << 20)
    with pytest.raises(UserError, match="samples.npy has 1228928 bytes unpacked, at most 1048576"):
        _made(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "cannot read .*train.npz: No such file"),
        ({"train": "x.npy"}, "its labels are named in data.options.train_labels"),
        ({"train": "x.txt"}, "its name does not end in one of .npz, .npy, .safetensors"),
        ({"train": "x.safetensors"}, "cannot read .*x.safetensors"),
        ({"held_out": 0, "train": "good.npz"}, "held_out=0 of 120 samples leaves none for testing"),
        ({"train": "good.npz", "classes": ["a"]}, "has a label 2, and names 1 classes"),
        ({"train": "good.npz", "test": "vectors.npz"}, "both must be of the same kind"),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, options: dict[str, object], message: str) -> None:
    np.savez(tmp_path / "good.npz", samples=IMAGES, labels=LABELS)
    np.savez(tmp_path / "vectors.npz", samples=VECTORS, labels=LABELS)
    (tmp_path / "x.safetensors").write_bytes(b"\xff" * 30)
    with pytest.raises(UserError, match=message):
        _made(tmp_path, **options)
