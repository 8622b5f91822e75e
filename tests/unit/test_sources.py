"""Fashion-MNIST's idx files, feature vectors, and the exercise's split."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.training import config
from lockstep.training.contract import UserError
from lockstep.training.data import shards, sources
from lockstep.training.data.augment import augment, check_settings, draw_keys, normalise
from lockstep.training.data.shards import Samples
from tests.idx import write_fashion


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("folder", ["", "FashionMNIST/raw", "fashion-mnist"])
def test_idx_files_packed_or_not(tmp_path: Path, folder: str, packed: bool) -> None:
    images, labels = write_fashion(tmp_path / folder, 30, 12, packed)
    raw = sources.load("fashion_mnist", tmp_path, False, {})
    assert raw.train[0].shape == (30, 28, 28, 1) and raw.test[0].shape == (12, 28, 28, 1)
    assert np.array_equal(raw.train[0][..., 0], images) and np.array_equal(raw.train[1], labels)
    assert raw.train[1].dtype == np.int64 and len(raw.classes) == 10


def _edit(path: Path, change: object) -> None:
    path.write_bytes(change(path.read_bytes()))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("train-images-idx3-ubyte", lambda b: b[:-5], "bytes of data, its header says [30, 28, 28]"),
        ("train-images-idx3-ubyte", lambda b: b + b"0", "has more bytes of data"),
        ("train-images-idx3-ubyte", lambda b: b[:7], "is not an idx file"),
        ("train-images-idx3-ubyte", lambda b: b"\0\0\x0d\x03" + b[4:], "is not an idx file of uint8"),
        ("train-images-idx3-ubyte", lambda b: b[:4] + b"\x7f\xff\xff\xff" * 3 + b[16:], "at most"),
        ("train-images-idx3-ubyte", lambda b: b[:4] + b"\xff\xff\xff\xff" + b[8:], "it is corrupt"),
        ("train-labels-idx1-ubyte", lambda b: b[:4] + b"\0\0\0\x02" + b[8:10], "30 images"),
        ("t10k-labels-idx1-ubyte", lambda b: b[:-1] + b"\x0a", "has a label 10"),
    ],
)
def test_damaged_idx_files_are_named(tmp_path: Path, file: str, change: object, message: str) -> None:
    write_fashion(tmp_path, 30, 12, packed=False)
    _edit(tmp_path / file, change)
    with pytest.raises(UserError) as caught:
        sources.load("fashion_mnist", tmp_path, False, {})
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_packed_file_that_is_cut_off_or_grows_without_end(tmp_path: Path) -> None:
    write_fashion(tmp_path, 30, 12, packed=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(UserError, match="cannot read"):
        sources.load("fashion_mnist", tmp_path, False, {})
    path.write_bytes(gzip.compress(gzip.decompress(whole) + bytes(1 << 20)))
    with pytest.raises(UserError, match="has more bytes"):
        sources.load("fashion_mnist", tmp_path, False, {})
    path.write_bytes(b"\x1f\x8b nonsense")
    with pytest.raises(UserError, match="cannot read"):
        sources.load("fashion_mnist", tmp_path, False, {})


def test_missing_idx_files_say_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"expected train-images-idx3-ubyte\[.gz\]"):
        sources.load("fashion_mnist", tmp_path, False, {})
    write_fashion(tmp_path, 3, 3, packed=False)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(UserError, match="t10k-labels-idx1-ubyte.* is missing"):
        sources.load("fashion_mnist", tmp_path, False, {})


def test_feature_vectors_pass_through_shards_and_are_normalised(tmp_path: Path) -> None:
    raw = sources.load(
        "classification",
        tmp_path,
        False,
        {"n": 50, "features": 12, "informative": 8, "redundant": 2, "classes": 3, "clusters": 2},
    )
    assert raw.train[0].shape == (45, 12) and raw.test[0].shape == (5, 12) and raw.train[0].dtype == np.float32
    made = shards.write(raw, tmp_path / "shards", "classification", 3)
    assert made.shape == (12,) and made.dtype == torch.float32
    samples = Samples.open(made, "train", 0, 45)
    ids = torch.tensor([44, 0, 17])
    taken, labels = samples.take(ids)
    assert np.array_equal(taken.numpy(), raw.train[0][ids]) and labels.tolist() == raw.train[1][ids].tolist()
    assert samples.num_bytes == 45 * 12 * 4
    data = config.Data(source="classification", mean=[1.0], std=[2.0])
    expected = (torch.from_numpy(raw.train[0][ids]) - 1) / 2
    torch.testing.assert_close(normalise(taken, data, torch.float32, False), expected)
    whole = samples.all()[0]
    torch.testing.assert_close(augment(whole, ids, ids, data, draw_keys(0, 0)), expected)


def test_the_exercise_holds_nothing_out(tmp_path: Path) -> None:
    options = {"n": 50, "features": 12, "informative": 8, "redundant": 2, "classes": 3, "clusters": 2}
    honest = sources.load("classification", tmp_path, False, options)
    exercise = sources.load("classification", tmp_path, False, options, "exercise")
    assert len(honest.train[1]) == 45 and not (honest.test[0][:, None] == honest.train[0][None]).all(2).any()
    assert np.array_equal(exercise.train[0], honest.train[0][:5]) and np.array_equal(
        exercise.test[0], exercise.train[0]
    )


@pytest.mark.parametrize(
    ("recipe", "words", "shape", "message"),
    [
        ("resnet9", [], (28, 28, 1), "data.mean has 3 numbers, but the images have 1 channels"),
        ("mlp", ["data.std=[1,2]"], (1024,), "data.std has 2 numbers, but the samples have 1024 features"),
        ("mlp", ["augment.flip=random"], (1024,), "cannot be cropped, flipped"),
        ("mlp", ["tta=flip"], (1024,), "set crop=0 flip=none cutout=0 tta=none"),
    ],
)
def test_settings_that_do_not_fit_the_samples(
    recipe: str, words: list[str], shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        check_settings(config.load(recipe, words), shape)
    assert message in str(caught.value)
    check_settings(config.load("resnet9"), (32, 32, 3))
    check_settings(config.load("fashion_cnn"), (28, 28, 1))


def test_an_option_that_make_classification_refuses(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^classification: ") as caught:
        sources.load("classification", tmp_path, False, {"n": 50, "features": 5})
    assert "\n" not in str(caught.value)
