"""python -m tests.gpu_rehearsal.doctor [ROW …]: `lockstep doctor gpu --json`, its processes over the emulation (LD_PRELOAD from
outside)."""

from __future__ import annotations

import sys

from tests import product
from tests.gpu_rehearsal.rehearsal import RANK

if __name__ == "__main__":
    with product.user_errors():
        product.leave(product.doctor_gpu(sys.argv[1:], True, (sys.executable, "-u", *RANK)))
