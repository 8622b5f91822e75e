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
    "fashion_mnist": lambda folder: write_fashion(folder, 30, 20, packed=False),
}
"""Name → what writes small files of that source."""
SMALL: dict[str, dict[str, Any]] = {
    "synthetic": {"n": 40, "n_test": 20, "size": 8},
    "classification": {"n": 400, "features": 20, "informative": 10, "redundant": 5, "classes": 4, "clusters": 2},
}


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
    with pytest.raises(product.UserError, match="no_such"):
        product.source(name, tmp_path, no_such=1)


def test_the_exercise_holds_nothing_out(tmp_path: Path) -> None:
    options = {"n": 50, "features": 12, "informative": 8, "redundant": 2, "classes": 3, "clusters": 2}
    about = {"source": "classification", "root": str(tmp_path), "options": options}
    (train, _), (test, _), (seen, _), (again, _) = (
        product.split(product.prepared(product.data(**about, split=way)), split)
        for way in ("honest", "exercise") for split in ("train", "test")
    )  # fmt: skip
    assert len(train) == 45 and not (test[:, None] == train[None]).all(2).any()
    assert np.array_equal(seen, train[:5]) and np.array_equal(again, seen)
    with pytest.raises(product.UserError, match="^classification: "):
        sources.load("classification", tmp_path, False, {"n": 50, "features": 5})
