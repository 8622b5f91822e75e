"""Gradient synchronisation. A strategy is one class: a built-in one is a row in `STRATEGIES`, and users name others by import path."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ..config import Sync
from ..config import settings as typed
from ..config.settings import imported
from ..contract import UserError
from .base import GradientSync

STRATEGIES = {
    "ddp": "lockstep.training.sync.ddp:Ddp",
    "flat": "lockstep.training.sync.buckets:Flat",
    "zero1": "lockstep.training.sync.zero1:Zero1",
    "bf16_compress": "lockstep.training.sync.buckets:Bf16Compress",
    "exact": "lockstep.training.sync.exact:Exact",
}
"""Name → import path of the built-in strategies, which `build` imports on use."""


def build(settings: Sync | Mapping[str, Any] | str) -> GradientSync:
    """Returns the strategy that `settings` describe. A text is its name: one of `STRATEGIES`, or `package.module:Class`. A mapping has
    its name and options: `{"name": "exact", "options": {"parts": 4}}`.

    Raises:
        UserError: there is no such strategy or option, or the class is no `GradientSync`, or cuts batches into parts.
    """
    if isinstance(settings, str):
        settings = {"name": settings}
    if not isinstance(settings, Sync):
        settings = typed.build(Sync, dict(settings), "sync", "sync.")
    target = STRATEGIES.get(settings.name, settings.name)
    factory = imported(target, "sync.name")
    if not (isinstance(factory, type) and issubclass(factory, GradientSync)) or inspect.isabstract(factory):
        raise UserError(
            f"sync.name={target} is no strategy: name a class that extends lockstep.training.sync.base.GradientSync, with its abstract "
            f"methods, or one of {', '.join(STRATEGIES)}"
        )
    strategy = factory(settings)
    if strategy.batch_parts is not None and settings.name != "exact":
        raise UserError(
            f"sync.name={target} cuts batches into parts, and only sync.name=exact has the deterministic kernels that these need: set "
            "that name, or leave batch_parts out of the class"
        )
    return strategy
