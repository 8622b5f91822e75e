"""What every source of `sources.SOURCES` does alike. A new row is tested by being there; one that reads files has its in `FILES`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.training.contract import UserError
from lockstep.training.data import sources
from lockstep.training.data.sources.raw import Raw
from tests.idx import write_fashion


def _cifar10(folder: Path) -> None:
    draw = np.random.default_rng(0)
    for name in [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]:
        records = draw.integers(0, 256, (20, 3073), np.uint8)
        records[:, 0] = np.arange(20) % 10
        (folder / "cifar-10-batches-bin").mkdir(exist_ok=True)
        (folder / "cifar-10-batches-bin" / name).write_bytes(records.tobytes())


FILES: dict[str, Callable[[Path], Any]] = {
    "cifar10": _cifar10,
    "fashion_mnist": lambda folder: write_fashion(folder, 30, 20, packed=False),
}
"""Name → what writes small files of that source."""
SMALL: dict[str, dict[str, Any]] = {
    "synthetic": {"n": 40, "n_test": 20, "size": 8},
    "classification": {"n": 400, "features": 20, "informative": 10, "redundant": 5, "classes": 4, "clusters": 2},
}


@pytest.fixture(params=[name for name in sources.SOURCES if name in sources.GENERATED or name in FILES])
def read(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Raw]:
    """`read(**options)`: the source, from files where it reads some."""
    name = str(request.param)
    if name in FILES:
        FILES[name](tmp_path)
    return lambda **options: sources.load(name, tmp_path, False, {**SMALL.get(name, {}), **options})


def test_samples_and_labels_have_one_layout(read: Callable[..., Raw]) -> None:
    raw = read()
    for samples, labels in (raw.train, raw.test):
        assert len(samples) == len(labels) > 0 and labels.dtype == np.int64
        assert (samples.dtype, samples.ndim) in ((np.uint8, 4), (np.float32, 2)), "uint8 [n, h, w, c] or float32 [n, f]"
        assert labels.min() >= 0 and labels.max() < len(raw.classes)
    assert raw.train[0].shape[1:] == raw.test[0].shape[1:] and len(set(raw.classes)) == len(raw.classes)


def test_the_same_settings_read_the_same_samples(read: Callable[..., Raw]) -> None:
    first, second = read(), read()
    for one, other in zip((*first.train, *first.test), (*second.train, *second.test)):
        assert np.array_equal(one, other)


def test_an_option_that_it_does_not_have_is_named(read: Callable[..., Raw]) -> None:
    with pytest.raises(UserError, match="has no option 'no_such'"):
        read(no_such=1)


def test_no_test_image_is_a_training_image_by_its_place(read: Callable[..., Raw]) -> None:
    raw = read()
    assert not np.shares_memory(raw.train[0], raw.test[0])


@pytest.mark.parametrize("name", sources.SOURCES)
def test_every_source_is_told_apart(name: str) -> None:
    """It is generated, or its files are known: shards are made again when those change."""
    assert (name in sources.GENERATED) != (name in sources.FILES)
    assert inspect.getdoc(sources.SOURCES[name])
    assert (name in FILES) != (name in sources.GENERATED), "give the contract test files to read"
