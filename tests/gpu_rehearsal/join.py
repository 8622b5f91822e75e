"""python -m tests.gpu_rehearsal.join [DEVICE]: joins as a script does, sums over the ranks, and says where it was."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep.training.__main__ import leave
from lockstep.training.contract import user_errors
from lockstep.training.parallel.world import detect, joined
from tests.gpu_rehearsal.emulation import Emulation

if __name__ == "__main__":
    emulation = Emulation()
    with (
        user_errors(),
        emulation,
        joined(detect(os.environ), sys.argv[1] if len(sys.argv) > 1 else "auto", 30) as world,
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
    leave(0)
