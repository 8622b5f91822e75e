"""python tests/faults/hanging.py RUN_DIR KIND: two ranks train, and after 30 steps rank 1 gets no further, in this way."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from lockstep import Session

STEP = 30


class Data(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4000

    loaded = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.loaded += 1
        if KIND == "loader" and HANGS and self.loaded > 20 * (STEP + 5):
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
    elif KIND == "slow":  # it goes on
        time.sleep(14)


RUN_DIR, KIND = sys.argv[1:3]
HANGS = os.environ["RANK"] == "1" and os.environ["LOCKSTEP_RESTARTS"] == "0"
with Session(RUN_DIR, sync="flat") as run:
    model = run.replicate(nn.Linear(4, 1))
    run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    for _ in run.epochs(1):
        for x in run.batches(Data(), 40, workers=int(KIND == "loader")):
            run.step(model(x).square().mean())
            if run.steps == STEP and HANGS:
                hang(run)
