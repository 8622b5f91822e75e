"""Names of a network's tensors, the same whether the network is compiled or wrapped.

Checkpoints, hashes, exported weights and files of weights all use these names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import TypeVar

from torch import nn

T = TypeVar("T")

COMPILED = "_orig_mod"
_HIDDEN = (COMPILED, "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Attributes in which torch.compile, FSDP and activation checkpointing keep the wrapped module."""
_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)
"""Wrappers that keep the network in `module`, a name that a network may also use."""


def plain_name(model: nn.Module, name: str) -> str:
    """Returns the name of a module or tensor of `model` without the names that wrappers add."""
    kept: list[str] = []
    at: nn.Module | None = model
    for part in name.split("."):
        if part not in _HIDDEN and not (part == "module" and isinstance(at, _PARALLEL)):
            kept.append(part)
        at = getattr(at, "_modules", {}).get(part)
    return ".".join(kept)


def plain(model: nn.Module, named: Mapping[str, T]) -> dict[str, T]:
    """Returns `named` by the plain names."""
    return {plain_name(model, name): value for name, value in named.items()}


def unwrapped(module: nn.Module) -> nn.Module:
    """Returns the module inside the wrappers around `module`."""
    while inner := next((module._modules[name] for name in _HIDDEN if name in module._modules), None):
        module = inner
    return unwrapped(module.module) if isinstance(module, _PARALLEL) else module


def matched(weights: Mapping[str, T], expected: Collection[str]) -> dict[str, T]:
    """Returns the weights under the expected names, wherever wrappers' names are the only difference. Others keep their names."""
    targets = {_bare(name): name for name in expected if name not in weights}
    sources = Counter(_bare(name) for name in weights if name not in expected)

    def target(name: str) -> str:
        bare = _bare(name)
        return targets.get(bare, name) if name not in expected and sources[bare] == 1 else name

    return {target(name): value for name, value in weights.items()}


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in (*_HIDDEN, "module"))
