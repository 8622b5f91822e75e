"""python fated.py SCRIPT …: runs a script unchanged, and at one optimizer step of one rank sends that rank a signal, or fills a disk.

FATE=RANK:STEP:SIGNAL, or RANK:STEP:DISK, once: FATE_ONCE names a file that remembers it, FATE_BALLAST one that takes what is left of its
disk. FATE_TOLD names a file that rank 0 writes at the end, the sha256 of the weights, and FATE_STEPS one with its steps so far.
"""

from __future__ import annotations

import hashlib
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

rank, at, name = (os.environ.get("FATE") or "-1:0:TERM").split(":")
once = Path(os.environ.get("FATE_ONCE", "once"))
mine = os.environ.get("RANK", "0")
steps, last = 0, None
_step: Any = torch.optim.SGD.step


def step(self: torch.optim.SGD, *args: Any, **kwargs: Any) -> Any:
    global steps, last
    result = _step(self, *args, **kwargs)
    steps, last = steps + 1, self
    if mine == rank and steps == int(at) and not once.exists():
        once.write_text(str(time.time()))
        if name == "DISK":
            threading.Thread(target=fill, args=(Path(os.environ["FATE_BALLAST"]),), daemon=True).start()
        else:
            os.kill(os.getpid(), signal.Signals[f"SIG{name}"])
    if mine == "0":
        Path(os.environ["FATE_STEPS"]).write_text(str(steps))
    return result


def fill(ballast: Path) -> None:
    """Takes all room, also what somebody gives back: on a shared disk that is full others wait for it, too."""
    with ballast.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(b"\0" * 4096)
            except OSError:
                time.sleep(0.001)


torch.optim.SGD.step = step  # type: ignore[method-assign]
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
if mine == "0" and last is not None:
    digest = hashlib.sha256()
    for group in last.param_groups:
        for parameter in group["params"]:
            digest.update(parameter.detach().contiguous().numpy().tobytes())
    Path(os.environ["FATE_TOLD"]).write_text(digest.hexdigest())
