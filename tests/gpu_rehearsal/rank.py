"""python -m tests.gpu_rehearsal.rank WORDS: `python -m training WORDS`, its CUDA operators computed.

REHEARSAL_FOUND=file gets what the emulation has found, as JSON.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tests.gpu_rehearsal.emulation import Emulation
from training import __main__ as program
from training.launch.lifeline import FORWARDED

if __name__ == "__main__":
    if sys.argv[1] == "run":  # as the program does for itself
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    emulation = Emulation()
    try:
        with emulation:
            code = program.main(sys.argv[1:])
    finally:
        if "REHEARSAL_FOUND" in os.environ:
            emulation.write(Path(os.environ["REHEARSAL_FOUND"]))
    program.leave(code)
