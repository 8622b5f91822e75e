"""A network with a steady step, and a rank that a variable makes slow: `LOCKSTEP_TEST_SLOW=1:backward` or `1:data`.

`LOCKSTEP_TEST_HOLD=FILE` holds every rank in its 20th training pass until FILE is there; the third one gives NaN.
With `LOCKSTEP_TEST_TOGETHER` the ranks wait for one another in that pass, where it is no wait for a sum. So none is a straggler,
whatever the machine does to one of them.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from tests import product
from tests.nets import SmallConv

PACE, DELAY = 0.03, 0.3
"""Seconds of every rank's forward pass, and of the slow rank's delay: well above this machine's noise."""

BAD_PASS, HELD_PASS = 3, 20

_rank, _, _where = os.environ.get("LOCKSTEP_TEST_SLOW", "").partition(":")
_where = _where if os.environ.get("RANK") == _rank else ""


class Paced(SmallConv):
    passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        if not self.training:
            return out
        self.passes += 1
        time.sleep(PACE)
        if os.environ.get("LOCKSTEP_TEST_TOGETHER"):
            torch.distributed.barrier()
        hold = os.environ.get("LOCKSTEP_TEST_HOLD")
        if hold and self.passes == BAD_PASS:
            out = out * float("nan")
        while hold and self.passes == HELD_PASS and not Path(hold).exists():
            time.sleep(0.02)
        if _where == "backward" and out.requires_grad:
            out.register_hook(_sleep)
        return out


def _sleep(grad: torch.Tensor) -> torch.Tensor:
    time.sleep(DELAY)
    return grad


if _where == "data":
    product.before_each_batch(lambda: time.sleep(DELAY))
