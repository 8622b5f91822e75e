"""python -m tests.gpu_rehearsal.rank WORDS: `python -m lockstep.training WORDS`, `python SCRIPT.py …`, or `python -m MODULE …`, its CUDA
operators computed.

REHEARSAL_FOUND=file gets the emulation's counts and failures, as JSON. REHEARSAL_FAULT=module:Class.method plants a fault: that
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
    """Runs a user's program or a module, and returns its exit code."""
    try:
        if path == "-m":
            sys.argv = [*words]
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [path, *words]
            runpy.run_path(path, run_name="__main__")
    except SystemExit as error:
        return int(error.code or 0)
    return 0


if __name__ == "__main__":
    if "REHEARSAL_FAULT" in os.environ:
        _plant(os.environ["REHEARSAL_FAULT"])
    emulation = Emulation()
    try:
        with emulation:
            words = sys.argv[3:] if sys.argv[1:3] == ["-m", "lockstep.training"] else sys.argv[1:]
            code = _script(*words) if words[0] == "-m" or words[0].endswith(".py") else product.program(words)
    finally:
        if "REHEARSAL_FOUND" in os.environ:
            emulation.write(Path(os.environ["REHEARSAL_FOUND"]))
    product.leave(code)
