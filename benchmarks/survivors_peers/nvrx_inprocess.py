"""python nvrx_inprocess.py CHECKPOINT: the job under NVRx's in-process restart, built as its advanced_example.py, on gloo.

The stores are served by whoever started the ranks, so that the others outlive rank 0; by default its end is that of the job.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import nvidia_resiliency_ext.inprocess as inprocess
import torch
import torch.distributed as dist
import torch.nn.functional as F
from job import BATCH, CHECKPOINT_STEPS, SEED, STEPS, Samples, Told, network, optimizer
from nvidia_resiliency_ext.inprocess.store import TCPStore
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


class Served(TCPStore):
    TCP_STORE_HOST_RANK = -1
    """No rank serves it."""


told = Told("nvidia-resiliency-ext")
path = Path(sys.argv[1])
host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
samples, model = Samples(), network()
stepper = optimizer(model.parameters())
order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(SEED))


@inprocess.Wrapper(store_factory=Served, store_kwargs={"port": port})
def train(store: dist.Store, call_wrapper: inprocess.CallWrapper | None = None) -> None:
    assert call_wrapper is not None
    attempt, rank, size = call_wrapper.iteration, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(f"group/{attempt}", store), rank=rank, world_size=size, timeout=timedelta(seconds=10)
    )  # fmt: skip
    parallel = DistributedDataParallel(model)
    first = 0
    if path.exists():
        found = torch.load(path)
        model.load_state_dict(found["model"])
        stepper.load_state_dict(found["optimizer"])
        torch.set_rng_state(found["rng"])
        first = found["step"]
    batches = [order[step * BATCH : (step + 1) * BATCH][rank::size].tolist() for step in range(first, STEPS)]
    for step, (x, y, ids) in enumerate(DataLoader(samples, batch_sampler=batches, num_workers=1), first + 1):
        told.ready(attempt)
        stepper.zero_grad()
        F.cross_entropy(parallel(x), y).backward()
        stepper.step()
        told.say("step", step=step, size=size, attempt=attempt, ids=ids.tolist())
        if step % CHECKPOINT_STEPS == 0:
            dist.barrier()
            if rank == 0:
                state = {"model": model.state_dict(), "optimizer": stepper.state_dict(), "rng": torch.get_rng_state()}
                with call_wrapper.atomic():
                    torch.save({**state, "step": step}, path.with_suffix(".new"))
                    path.with_suffix(".new").replace(path)
    told.end(model)
    dist.destroy_process_group()


train(dist.TCPStore(host, port, is_master=False))
