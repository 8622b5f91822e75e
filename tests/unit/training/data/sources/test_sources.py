"""What every source of `sources.SOURCES` does alike. A new row is tested by being there; one that reads files has its in `FILES`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.training.data import sources
from tests import product
from tests.idx import write_fashion
from tests.pictures import write_cifar10

pytestmark = pytest.mark.promise("sources")


FILES: dict[str, Callable[[Path], Any]] = {
    "cifar10": write_cifar10,
    "fashion_mnist": lambda folder: write_fashion(folder / "FashionMNIST/raw", 30, 20),
}
"""Name → what writes small files of that source."""
SMALL: dict[str, dict[str, Any]] = {
    "synthetic": {"n": 40, "n_test": 20, "size": 8},
    "classification": {"n": 400, "features": 20, "informative": 10, "redundant": 5, "classes": 4, "clusters": 2},
}


GENERATOR = np.random.default_rng(0)
IMAGES = GENERATOR.integers(0, 256, (120, 4, 5, 3), dtype=np.uint8)
LABELS = GENERATOR.integers(0, 3, 120)
VECTORS = GENERATOR.normal(size=(120, 7))


@pytest.mark.parametrize("name", sources.SOURCES)
def test_samples_have_one_layout_and_are_the_same_each_time(name: str, tmp_path: Path) -> None:
    assert (name in FILES) == (name in sources.FILES), "give this test files to read"
    assert inspect.getdoc(sources.SOURCES[name])
    FILES.get(name, lambda folder: None)(tmp_path)
    raw, again = (product.source(name, tmp_path, **SMALL.get(name, {})) for _ in range(2))
    for split in ("train", "test"):
        samples, labels = getattr(raw, split)
        assert len(samples) == len(labels) > 0 and labels.dtype == np.int64
        assert (samples.dtype, samples.ndim) in ((np.uint8, 4), (np.float32, 2)), "uint8 [n, h, w, c] or float32 [n, f]"
        assert labels.min() >= 0 and labels.max() < len(raw.classes) == len(set(raw.classes))
        assert all(map(np.array_equal, getattr(again, split), (samples, labels)))
    assert raw.train[0].shape[1:] == raw.test[0].shape[1:] and not np.shares_memory(raw.train[0], raw.test[0])
    for option in ("no_such", "root"):
        with pytest.raises(product.UserError, match=option):
            sources.load(name, tmp_path, {option: "x"})


@pytest.mark.parametrize(("option", "value"), [("n", 0), ("n", 2.5), ("size", "8"), ("noise", -1)])
def test_an_option_of_another_type_or_size_is_named(option: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(product.UserError, match=rf"^data\.options\.{option} of synthetic: Input should be .*, got"):
        product.source("synthetic", tmp_path, **{option: value})


def test_the_exercise_holds_nothing_out(tmp_path: Path) -> None:
    options = {"n": 50, "features": 12, "informative": 8, "redundant": 2, "classes": 3, "clusters": 2}
    about = {"source": "classification", "root": str(tmp_path), "options": options}
    (train, _), (test, _), (exercise_train, _), (exercise_test, _) = (
        product.split(product.prepared(product.data(**about, split=way)), split)
        for way in ("honest", "exercise") for split in ("train", "test")
    )  # fmt: skip
    assert len(train) == 45 and not (test[:, None] == train[None]).all(2).any()
    assert np.array_equal(exercise_train, train[:5]) and np.array_equal(exercise_test, exercise_train)
    with pytest.raises(product.UserError, match="^classification: "):
        sources.load("classification", tmp_path, {"n": 50, "features": 5})


@pytest.mark.parametrize("samples", [VECTORS.astype(">f2"), IMAGES, np.asfortranarray(IMAGES)])
def test_arrays_of_any_layout_are_stored_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: np.ndarray
) -> None:
    monkeypatch.setattr("lockstep.training.data.sources.raw.PIECE_BYTES", 7 * samples[0].nbytes)  # 18 pieces
    labels = LABELS.astype(np.uint8)
    shards = product.sharded(tmp_path / "made", (samples, labels), (samples[:9], labels[:9]), ["a", "b", "c"])
    assert all(map(np.array_equal, product.split(shards, "train"), (samples, LABELS)))
    assert shards.classes == ["a", "b", "c"] and shards.count("test") == 9


UNFIT: dict[str, tuple[np.ndarray, np.ndarray]] = {
    r", int64 \[119\]\), expected": (IMAGES, LABELS[:-1]),
    "labels -1 …": (IMAGES, LABELS - 1),
    r"uint8 \[120, 3, .*expected \(uint8 images": (
        np.ascontiguousarray(np.repeat(IMAGES, 2, 2).transpose(0, 3, 1, 2)),
        LABELS,
    ),
    r"uint8 images \[n, h, w, c\]": (IMAGES.astype(np.int64), LABELS),
    "not a finite": (np.where(VECTORS > 2, np.nan, VECTORS), LABELS),
    "names 3 classes": (IMAGES, LABELS + 1),
    "test samples of uint8": (VECTORS, LABELS),
}
"""What the error says → training samples and labels."""


@pytest.mark.promise("hostile-files")
@pytest.mark.parametrize("named", UNFIT)
def test_samples_that_no_shard_can_hold(tmp_path: Path, named: str) -> None:
    with pytest.raises(product.UserError, match=named) as caught:
        product.sharded(tmp_path / "made", UNFIT[named], (IMAGES, LABELS), ["a", "b", "c"])
    assert "\n" not in str(caught.value) and not (tmp_path / "made").exists()


def test_a_class_without_a_training_sample_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    labels = np.where(np.arange(120) == 7, 255, LABELS)  # the mark of a label that is to be ignored, say
    product.sharded(tmp_path / "made", (IMAGES, labels), (IMAGES, LABELS), [f"class {number}" for number in range(256)])
    warning = capfd.readouterr().err
    assert "for 252 of 256 classes (class 3, class 4," in warning and "largest label is 255" in warning
