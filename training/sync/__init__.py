"""Gradient synchronisation. A strategy is one file with one class, and one row in `STRATEGIES`."""

from __future__ import annotations

from training.config import Sync
from training.sync.base import GradientSync
from training.sync.ddp import Ddp
from training.sync.flat import Flat

STRATEGIES: dict[str, type[GradientSync]] = {"ddp": Ddp, "flat": Flat}


def build(settings: Sync) -> GradientSync:
    return STRATEGIES[settings.name](settings)
