from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given

from lockstep.training.parallel.exchange import join, pack, split, unpack
from tests.unit.trees import same, trees


@given(trees)
def test_trees_survive_both_ways_of_travelling(tree: Any) -> None:
    plain, tensors = split(tree)
    assert same(join(json.loads(json.dumps(plain)), tensors), tree) and same(unpack(pack(tree)), tree)


def test_what_cannot_travel_is_named() -> None:
    for tree, named in (({"x": [Path()]}, "PosixPath"), (torch.zeros(1, dtype=torch.complex64), "complex64")):
        with pytest.raises(TypeError, match=named):
            split(tree)
