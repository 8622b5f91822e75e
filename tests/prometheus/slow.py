"""A network with a steady step, and a rank that is told to be slow: `LOCKSTEP_TEST_SLOW=1:backward` or `1:data`."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from tests.nets import SmallConv
from training.data.loader import Batch, Loader

PACE, DELAY = 0.03, 0.12
"""Seconds of every rank's forward pass, and of the slow rank's delay: well above this machine's noise."""

_rank, _, _where = os.environ.get("LOCKSTEP_TEST_SLOW", "").partition(":")
_where = _where if os.environ.get("RANK") == _rank else ""


class Paced(SmallConv):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        if not self.training:
            return out
        time.sleep(PACE)
        if _where == "backward" and out.requires_grad:
            out.register_hook(_sleep)
        return out


def _sleep(grad: torch.Tensor) -> torch.Tensor:
    time.sleep(DELAY)
    return grad


if _where == "data":
    _batch: Any = Loader.resident_batch

    def _slow_batch(self: Loader, epoch: int, step: int) -> Batch:
        time.sleep(DELAY)
        return _batch(self, epoch, step)

    Loader.resident_batch = _slow_batch  # type: ignore[method-assign]
