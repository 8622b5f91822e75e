"""A user's function as a source: what it may return, when it is called, and when not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import product
from tests.product import UserError

MODULE = """
import numpy as np
CLASSES = ["even", "odd"]
offset = 0

def pieces(split: str, root, n: int = 20, size: int = 3):
    assert root.is_dir()
    for low in range(0, n if split == "train" else 6, 7):
        numbers = np.arange(low, min(low + 7, n if split == "train" else 6))
        yield (numbers[:, None, None, None] + np.zeros((size, size, 3))).astype(np.uint8) + offset, numbers % 2

def whole(split, n=9):
    return np.full((n, 4), 0.5), np.arange(n) % 3

def wrong(split, what="text"):
    given = {"text": "nothing", "lists": ([1], [2]), "short": (np.zeros((3, 2)), np.zeros(2, int)),
             "three": [(1, 2, 3)], "nothing": []}
    return given[what]

def unreadable(split):
    open("/nowhere/at/all")

class NotAFunction:
    def __init__(self, split): open("called", "w")

def without_split(path):
    open("called", "w")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module `own_source` that Python finds in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "own_source.py"
    path.write_text(MODULE)
    yield path
    sys.modules.pop("own_source", None)


def _shards(source: str, **options: object) -> Any:
    return product.prepared(product.data(source=f"own_source:{source}", root="data", options=options))


@pytest.mark.promise("sources")
def test_pieces_or_the_whole(module: Path) -> None:
    shards = _shards("pieces", n=30)
    assert (shards.count("train"), shards.count("test"), shards.shape, shards.classes) == (
        30,
        6,
        (3, 3, 3),
        ["even", "odd"],
    )
    numbers = np.arange(30)
    images = np.broadcast_to(numbers[:, None, None, None], (30, 3, 3, 3)).astype(np.uint8)
    train, test = ((images[:n], numbers[:n] % 2) for n in (30, 6))
    assert shards.checksum == product.sharded(module.parent / "same", train, test, ["even", "odd"]).checksum
    sys.modules["own_source"].CLASSES = None  # type: ignore[attr-defined]
    whole = _shards("whole")
    assert (whole.count("train"), whole.shape, whole.classes) == (9, (4,), ["class 0", "class 1", "class 2"])


@pytest.mark.promise("sources")
def test_its_code_and_its_arguments_make_other_shards(module: Path) -> None:
    first = _shards("pieces").directory
    assert _shards("pieces", n=21).directory != first == _shards("pieces").directory
    module.write_text(MODULE.replace("offset = 0", "offset = 1"))
    assert _shards("pieces").directory != first


@pytest.mark.parametrize(
    ("source", "options"),
    [
        *(("wrong", {"what": what}) for what in ("text", "lists", "short", "three", "nothing")),
        ("pieces", {"m": 1}), ("without_split", {}), ("NotAFunction", {}), ("none", {}), ("unreadable", {}),
    ],
)  # fmt: skip
def test_what_is_no_source(module: Path, source: str, options: dict[str, object]) -> None:
    with pytest.raises(UserError, match=source if source != "pieces" else "pieces cannot be called .* argument 'm'"):
        _shards(source, **options)
    assert not Path("called").exists() and not [path for path in Path("data/shards").glob("*") if path.is_dir()]
