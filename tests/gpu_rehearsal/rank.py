"""python -m tests.gpu_rehearsal.rank WORDS: `python -m lockstep.training WORDS`, or `python SCRIPT.py …`, its CUDA operators computed.

REHEARSAL_FOUND=file gets what the emulation has found, as JSON. REHEARSAL_FAULT=module:Class.method plants a fault: that
method does nothing.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from pathlib import Path

from tests import product
from tests.gpu_rehearsal.emulation import Emulation


def _plant(fault: str) -> None:
    module, _, name = fault.partition(":")
    owner, _, method = name.partition(".")
    setattr(getattr(importlib.import_module(module), owner), method, lambda *args: None)


def _script(path: str, *words: str) -> int:
    """The exit code of a program of a user's own."""
    sys.argv = [path, *words]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


if __name__ == "__main__":
    if "REHEARSAL_FAULT" in os.environ:
        _plant(os.environ["REHEARSAL_FAULT"])
    emulation = Emulation()
    try:
        with emulation:
            code = _script(*sys.argv[1:]) if sys.argv[1].endswith(".py") else product.program(sys.argv[1:])
    finally:
        if "REHEARSAL_FOUND" in os.environ:
            emulation.write(Path(os.environ["REHEARSAL_FOUND"]))
    product.leave(code)
