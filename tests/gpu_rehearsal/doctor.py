"""python -m tests.gpu_rehearsal.doctor gpu …: `lockstep doctor gpu`, its processes over the emulation (LD_PRELOAD from outside)."""

from __future__ import annotations

import sys

from lockstep.training.__main__ import leave
from lockstep.training.contract import user_errors
from lockstep.training.doctor.command import main
from tests.gpu_rehearsal.rehearsal import RANK

if __name__ == "__main__":
    with user_errors():
        leave(main(sys.argv[1:], (sys.executable, "-u", *RANK)))
