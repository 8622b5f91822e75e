"""Small networks for tests, given to the package as a user would: `--set model=tests.nets:SmallConv`."""

from __future__ import annotations

import atexit
import errno
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests import product


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


class Tied(NormedConv):
    """Two heads with one weight: it has two names."""

    def __init__(self, num_classes: int = 10, width: int = 8) -> None:
        super().__init__(num_classes, width)
        self.twin = nn.Linear(2 * width, num_classes)
        self.twin.weight = self.head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv2(F.relu(self.conv1(x))))).mean((2, 3))
        return self.head(x) + self.twin(x)


class _Fated:
    """Does what `LOCKSTEP_TEST_FATE` names: `rank:n:what`, e.g. `1:7:KILL` in rank 1's 7th training forward pass.

    A negative n counts the passes of evaluation.
    """

    training: bool
    passes = scored = 0
    """Passes of training and of evaluation in this process. Each evaluation has a copy of the network, and `exact` refuses a network that
    counts."""

    def __init__(self, num_classes: int = 10, width: int = 8) -> None:
        super().__init__(num_classes, width)  # type: ignore[call-arg]
        _Fated.passes = 0
        watch_writes()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _Fated.passes += self.training
        _Fated.scored += not self.training
        x = meet_fate(_Fated.passes if self.training else -_Fated.scored, self, x)
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
    number, what = fate.split(":")
    touches = [0]

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            touches[0] += 1
            if what == "HANG" and threading.current_thread().name.startswith("checkpoint"):
                time.sleep(
                    3600
                )  # a server that does not answer the writer of checkpoints, as long as this process lives
            elif what == "REFUSE" and threading.current_thread().name.startswith("checkpoint"):
                raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")  # what a network disk says
            elif what == "HANGALL":  # every fsync of the process from that touch on, from any thread
                if function.__name__ == "fsync" and touches[0] >= int(number):
                    time.sleep(3600)
            elif touches[0] == int(number) and not _happened_before():
                os.kill(os.getpid(), getattr(signal, f"SIG{what}"))
            return function(*args)

        return call

    product.watch_disk(watched)


def meet_fate(passes: int, model: Any, x: torch.Tensor) -> torch.Tensor:
    """Returns the input for the next layers."""
    fate = os.environ.get("LOCKSTEP_TEST_FATE", "")
    if not fate:
        return x
    rank, number, what = fate.split(":")
    here = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0  # mpiexec sets no RANK
    if here != int(rank) or passes != int(number) or _happened_before():
        return x
    if what == "RAISE":
        raise ArithmeticError("this rank was told to fail")
    if what == "DELAY":
        time.sleep(3)
    elif what == "DRIFT":  # this rank's weights diverge, as after a memory error or an unsummed gradient
        with torch.no_grad():
            model.head.bias[0] += 1e-3
    elif what == "NAN":  # poisons this rank's gradient of one parameter, from here on
        model.head.bias.register_hook(lambda grad: grad * float("nan"))
    elif what == "NANWEIGHT":  # as an update that overflowed
        with torch.no_grad():
            model.head.bias[0] = float("nan")
    elif what == "NANINPUT":  # the batch statistics and the loss become NaN, too
        return x * float("nan")
    elif what == "HOLD":
        hold_until_signalled(Path(os.environ["LOCKSTEP_TEST_HELD"]))
    elif what == "WAIT":  # for as long as the file exists
        deadline = time.monotonic() + 600
        while os.path.exists(os.environ["LOCKSTEP_TEST_HELD"]) and time.monotonic() < deadline:
            time.sleep(0.01)
    elif what in ("LATE", "TWICE"):  # a signal to the rank in its very last moments; TWICE: and one now
        threading.Thread(target=threading.Event().wait, daemon=True).start()  # it holds no signal back, as gloo's do
        atexit.register(lambda: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(0.05)))
        if what == "TWICE":
            os.kill(os.getpid(), signal.SIGTERM)
            return x
        # And to its launcher, until that is gone.
        again = f"while kill -TERM {os.environ.get('LOCKSTEP_LAUNCHER', 0)} 2> /dev/null; do sleep 0.01; done"
        if "LOCKSTEP_LAUNCHER" in os.environ:
            atexit.register(lambda: subprocess.Popen(["sh", "-c", again], start_new_session=True))
    elif what == "VANISH":  # the run directory goes while the run is on
        os.rename(os.environ["LOCKSTEP_TEST_RUN"], os.environ["LOCKSTEP_TEST_RUN"] + ".gone")
    else:
        os.kill(os.getpid(), getattr(signal, f"SIG{what}"))
        deadline = time.monotonic() + 240
        while what == "TERM" and not product.signals_are_noted() and time.monotonic() < deadline:
            time.sleep(0.01)  # a thread notes it, which a busy machine may leave waiting until the last step is done
    return x


def hold_until_signalled(flag: Path, bound: float = 600.0) -> None:
    """Waits until this process gets a signal, so that none comes too late. Touches the file `flag` first."""
    signalled = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        if callable(before := signal.getsignal(number)):
            signal.signal(number, lambda n, frame, before=before: (signalled.append(n), before(n, frame)))
    flag.touch()
    deadline = time.monotonic() + bound
    while not signalled and time.monotonic() < deadline:
        time.sleep(0.01)


class Paced(SmallConv):
    """Takes at least `LOCKSTEP_TEST_PACE` seconds a forward pass, so that a test has time to act on a running job.

    With `LOCKSTEP_TEST_PACE_FILE`, only while that file exists.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        file = os.environ.get("LOCKSTEP_TEST_PACE_FILE")
        if file is None or os.path.exists(file):
            time.sleep(float(os.environ.get("LOCKSTEP_TEST_PACE", "0")))
        return super().forward(x)


class Sociable(Paced):
    """Works among several ranks, and fails alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.distributed.get_world_size() == 1:
            raise ArithmeticError("nobody is here")
        return super().forward(x)


class Held(SmallConv):
    """Holds still where `LOCKSTEP_TEST_HOLD=FILE` says, so that a test has time to act on a running job.

    While FILE holds a number n, the last rank does not get beyond its n-th training pass of this start. It writes n to
    FILE.held as soon as it stands there. The other ranks continue to the collective in which they then wait for it. A signal
    lets the rank go: only a run that reaches its next step can agree on the end. n must be above 3. A model does not see
    a signal from before the first pass, and a run with a signal makes no more passes.
    """

    SECONDS = 600.0
    passes = held_at = 0
    signalled = False

    def __init__(self, num_classes: int = 10, width: int = 8) -> None:
        super().__init__(num_classes, width)
        self.file = os.environ.get("LOCKSTEP_TEST_HOLD", "")
        Held.passes = Held.held_at = 0
        Held.signalled = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Held.passes += self.training
        if self.file and self.training:
            if self.passes == 1:
                self._listen()
            self._hold()
        return super().forward(x)

    def _listen(self) -> None:
        """Leaves the run's handling alone: its thread reads every signal from a pipe, whichever handler is set."""
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            if callable(signal.getsignal(number)):
                signal.signal(number, self._let_go)

    def _let_go(self, *_: Any) -> None:
        Held.signalled = True

    def _hold(self) -> None:
        deadline = time.monotonic() + self.SECONDS
        while not self.signalled and self.passes >= self._last_pass():
            if self.held_at != self.passes:
                Held.held_at = self.passes
                with open(f"{self.file}.held", "w") as held:
                    held.write(str(self.passes))
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody has taken {self.file} away")
            time.sleep(0.01)

    def _last_pass(self) -> float:
        ranks = torch.distributed
        if ranks.is_initialized() and ranks.get_rank() < ranks.get_world_size() - 1:
            return float("inf")
        try:
            with open(self.file) as file:
                return int(file.read())
        except FileNotFoundError:
            return float("inf")


class Options:
    """No network at all."""


class PacedNormed(Paced, NormedConv):
    """With batch statistics and dropout, and as slow as a test needs it."""
