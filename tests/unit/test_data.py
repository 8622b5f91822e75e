from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.training.config import Config, Data
from lockstep.training.contract import UserError
from lockstep.training.data import shards, sources
from lockstep.training.data.loader import Loader
from lockstep.training.data.shards import Manifest, Samples
from lockstep.training.data.sources.cifar10 import _read_batch
from lockstep.training.parallel.world import World


@pytest.fixture
def made(tmp_path: Path) -> Manifest:
    raw = sources.load("synthetic", tmp_path, False, {"n": 100, "n_test": 20, "size": 4, "classes": 3})
    return shards.write(raw, tmp_path / "shards", "synthetic", 3)


def test_shards_hold_the_data_in_its_order(tmp_path: Path, made: Manifest) -> None:
    raw = sources.load("synthetic", tmp_path, False, {"n": 100, "n_test": 20, "size": 4, "classes": 3})
    assert made.count("train") == 100 and made.count("test") == 20 and len(made.splits["train"]) == 3
    images, labels = Samples.open(made, "train", 0, 100).all()
    assert np.array_equal(images.numpy(), raw.train[0]) and np.array_equal(labels.numpy(), raw.train[1])
    some = torch.tensor([99, 0, 40, 33, 34])
    taken, their_labels = Samples.open(made, "train", 0, 100).take(some)
    assert torch.equal(taken, images[some]) and torch.equal(their_labels, labels[some])


def test_only_the_files_of_the_range_are_opened(made: Manifest) -> None:
    for shard in made.splits["train"][1:]:
        (made.directory / shard.file).unlink()
    first = made.splits["train"][0].count
    assert len(Samples.open(made, "train", 0, first)) == first
    with pytest.raises(UserError, match=r"cannot read .*train-00001"):
        Samples.open(made, "train", 0, first + 1)


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "swap"])
def test_a_damaged_shard_is_named(made: Manifest, damage: str) -> None:
    path = made.directory / made.splits["train"][1].file
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-1] ^= 1
    path.write_bytes({"flip": data, "truncate": data[:-9], "empty": b"", "swap": b"\xff" * len(data)}[damage])
    with pytest.raises(UserError, match=r"train-00001.*make the shards again"):
        Samples.open(made, "train", 0, 100)
    if damage != "flip":  # without the checksum the format itself still refuses nonsense
        with pytest.raises(UserError, match="train-00001"):
            Samples.open(made, "train", 0, 100, verify=False)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", 2), ("shape", [4, 4]), ("shape", [0, 4, 3]), ("classes", []), ("splits", {}), ("source", 3),
        ("splits", {"train": [{"file": "../x.safetensors", "count": 1, "sha256": "0" * 64}], "test": []}),
        ("splits", {"train": [{"file": "x.safetensors", "count": -1, "sha256": "0" * 64}], "test": []}),
        ("splits", {"train": [{"file": "x.safetensors", "count": 1}], "test": []}),
    ],
)  # fmt: skip
def test_a_malformed_manifest_is_refused(made: Manifest, key: str, value: object) -> None:
    path = made.directory / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(UserError, match=r"manifest.json is malformed"):
        Manifest.read(made.directory)


def test_writing_never_touches_an_existing_folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("1")
    raw = sources.load("digits", tmp_path, False, {})
    with pytest.raises(UserError, match="exists already"):
        shards.write(raw, tmp_path / "out", "digits", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_digits_are_real_images_of_both_splits() -> None:
    raw = sources.load("digits", Path(), False, {})
    assert raw.train[0].shape == (1438, 32, 32, 3) and raw.test[0].shape == (359, 32, 32, 3)
    assert raw.train[0].dtype == np.uint8 and set(raw.train[1]) == set(raw.test[1]) == set(range(10))


def _binary_cifar(folder: Path, records: int = 20) -> np.ndarray:
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    every = generator.integers(0, 256, (6 * records, 3073), dtype=np.uint8)
    every[:, 0] %= 10
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
    for number, name in enumerate(names):
        every[number * records : (number + 1) * records].tofile(folder / name)
    return every


def test_cifar10_binary_files(tmp_path: Path) -> None:
    every = _binary_cifar(tmp_path / "cifar-10-batches-bin")
    raw = sources.load("cifar10", tmp_path, False, {})
    assert raw.train[0].shape == (100, 32, 32, 3) and len(raw.test[1]) == 20
    record = every[7]
    assert raw.train[1][7] == record[0]
    assert raw.train[0][7, 2, 5, 1] == record[1 + 1024 + 2 * 32 + 5]  # green, row 2, column 5


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-5]), "expected a multiple of 3073"),
        (lambda p: p.write_bytes(b"\xff" + p.read_bytes()[1:]), "has a label 255"),
        (lambda p: p.unlink(), "data_batch_3.bin is missing"),
        (lambda p: p.write_bytes(b""), "has 0 bytes"),
    ],
)
def test_damaged_cifar10(tmp_path: Path, damage: object, message: str) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    _binary_cifar(folder)
    damage(folder / "data_batch_3.bin")  # type: ignore[operator]
    with pytest.raises(UserError) as caught:
        sources.load("cifar10", tmp_path, False, {})
    assert message in str(caught.value)


def test_data_that_is_replaced_makes_other_shards(tmp_path: Path) -> None:
    """And without the source's files the shards that were made of them are all there is."""
    folder = tmp_path / "cifar-10-batches-bin"
    _binary_cifar(folder)
    data = Data(source="cifar10", root=str(tmp_path), num_shards=2)
    first = Manifest.read(shards.prepare(data)).checksum
    assert Manifest.read(shards.prepare(data)).checksum == first
    batch = folder / "data_batch_2.bin"
    content = bytearray(batch.read_bytes())
    content[100] ^= 1
    batch.write_bytes(content)
    second = Manifest.read(shards.prepare(data)).checksum
    assert second != first
    shutil.rmtree(folder)
    assert Manifest.read(shards.prepare(data)).checksum == second


class _Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, (Path("bomb-went-off"),))  # type: ignore[return-value]


def test_a_pickle_that_is_not_official_is_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    bomb = pickle.dumps(_Bomb())
    (folder / "data_batch_1").write_bytes(bomb)
    with pytest.raises(UserError, match=r"expected the official .* it is a pickle"):
        sources.load("cifar10", tmp_path, False, {})
    with pytest.raises(UserError, match="which the official files do not"):  # the second lock behind the md5
        _read_batch(bomb)
    assert not (tmp_path / "bomb-went-off").exists()


def test_python_batches_are_read_where_their_md5_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib

    from torchvision.datasets import CIFAR10

    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    generator = np.random.default_rng(1)
    data = generator.integers(0, 256, (30, 3072), dtype=np.uint8)
    text = pickle.dumps({"data": data, "labels": [i % 10 for i in range(30)]}, protocol=2)
    text = text.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")  # as the official files name it
    names = [name for name, _ in CIFAR10.train_list] + ["test_batch"]
    for name in names:
        (folder / name).write_bytes(text)
    md5 = hashlib.md5(text).hexdigest()
    monkeypatch.setattr(CIFAR10, "train_list", [[name, md5] for name in names[:5]])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", md5]])
    raw = sources.load("cifar10", tmp_path, False, {})
    assert raw.train[0].shape == (150, 32, 32, 3)
    assert np.array_equal(raw.test[0][4].transpose(2, 0, 1).reshape(-1), data[4]) and raw.test[1][4] == 4


def test_missing_data_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"expected cifar-10-batches-bin/ or cifar-10-batches-py/"):
        sources.load("cifar10", tmp_path, False, {})
    with pytest.raises(UserError, match=r"synthetic has no option 'sizes'; did you mean 'size'"):
        sources.load("synthetic", tmp_path, False, {"sizes": 3})
    with pytest.raises(UserError, match="must be int, got 'x'"):
        sources.load("synthetic", tmp_path, False, {"n": "x"})


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UserError, match="cannot use"):
        shards.prepare(Data(source="digits", root=str(blocked)))


def _loader(manifest: Manifest, rank: int, size: int, **data: object) -> Loader:
    uneven = str(data.pop("uneven", "drop"))
    config = Config(global_batch_size=24, uneven=uneven, data=Data(**data))  # type: ignore[arg-type]
    return Loader(config, World(rank=rank, size=size), manifest, 24, 1)


def test_resident_and_prefetched_batches_are_the_same(made: Manifest) -> None:
    one, other = (_loader(made, 1, 2, resident=resident, prefetch=1) for resident in ("always", "never"))
    assert one.resident and not other.resident
    batches = list(zip(one.epoch(3, 1), other.epoch(3, 1)))
    assert len(batches) == 3
    for a, b in batches:
        assert torch.equal(a.ids, b.ids) and torch.equal(a.labels, b.labels) and a.total == b.total == 24
        assert torch.equal(a.images[a.rows], b.images[b.rows])


def test_an_epoch_can_be_left_early_and_errors_reach_the_caller(
    made: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    loader = _loader(made, 0, 1, resident="never")
    batches = loader.epoch(0)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name == "loader"]
    monkeypatch.setattr(Samples, "take", lambda self, ids: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(loader.epoch(0))


@pytest.mark.parametrize("uneven", ["drop", "pad", "weight"])
def test_own_slices_are_disjoint_and_of_one_length_in_steps(made: Manifest, uneven: str) -> None:
    loaders = [_loader(made, rank, 3, shuffle="shard", uneven=uneven) for rank in range(3)]
    assert len({loader.steps_per_epoch for loader in loaders}) == 1
    seen = [torch.cat([loader.ids(0, step)[0] for step in range(loader.steps_per_epoch)]) for loader in loaders]
    for mine, loader in zip(seen, loaders):
        low, high = loader.slices[loader.world.rank]
        assert low <= int(mine.min()) and int(mine.max()) < high
        assert len(loader.samples.images) == 1  # its own file only
    for mine, own in zip(seen, loaders[0].describe_slices()):
        assert own["samples"] - own["left_out"] == len(mine.unique()) and own["batch_size"] == 8
        assert loaders[1].describe_slices() == loaders[0].describe_slices()
    if uneven == "weight":
        assert sorted(torch.cat(seen).tolist()) == list(range(100))
    for step in range(loaders[0].steps_per_epoch):
        sizes = [len(loader.ids(0, step)[0]) for loader in loaders]
        assert all(loader.ids(0, step)[1] == sizes for loader in loaders)


def test_more_ranks_than_files(made: Manifest) -> None:
    with pytest.raises(UserError, match=r"set data.num_shards=4"):
        _loader(made, 0, 4, shuffle="shard")
