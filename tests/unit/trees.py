"""States as a run saves them, at random, and whether two are the same to the last bit."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


_leaves = (
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=5)
    | st.builds(
        lambda kind, shape: (torch.rand(shape) * 9).to(kind),
        st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3),
    )
)  # fmt: skip


trees = st.recursive(
    _leaves,
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(st.text(max_size=4) | st.integers(-9, 9), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
