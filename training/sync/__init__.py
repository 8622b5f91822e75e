"""Gradient synchronisation. A strategy is one class, and one row in `STRATEGIES`."""

from __future__ import annotations

import importlib
from typing import cast

from ..config import Sync
from ..config import settings as typed
from ..contract import UserError
from .base import GradientSync

STRATEGIES = {
    "ddp": "lockstep.training.sync.ddp:Ddp",
    "allreduce": "lockstep.training.sync.teaching.strategies:AllReduce",
    "flat": "lockstep.training.sync.flat:Flat",
    "hooks": "lockstep.training.sync.teaching.strategies:Hooks",
    "horovod": "lockstep.training.sync.teaching.horovod:Horovod",
    "zero1": "lockstep.training.sync.flat:Zero1",
    "powersgd": "lockstep.training.sync.powersgd:PowerSgd",
    "bf16_compress": "lockstep.training.sync.flat:Bf16Compress",
    "exact": "lockstep.training.sync.exact:Exact",
    "fsdp": "lockstep.training.sync.fsdp:Fsdp",
    "data_parallel": "lockstep.training.sync.teaching.strategies:DataParallel",
}
"""Imported when they are used: torch's sharding takes a second to load."""


def build(settings: Sync | str) -> GradientSync:
    """The strategy of that name, or that `settings` describe. Raises `UserError` for a name or an option that is unknown."""
    if isinstance(settings, str):
        settings = typed.build(Sync, {"name": settings}, "sync", "sync.")
    module, _, name = STRATEGIES[settings.name].partition(":")
    return cast(type[GradientSync], getattr(importlib.import_module(module), name))(settings)


def from_words(arguments: list[str]) -> GradientSync:
    """The strategy that a script's command-line arguments name, NAME [OPTION=VALUE …]: `powersgd rank=4 start=50`.

    Raises `UserError` for a name or an option that is unknown.
    """
    if not arguments:
        raise UserError(f"no strategy is given: name one of {', '.join(STRATEGIES)}, and its options as NAME=VALUE")
    options = {}
    for argument in arguments[1:]:
        option, equals, value = argument.partition("=")
        if not equals or not option:
            raise UserError(f"an option of a strategy is NAME=VALUE, got {argument!r}")
        options[option] = typed.parse_yaml(value, option)
    return build(typed.build(Sync, {"name": arguments[0], "options": options}, "sync", "sync."))
