"""The tutorial's toy model under DDP, cut over two devices of each rank, and an MLP on a 2-D mesh.

    lockstep run --ranks 4 -- python examples/modules/toy.py
    mpiexec -np 4 python examples/modules/toy.py      # so do torchrun, srun, and python alone for one rank

    basic           the toy model, one copy a rank
    model parallel  its two halves on two devices of each rank, gradients averaged by DDP (on the CPU both on one)
    2-D mesh        an MLP over data × tensor: layers cut column- and row-wise (M. Shoeybi et al., "Megatron-LM", 2019),
                    gradients averaged over the data dimension

Each trains a few steps and is compared with one process that trains the whole batch, in float64.
"""

import argparse
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from lockstep.training.parallel import world

STEPS, PER_RANK, RATE = 5, 20, 0.01
CPU = torch.device("cpu")


class ToyModel(nn.Module):
    """[b, 10] → [b, 5]: linear, ReLU, linear; the halves on two devices, the result on the second."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second
        self.net1 = nn.Linear(10, 10).to(first)
        self.net2 = nn.Linear(10, 5).to(second)

    def forward(self, x):
        return self.net2(F.relu(self.net1(x.to(self.first))).to(self.second))


def mlp():
    """[b, 64] → [b, 32]: four linear layers with ReLU between them, numbered 0, 2, 4 and 6."""
    layers = [
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 32),
        nn.ReLU(),
        nn.Linear(32, 32),
        nn.ReLU(),
        nn.Linear(32, 32),
    ]
    return nn.Sequential(*layers)


def batches(ranks, width, outputs):
    """The same random batches of ranks × PER_RANK samples on every rank."""
    draw = torch.Generator().manual_seed(1)
    rows = ranks * PER_RANK
    return [
        (torch.randn(rows, width, generator=draw), torch.randn(rows, outputs, generator=draw)) for _ in range(STEPS)
    ]


def train(model, data, part=0, parts=1, average=lambda: None):
    """Plain SGD on one of `parts` equal parts of each batch; `average` has the gradients averaged over the others."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for inputs, targets in data:
        optimizer.zero_grad()
        output = model(inputs.chunk(parts)[part])
        F.mse_loss(output, targets.chunk(parts)[part].to(output.device)).backward()
        average()
        optimizer.step()


def largest_difference(model, reference):
    """Of any parameter. Collective, where the model is spread over the ranks."""
    worst = 0.0
    for actual, expected in zip(model.parameters(), reference.parameters()):
        whole = actual.full_tensor() if hasattr(actual, "full_tensor") else actual
        worst = max(worst, float((whole.detach().cpu() - expected.detach()).abs().max()))
    return worst


def under_ddp(me, first, second):
    torch.manual_seed(0)
    model = ToyModel(first, second)
    # NCCL's groups are bound to one GPU a rank: gradients on two go by gloo. Such a module takes no device_ids.
    group = None if first == second else dist.new_group(backend="gloo")
    data = batches(me.size, 10, 5)
    train(DistributedDataParallel(model, process_group=group), data, me.rank, me.size)
    torch.manual_seed(0)
    alone = ToyModel(CPU, CPU)
    train(alone, data)
    return largest_difference(model, alone)


def on_a_mesh(me, tensor_size):
    data_size = me.size // tensor_size
    mesh = init_device_mesh(me.device.type, (data_size, tensor_size), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model, alone = mlp(), mlp()
    alone.load_state_dict(model.state_dict())
    model.to(me.device)
    # A layer cut by columns leaves each rank its part of the activations, which is what a layer cut by rows wants: only
    # every second layer ends in an all-reduce.
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(), "6": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)

    def average():
        for parameter in model.parameters():
            shard = parameter.grad.to_local()
            dist.all_reduce(shard, group=mesh["data"].get_group())
            shard /= data_size

    data = batches(data_size, 64, 32)
    train(model, [(x.to(me.device), y) for x, y in data], mesh["data"].get_local_rank(), data_size, average)
    train(alone, data)
    return largest_difference(model, alone)


def main(me, tensor_size):
    """Whether all three end where one process ends, on every rank."""
    found = {}
    print(f"Running basic DDP example on rank {me.rank}.", flush=True)
    found["basic DDP"] = under_ddp(me, me.device, me.device)

    print(f"Running DDP with model parallel example on rank {me.rank}.", flush=True)
    second, where = me.device, f"both halves on one {me.device.type} device"
    if me.device.type == "cuda" and torch.cuda.device_count() >= 2 * me.local_size:
        # Not another rank's own: GPU i is that of local rank i.
        second, where = torch.device("cuda", me.local_rank + me.local_size), "two GPUs a rank"
    found[f"model parallel under DDP ({where})"] = under_ddp(me, me.device, second)

    print(f"Running 2-D mesh example on rank {me.rank}.", flush=True)
    found[f"MLP over a mesh of {me.size // tensor_size} (data) × {tensor_size} (tensor)"] = on_a_mesh(me, tensor_size)

    worst = torch.tensor(list(found.values()), device=me.device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if me.rank == 0:
        for name, difference in zip(found, worst.tolist()):
            print(f"{name}: differs from one process by at most {difference:.1e}", flush=True)
    return bool((worst < 1e-9).all())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor", type=int, help="ranks that share one copy of the MLP; default: 2 where they divide")
    torch.set_default_dtype(torch.float64)
    with world.script() as me:
        tensor_size = parser.parse_args().tensor or (2 if me.size % 2 == 0 else 1)
        if me.size % tensor_size or 32 % tensor_size:
            parser.error(f"--tensor {tensor_size} must divide {me.size} ranks and the MLP's smallest layer of 32")
        right = main(me, tensor_size)
    sys.exit(0 if right else 1)
