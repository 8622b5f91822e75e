"""Small networks for tests, given to the package as a user would: `--set model=tests.nets:SmallConv`."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class SmallConv(nn.Module):
    """Two convolutions and no batch statistics: the same function of a sample at every world size."""

    def __init__(self, num_classes: int = 10, width: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.head = nn.Linear(2 * width, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return self.head(x.mean((2, 3)))


class NormedConv(SmallConv):
    """With ordinary batch norm and dropout: batch statistics and generators differ by rank."""

    def __init__(self, num_classes: int = 10, width: int = 8) -> None:
        super().__init__(num_classes, width)
        self.norm = nn.BatchNorm2d(2 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.norm(self.conv2(F.relu(self.conv1(x)))), 0.2, self.training)
        return self.head(F.relu(x).mean((2, 3)))


class Sociable(SmallConv):
    """Works among several ranks, and fails alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.distributed.get_world_size() == 1:
            raise ArithmeticError("nobody is here")
        return super().forward(x)


class _Fated:
    """Runs into what `LOCKSTEP_TEST_FATE` says: `rank:n:what`, e.g. `1:7:KILL` in rank 1's 7th training forward pass.

    A negative n counts the passes of evaluation.
    """

    training: bool

    def __init__(self, num_classes: int = 10, width: int = 8) -> None:
        super().__init__(num_classes, width)  # type: ignore[call-arg]
        self.passes = self.scored = 0
        watch_writes()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        self.scored += not self.training
        x = meet_fate(self.passes if self.training else -self.scored, self, x)
        return super().forward(x)  # type: ignore[misc]


class Dying(_Fated, NormedConv):
    """With batch statistics and dropout."""


class DyingPlain(_Fated, SmallConv):
    """The same function of a sample at every world size."""


def _happened_before() -> bool:
    """With `LOCKSTEP_TEST_ONCE=FILE`, a fate strikes only in the first of several starts."""
    once = os.environ.get("LOCKSTEP_TEST_ONCE")
    if not once:
        return False
    if os.path.exists(once):
        return True
    with open(once, "w"):
        return False


def watch_writes() -> None:
    """`LOCKSTEP_TEST_WRITE=n:what` strikes this process at its n-th touch of the disk, through the file layer."""
    fate = os.environ.get("LOCKSTEP_TEST_WRITE", "")
    if not fate:
        return
    from training import files

    number, what = fate.split(":")
    touched = [0]

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            touched[0] += 1
            if touched[0] == int(number) and not _happened_before():
                os.kill(os.getpid(), getattr(signal, f"SIG{what}"))
            return function(*args)

        return call

    for name in WRITE_POINTS:
        setattr(files, name, watched(getattr(files, name)))


WRITE_POINTS = ("write_all", "fsync", "rename")


def meet_fate(passes: int, model: Any, x: torch.Tensor) -> torch.Tensor:
    """The input to go on with."""
    fate = os.environ.get("LOCKSTEP_TEST_FATE", "")
    if not fate:
        return x
    rank, number, what = fate.split(":")
    if os.environ.get("RANK", "0") != rank or passes != int(number) or _happened_before():
        return x
    if what == "RAISE":
        raise ArithmeticError("this rank was told to fail")
    if what == "EXIT2":
        sys.exit(2)
    if what == "DELAY":
        time.sleep(3)
    elif (
        what == "DRIFT"
    ):  # this rank's copy goes its own way, as bad memory or a gradient that was not summed would have it
        with torch.no_grad():
            model.head.bias[0] += 1e-3
    elif what == "NAN":  # poisons this rank's gradient of one parameter, from here on
        model.head.bias.register_hook(lambda grad: grad * float("nan"))
    elif what == "NANINPUT":  # and here what the batch statistics and the loss are made of
        return x * float("nan")
    elif what == "VANISH":  # the run directory goes while the run is on
        os.rename(os.environ["LOCKSTEP_TEST_RUN"], os.environ["LOCKSTEP_TEST_RUN"] + ".gone")
    else:
        os.kill(os.getpid(), getattr(signal, f"SIG{what}"))
    return x


class Paced(SmallConv):
    """Takes at least `LOCKSTEP_TEST_PACE` seconds a forward pass, so that a test has time to act on a running job.

    With `LOCKSTEP_TEST_PACE_FILE`, only while that file exists.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        file = os.environ.get("LOCKSTEP_TEST_PACE_FILE")
        if file is None or os.path.exists(file):
            time.sleep(float(os.environ.get("LOCKSTEP_TEST_PACE", "0")))
        return super().forward(x)


class Options:
    """No network at all."""
