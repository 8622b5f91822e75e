"""Whether this machine computes what the run has computed before: same bits are a matter of threads, instruction set and libraries, too.

Every checkpoint under `sync.name=exact` says what is known of the machine, with a digest of a few operations on fixed numbers. Before
the first step of a start each rank compares its own with those of the checkpoint, or in a new run with those of rank 0. Other bits
could follow from other ones, and the start is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import signal
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ..contract import UserError, named
from ..parallel.exchange import all_gather_trees
from ..parallel.packing import tensor_bytes
from .attempt import Attempt
from .run import Run

PROCESSOR = "processor"
"""Named where other things differ, and not compared: many models compute the same bits."""


class Canary:
    """Of one attempt. All ranks call the same methods in the same order."""

    def __init__(self, run: Run, attempt: Attempt) -> None:
        self.run, self._attempt = run, attempt

    def before_step(self) -> None:
        """Before the first step of an attempt. Raises `UserError` on all ranks where one differs from the checkpoint or, in a new run, from
        rank 0. Collective."""
        if "machine" in self._attempt.known:
            return
        self._attempt.known.add("machine")
        every = all_gather_trees(machine(self.run.world.device), self.run.world)
        saved = self.run.state.canary
        before = saved or every[0]
        other = [rank for rank, found in enumerate(every) if _differences(before, found)]
        if other:
            error = UserError(
                f"rank {named(other)} may compute other bits than {'the run before' if saved else 'rank 0'}, so that the run would end in "
                f"other weights ({_differences(before, every[other[0]])}): undo the difference, or start over in another run directory"
            )
            error.shared = True
            raise error
        self.run.state.canary = every[0]

    def check_alone(self) -> None:
        """Of a rank that others have admitted: ends this process where it computes other bits, as they go on without it then."""
        if self.run.state.canary and _differences(self.run.state.canary, machine(self.run.world.device)):
            self.run.console.warn("this process computes other bits than the others, which go on without it")
            os.kill(os.getpid(), signal.SIGKILL)


def _differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """For people; empty where there are none."""
    different = [name for name in now if before.get(name) != now[name]]
    if different in ([], [PROCESSOR]):
        return ""
    return ", ".join(f"{name}: {before.get(name)} → {now[name]}" for name in different)


def machine(device: torch.device) -> dict[str, Any]:
    """What bits depend on, as far as it can be asked for, and a digest of the arithmetic."""
    of_device = {"GPU": torch.cuda.get_device_name(device)} if device.type == "cuda" else {PROCESSOR: _processor()}
    return {
        "torch": torch.__version__,
        **of_device,
        "threads": torch.get_num_threads(),
        "instruction set": torch.backends.cpu.get_cpu_capability(),
        "ONEDNN_MAX_CPU_ISA": os.environ.get("ONEDNN_MAX_CPU_ISA", "not set"),
        "MKL_ENABLE_INSTRUCTIONS": os.environ.get("MKL_ENABLE_INSTRUCTIONS", "not set"),
        "oneDNN": torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled,
        "numbers below the normal range": "kept"
        if float(torch.tensor(1e-20) * torch.tensor(1e-20))
        else "flushed to zero",
        "results on fixed numbers": hashlib.sha256(arithmetic(device)).hexdigest()[:16],
    }


def arithmetic(device: torch.device) -> bytes:
    """What a few operations give on fixed numbers: sums over many elements, whose order follows from threads and instruction set;
    what optimizers do; numbers below float32's normal range."""
    x, y = _numbers(300_007, device), _numbers(300_007, device).flip(0)
    small = torch.full((8,), 1e-20, device=device)
    square = x[: 256 * 256].view(256, 256)
    images, filters = x[: 4 * 16 * 32 * 32].view(4, 16, 32, 32), y[: 32 * 16 * 3 * 3].view(32, 16, 3, 3)
    found = [
        x.sum(), torch.linalg.vector_norm(x), x.exp().mean(), torch.addcdiv(x, y, y.abs() + 0.1, value=-0.37),
        torch.addcmul(x, y, y, value=0.11), torch.lerp(x, y, 0.9), torch.softmax(square, 1), square @ square.T, small * small,
        F.conv2d(images, filters),
    ]  # fmt: skip
    return b"".join(tensor_bytes(tensor).numpy().tobytes() for tensor in found)


def _numbers(count: int, device: torch.device) -> torch.Tensor:
    """Fixed numbers from −1 to 1."""
    return torch.arange(count, device=device).mul_(7919).remainder_(2003).float().div_(1001).sub_(1)


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
