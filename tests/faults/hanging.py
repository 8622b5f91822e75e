"""python tests/faults/hanging.py RUN_DIR KIND[:RANK:STEP] [SETTING…]: ranks train, and after a step one gets no further, in this way.

Without RANK and STEP it is rank 1 after step 30. `disk` writes into the folder $DISK, whose file system it stops before (fsfreeze);
`held` continues after a file RUN_DIR/GO appears.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from lockstep import Session


class Data(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4000

    loaded = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.loaded += 1
        if KIND == "loader" and HANGS and self.loaded > 40 // int(os.environ["WORLD_SIZE"]) * (STEP + 5):
            time.sleep(600)
        return torch.randn(4, generator=torch.Generator().manual_seed(index))


def hang(run: Session) -> None:
    if KIND == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    elif KIND == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif KIND == "loop":  # in C, and with the interpreter's lock
        re.match("(a+)+b", "a" * 60)
    elif KIND == "pipe":
        _, write = os.pipe()
        while True:
            os.write(write, b"x" * 4096)
    elif KIND == "order":
        dist.broadcast(torch.zeros(3), 0)
    elif KIND == "disk":
        folder = Path(os.environ["DISK"])
        subprocess.run(["fsfreeze", "--freeze", folder], check=True)
        (folder / "file").write_bytes(b"x")
    elif KIND == "held":
        while not Path(RUN_DIR, "GO").exists():
            time.sleep(0.05)


RUN_DIR, WORDS, *SETTINGS = sys.argv[1:]
KIND, RANK, STEP = (*WORDS.split(":"), 1, 30)[:3]
RANK, STEP = int(RANK), int(STEP)
RESTARTS = os.environ.get("LOCKSTEP_RESTARTS", os.environ.get("TORCHELASTIC_RESTART_COUNT"))
HANGS = int(os.environ["RANK"]) == RANK and RESTARTS == "0"
with Session(RUN_DIR, *SETTINGS, sync="flat") as run:
    model = run.replicate(nn.Linear(4, 1))
    run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    for _ in run.epochs(1):
        for x in run.batches(Data(), 40, workers=int(KIND == "loader")):
            run.step(model(x).square().mean())
            if run.steps == STEP and HANGS:
                hang(run)
            if KIND == "held" and run.steps > STEP:
                time.sleep(0.05)  # else the run ends before the watcher's next look
