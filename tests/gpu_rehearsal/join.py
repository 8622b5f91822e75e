"""python -m tests.gpu_rehearsal.join [DEVICE]: joins as a script does, sums over the ranks, and says where it was."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests import product
from tests.gpu_rehearsal.emulation import Emulation

if __name__ == "__main__":
    emulation = Emulation()
    with (
        product.user_errors(),
        emulation,
        product.joined(30, sys.argv[1] if len(sys.argv) > 1 else "auto") as world,
    ):
        dist.barrier()  # with no tensor that says on which GPU
        total = torch.full((4,), float(world.rank + 1), device=world.device)
        dist.all_reduce(total)
        place = {
            "rank": world.rank,
            "local": world.local_rank,
            "device": str(world.device),
            "total": float(total.sum()),
        }
        print(json.dumps(place), flush=True)
    emulation.write(Path(os.environ["REHEARSAL_FOUND"]))
    product.leave(0)
