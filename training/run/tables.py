"""Tables that modules have in plain attributes: tensors and arrays, such as random features, and lists of whole numbers, such as a
permutation. `replicate` sends parameters and buffers alone, and so does a checkpoint: a table that is drawn must be the same on each rank
and at each start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from ..checkpoint.user_state import UserState
from ..contract import UserError, named
from ..parallel.exchange import all_gather_trees, raise_together
from ..parallel.names import plain_name
from ..parallel.world import World
from .proof import text_of

_DERIVED = ("_orig", "_g", "_v")
"""A parametrization keeps its parameters under a name with one of these endings, and computes the attribute anew in each pass."""


def check_tables(model: nn.Module, kept: UserState, world: World, warn: Callable[[str], None]) -> None:
    """Compares the tables of the ranks, and with those of the start before. Collective.

    Raises:
        UserError: on all ranks: a table is not the same on all.
    """
    tables = {plain_name(model, name): text_of(value) or "" for name, value in _tables(model)}
    every = all_gather_trees(tables, world)
    for name, first in every[0].items():
        if other := [rank for rank, found in enumerate(every) if found.get(name) != first]:
            error = UserError(
                f"the attribute {name} of the model is another one on rank {named(other)} than on rank 0, and run.replicate() sends "
                "parameters and buffers alone: make it a buffer (register_buffer), or make the model within the Session, which seeds all "
                "ranks alike"
            )
            raise_together(error, world)
    before, kept.tables = kept.tables, tables
    changed = [name for name, digest in tables.items() if before.get(name, digest) != digest]
    if changed:
        warn(
            f"the attribute {changed[0]} of the model is another one than at the start before, and no checkpoint has it: make it a buffer "
            "(register_buffer), or make the model within the Session, which seeds each start alike"
        )


def _tables(model: nn.Module) -> Iterator[tuple[str, Any]]:
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if any(f"{name}{ending}" in module._parameters for ending in _DERIVED) or id(value) in own:
                continue
            is_tensor = isinstance(value, torch.Tensor) and not value.requires_grad and value.numel() > 1
            is_array = isinstance(value, np.ndarray) and not value.dtype.hasobject and value.size > 1
            if is_tensor or is_array or (isinstance(value, (list, tuple)) and len(value) > 1 and _are_whole(value)):
                yield f"{path}.{name}".lstrip("."), value


def _are_whole(values: Any) -> bool:
    return all(type(value) is int or isinstance(value, np.integer) for value in values)
