"""The job under torchft, one process a replica group: the loop of its train_ddp.py, with that file's timeouts, on gloo."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.nn.functional as F
from job import BATCH, RANKS, STEPS, Samples, Told, network, optimizer
from torch.distributed import TCPStore
from torch.utils.data import DataLoader
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo
from torchft.checkpointing.pg_transport import PGTransport

told = Told("torchft-nightly")
replica = int(os.environ["RANK"])
everybody = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
everybody.set(f"imported/{replica}", "1")  # else the first ones train before the last one is there
everybody.wait([f"imported/{rank}" for rank in range(RANKS)], timedelta(seconds=60))

samples = Samples()
sampler = DistributedSampler(
    samples, replica_rank=replica, num_replica_groups=RANKS, group_rank=0, num_replicas=1, shuffle=True
)
loader = DataLoader(samples, BATCH // RANKS, num_workers=1, sampler=sampler)
model: Any = network()
own_store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
group = ProcessGroupGloo(timeout=timedelta(seconds=5))


def state() -> dict[str, Any]:
    return {"model": model.state_dict(), "optim": stepper.state_dict()}


def load(found: dict[str, Any]) -> None:
    model.load_state_dict(found["model"])
    stepper.load_state_dict(found["optim"])


manager = Manager(
    pg=group, min_replica_size=1, load_state_dict=load, state_dict=state, replica_id=f"replica_{replica}",
    timeout=timedelta(seconds=30), checkpoint_transport=PGTransport(group, timeout=timedelta(seconds=10), device="cpu"),
    rank=0, world_size=1, store_addr="127.0.0.1", store_port=own_store.port, hostname="127.0.0.1",
)  # fmt: skip
parallel = DistributedDataParallel(manager, model)
stepper = Optimizer(manager, optimizer(model.parameters()))
while manager.current_step() < STEPS:
    for x, y, ids in loader:
        told.ready()
        before = manager.current_step()
        stepper.zero_grad()
        F.cross_entropy(parallel(x), y).backward()
        stepper.step()
        if (step := manager.current_step()) > before:
            told.say("step", step=step, size=manager.num_participants(), ids=ids.tolist())
        else:
            told.say("discarded", samples=len(ids))
        if step >= STEPS:
            break
told.end(model)
os._exit(0)  # its servers' threads outlive the interpreter's end
