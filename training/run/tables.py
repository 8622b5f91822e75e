"""Tables that modules have in plain attributes: tensors and arrays, such as random features, and long lists of whole numbers, such as a
permutation. `replicate` sends parameters and buffers alone, and so does a checkpoint: a table that is drawn must be the same on each rank
and at each start.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..checkpoint.user_state import UserState
from ..contract import named
from ..parallel.exchange import all_gather_trees
from ..parallel.names import plain_name
from ..parallel.world import World
from .proof import text_of

SHORT = 16
"""Most whole numbers of a list that is no table: a rank may have others, such as its experts, or the ranks of its group."""
_DERIVED = ("_orig", "_g", "_v")
"""A parametrization keeps its parameters under a name with one of these endings, and computes the attribute anew in each pass."""


def check_tables(
    model: nn.Module, made: Collection[Any], kept: UserState, world: World, warn: Callable[[str], None]
) -> None:
    """Compares the tables of the ranks, and with those of the start before, and warns where one is another. Collective.

    Args:
        made: the values that the modules had when they were replicated. A pass since then may have left others, such as the last attention.
    """
    ids = {id(value) for value in made}
    tables = {plain_name(model, name): text_of(value) or "" for name, value in tables_of(model) if id(value) in ids}
    every = all_gather_trees(tables, world)
    before, kept.tables = kept.tables, tables
    apart = {
        name: [rank for rank, found in enumerate(every) if found.get(name) != first] for name, first in every[0].items()
    }
    mend = "make it a buffer (register_buffer), or draw it by a fixed seed"
    if unlike := [name for name, ranks in apart.items() if ranks]:
        warn(
            f"the attribute {first_of(unlike)} of the model is another one on rank {named(apart[unlike[0]])} than on rank 0, and "
            f"run.replicate() sends parameters and buffers alone: unless it is to be a rank's own, {mend}"
        )
    changed = [name for name, digest in tables.items() if before.get(name, digest) != digest and not apart.get(name)]
    if changed:
        warn(
            f"the attribute {first_of(changed)} of the model is another one than at the start before, and no checkpoint has it: {mend}"
        )


def tables_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The tables by their names. What shares the memory of a parameter or buffer is none."""
    own = storages([*model.parameters(), *model.buffers()])
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if any(f"{name}{ending}" in module._parameters for ending in _DERIVED):
                continue
            is_tensor = isinstance(value, torch.Tensor) and not value.requires_grad and storage(value) not in own
            is_array = isinstance(value, np.ndarray) and not value.dtype.hasobject
            if (is_tensor and value.numel() > 1) or (is_array and value.size > 1) or _is_long(value):
                yield f"{path}.{name}".lstrip("."), value


def _is_long(value: Any) -> bool:
    """Whether it is a list of many whole numbers."""
    if not isinstance(value, (list, tuple)) or len(value) <= SHORT:
        return False
    return all(type(one) is int or isinstance(one, np.integer) for one in value)


def first_of(names: Sequence[str]) -> str:
    """The first name, and how many more there are."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def storage(tensor: torch.Tensor) -> int | None:
    """The address of its memory. None: it has none, as a tensor that is lazy, sparse, sharded or of a class that wraps others."""
    try:
        return tensor.untyped_storage().data_ptr() or None
    except Exception:  # noqa: BLE001 - they raise nearly anything
        return None


def storages(tree: Any) -> set[int | None]:
    """The addresses of its tensors, and None, so that a tensor without one counts as one of them."""
    return {storage(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)} | {None}
