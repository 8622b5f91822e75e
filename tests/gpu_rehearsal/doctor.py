"""python -m tests.gpu_rehearsal.doctor gpu …: `lockstep doctor gpu`, its processes over the emulation (LD_PRELOAD from outside)."""

from __future__ import annotations

import sys

from tests.gpu_rehearsal.rehearsal import RANK
from training.__main__ import leave
from training.contract import user_errors
from training.doctor.command import main

if __name__ == "__main__":
    with user_errors():
        leave(main(sys.argv[1:], (sys.executable, "-u", *RANK)))
