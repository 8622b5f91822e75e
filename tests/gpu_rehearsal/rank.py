"""python -m tests.gpu_rehearsal.rank WORDS: `python -m lockstep.training WORDS`, its CUDA operators computed.

REHEARSAL_FOUND=file gets what the emulation has found, as JSON. REHEARSAL_FAULT=module:Class.method plants a fault: that
method does nothing.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from tests import product
from tests.gpu_rehearsal.emulation import Emulation


def _plant(fault: str) -> None:
    module, _, name = fault.partition(":")
    owner, _, method = name.partition(".")
    setattr(getattr(importlib.import_module(module), owner), method, lambda *args: None)


if __name__ == "__main__":
    if "REHEARSAL_FAULT" in os.environ:
        _plant(os.environ["REHEARSAL_FAULT"])
    emulation = Emulation()
    try:
        with emulation:
            code = product.program(sys.argv[1:])
    finally:
        if "REHEARSAL_FOUND" in os.environ:
            emulation.write(Path(os.environ["REHEARSAL_FOUND"]))
    product.leave(code)
