"""A user's own arrays: .npz, and .npy next to its labels; and files that are not arrays."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.training.data.sources import arrays
from tests import product
from tests.product import UserError

GENERATOR = np.random.default_rng(0)
IMAGES = GENERATOR.integers(0, 256, (120, 4, 5, 3), dtype=np.uint8)
LABELS = GENERATOR.integers(0, 3, 120)
VECTORS = GENERATOR.normal(size=(120, 7))


def _made(root: Path, **options: object) -> Any:
    return product.prepared(product.data(source="arrays", root=str(root), options=options, num_shards=2))


def _write(folder: Path, kind: str, samples: np.ndarray, labels: np.ndarray) -> dict[str, str]:
    if kind == "npy":
        np.save(folder / "x.npy", samples)
        np.save(folder / "y.npy", labels)
        return {"train": "x.npy", "train_labels": "y.npy"}
    (np.savez_compressed if kind == "packed" else np.savez)(folder / "train.npz", samples=samples, labels=labels)
    return {}


@pytest.mark.promise("sources")
@pytest.mark.parametrize(
    ("kind", "samples"),
    [
        ("npz", VECTORS.astype(">f2")), ("packed", IMAGES), ("npy", IMAGES), ("npy", np.asfortranarray(IMAGES)),
    ],
)  # fmt: skip
def test_every_format_gives_the_same_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, samples: np.ndarray
) -> None:
    monkeypatch.setattr("lockstep.training.data.sources.raw.PIECE_BYTES", 7 * samples[0].nbytes)  # 18 pieces
    made = _made(tmp_path, **_write(tmp_path, kind, samples, LABELS.astype(np.uint8)), classes=["a", "b", "c"])
    held = arrays.held_out(120, 0.1)
    stored = samples if samples.dtype == np.uint8 else samples.astype(np.float32)
    train, test = ((stored[part], LABELS[part]) for part in (~held, held))
    assert made.checksum == product.sharded(tmp_path / "same", train, test, ["a", "b", "c"]).checksum
    assert made.classes == ["a", "b", "c"] and 0 < held.sum() < 40
    assert np.array_equal(arrays.held_out(1000, 0.1)[:120], held), "rows that are added change no other's draw"


def test_a_test_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "train.npz", samples=IMAGES[:100], labels=LABELS[:100])
    np.savez(tmp_path / "val.npz", samples=IMAGES[100:], labels=LABELS[100:])
    made = _made(tmp_path, test="val.npz")
    assert (made.count("train"), made.count("test"), made.classes) == (100, 20, ["class 0", "class 1", "class 2"])
    assert all(map(np.array_equal, product.split(made, "test"), (IMAGES[100:], LABELS[100:])))
    os.utime(tmp_path / "val.npz", ns=(1, 1))
    before = (made.directory / "manifest.json").stat().st_mtime_ns
    assert (_made(tmp_path, test="val.npz").directory / "manifest.json").stat().st_mtime_ns != before


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


BAD: dict[str, dict[str, bytes]] = {
    "cut off": {**GOOD, "samples": _npy(IMAGES, lambda data: data[:-5])},
    "longer": {**GOOD, "samples": _npy(IMAGES, lambda data: data + b"x")},
    "too few labels": {**GOOD, "labels": _npy(LABELS[:-1])},
    "label -1": {**GOOD, "labels": _npy(LABELS - 1)},
    "no labels": {"samples": GOOD["samples"]},
    "channels last": {**GOOD, "samples": _npy(np.ascontiguousarray(np.repeat(IMAGES, 2, 2).transpose(0, 3, 1, 2)))},
    r"uint8 images \[n, h, w, c\]": {**GOOD, "samples": _npy(IMAGES.astype(np.int64))},
    "not a finite": {**GOOD, "samples": _npy(np.where(VECTORS > 2, np.nan, VECTORS))},
}
"""What is wrong; three of them say how to do it, and match by that."""


@pytest.mark.promise("hostile-files")
@pytest.mark.parametrize("kind", BAD)
def test_an_npz_that_is_none(tmp_path: Path, kind: str) -> None:
    _npz(tmp_path / "train.npz", **BAD[kind])
    said = kind if kind in ("channels last", "not a finite") or "uint8" in kind else r"train\.npz|^arrays: "
    with pytest.raises(UserError, match=said) as caught:
        _made(tmp_path)
    assert "\n" not in str(caught.value) and not [path for path in (tmp_path / "shards").iterdir() if path.is_dir()]


def test_no_pickle_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    objects = np.empty(120, object)
    objects[:] = _Bomb()
    _npz(tmp_path / "train.npz", samples=_npy(objects), labels=GOOD["labels"])
    np.save(tmp_path / "x.npy", objects)
    np.save(tmp_path / "y.npy", LABELS)
    for options in ({}, {"train": "x.npy", "train_labels": "y.npy"}):
        with pytest.raises(UserError, match=r"cannot read .*[Oo]bject"):
            _made(tmp_path, **options)
    (tmp_path / "train.npz").write_bytes(pickle.dumps(_Bomb()))
    with pytest.raises(UserError, match="cannot read"):
        _made(tmp_path)
    assert not (tmp_path / "bomb-went-off").exists()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "train.npz"), ({"train": "x.npy"}, "train_labels"), ({"held_out": 0, "train": "good.npz"}, "held_out=0"),
        ({"train": "good.npz", "classes": ["a"]}, "label 2"), ({"train": "good.npz", "test": "vectors.npz"}, "test samples"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit(tmp_path: Path, options: dict[str, object], named: str) -> None:
    np.savez(tmp_path / "good.npz", samples=IMAGES, labels=LABELS)
    np.savez(tmp_path / "vectors.npz", samples=VECTORS, labels=LABELS)
    with pytest.raises(UserError, match=named):
        _made(tmp_path, **options)


def test_a_class_without_a_training_sample_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    labels = np.where(np.arange(120) == 7, 255, LABELS)  # the mark of a label that is to be ignored, say
    np.savez(tmp_path / "train.npz", samples=IMAGES, labels=labels)
    assert len(_made(tmp_path).classes) == 256
    assert (
        "for 252 of 256 classes (class 3, class 4," in (told := capfd.readouterr().err)
        and "largest label is 255" in told
    )


@pytest.mark.parametrize(
    ("file", "damage", "named"),
    [
        ("x.npy", lambda path: path.write_bytes(path.read_bytes()[:-5]), "cannot read"),
        ("x.npy", lambda path: path.write_bytes(path.read_bytes() + b"x"), "longer than its header says"),
        ("y.npy", lambda path: np.save(path, LABELS[:-1]), r"labels \[119\], and .* samples \[120, 7\]"),
        ("x.npy", lambda path: (path.unlink(), os.mkfifo(path)), "not a regular file"),
    ],
)
def test_an_npy_that_is_none(tmp_path: Path, file: str, damage: Callable[[Path], object], named: str) -> None:
    options = _write(tmp_path, "npy", VECTORS, LABELS)
    damage(tmp_path / file)
    with pytest.raises(UserError, match=rf"{file}.*{named}|{named}.*{file}"):
        _made(tmp_path, **options)


def test_an_npz_that_would_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "MAX_BYTES", 1000)
    _write(tmp_path, "packed", IMAGES, LABELS)
    with pytest.raises(UserError, match="samples.npy has 7328 bytes unpacked, at most 1000 are read: use .npy"):
        _made(tmp_path)
