"""Gradient synchronisation. A strategy is one file with one class, and one row in `STRATEGIES`."""

from __future__ import annotations

import importlib
from typing import cast

from training import settings as typed
from training.config import Sync
from training.sync.base import GradientSync

STRATEGIES = {
    "ddp": "training.sync.ddp:Ddp",
    "allreduce": "training.sync.allreduce:AllReduce",
    "flat": "training.sync.flat:Flat",
    "hooks": "training.sync.hooks:Hooks",
    "horovod": "training.sync.horovod:Horovod",
    "zero1": "training.sync.zero1:Zero1",
    "powersgd": "training.sync.powersgd:PowerSgd",
    "bf16_compress": "training.sync.bf16_compress:Bf16Compress",
    "fsdp": "training.sync.fsdp:Fsdp",
    "data_parallel": "training.sync.data_parallel:DataParallel",
}
"""Imported when they are used: torch's sharding takes a second to load."""


def build(settings: Sync | str) -> GradientSync:
    """The strategy of that name, or that `settings` describe. Raises `UserError` for a name or an option that is unknown."""
    if isinstance(settings, str):
        settings = typed.build(Sync, {"name": settings}, "sync", "sync.")
    module, _, name = STRATEGIES[settings.name].partition(":")
    return cast(type[GradientSync], getattr(importlib.import_module(module), name))(settings)
