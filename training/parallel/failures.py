"""Tells the errors of collectives from those of a rank's own work."""

from __future__ import annotations

import os
import re
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from . import process

_TORCH = Path(torch.__file__).parent
_WAITING_CODE = tuple(str(_TORCH / folder) + os.sep for folder in ("distributed", "nn/parallel", "autograd"))
"""Python code of torch that calls collectives. DDP's reducer waits inside a backward pass, below autograd."""
_OPS = str(_TORCH / "_ops.py")
"""Between a functional collective and C++."""
_OF_NCCL = re.compile(r"NCCL (communicator was aborted|operation timed out|Async Error)")
"""torch's own words where the communicator of a collective was aborted before it (2.15): a plain `RuntimeError`, too."""
_OF_GLOO = re.compile(r"gloo/transport/\S+\] (Timed out|Connection closed|Read error|Write error)")
"""gloo's own words where another rank did not come, or is gone: also in a process group of the script's."""


def is_collective(error: BaseException) -> bool:
    """Whether an error comes out of a collective or the store, not of this rank's own work: by its type and by where it was raised.

    torch has a type for its own errors and NCCL's. gloo throws a plain `RuntimeError`: in a call of torch.distributed, in a `wait()`, or
    in a backward pass. Other errors are thrown there, too, but only gloo's leaves a connection to another rank broken: one of ours, or
    of a process group that the script has made, which the message tells.
    """
    if type(error) is not RuntimeError:
        return isinstance(error, dist.DistError)
    if _OF_NCCL.match(str(error)):
        return True
    return _raised_in_waiting(error) and (process.broken() or bool(_OF_GLOO.search(str(error))))


def _raised_in_waiting(error: BaseException) -> bool:
    """Whether the innermost frame of Python is in torch's code for collectives, or in a function that calls `wait()`."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    code = next((frame.f_code for frame in reversed(frames) if frame.f_code.co_filename != _OPS), None)
    return code is not None and (code.co_filename.startswith(_WAITING_CODE) or "wait" in code.co_names)


def is_of_torch_distributed(error: BaseException) -> bool:
    """Whether a function of torch.distributed has raised it, such as for a process group that is gone."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__", "").startswith("torch.distributed")
