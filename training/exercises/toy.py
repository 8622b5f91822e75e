"""python -m lockstep.training toy: the tutorial's toy model under DDP, cut over two devices, and the same idea done properly.

    basic           the toy model, one copy a rank
    model parallel  its two halves on two devices of each rank, gradients summed by DDP (on CPU both halves on the CPU)
    2-D mesh        the MLP over data × tensor: layers cut column- and row-wise (M. Shoeybi et al., "Megatron-LM", 2019),
                    gradients averaged over the data dimension

Each trains a few steps and is compared with one process that trains the whole batch.
Start it with `python -m lockstep.training launch --ranks 4 toy`, torchrun, srun or mpiexec.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.training.cli import PROGRAM, Parser, about, positive
from lockstep.training.contract import EXIT_DONE, EXIT_FAILED, UserError
from lockstep.training.models.mlp import MLP
from lockstep.training.parallel.exchange import all_gather_trees
from lockstep.training.parallel.world import World, detect, joined, set_threads

STEPS, PER_RANK, RATE = 5, 20, 0.01
TOLERANCE = 1e-9
"""Largest difference from one process, in float64."""


class ToyModel(nn.Module):
    """[b, 10] → [b, 5]: linear, ReLU, linear; the halves on `devices`, the result on the second."""

    def __init__(self, devices: tuple[torch.device, torch.device]) -> None:
        super().__init__()
        self.devices = devices
        self.net1 = nn.Linear(10, 10, dtype=torch.float64).to(devices[0])
        self.net2 = nn.Linear(10, 5, dtype=torch.float64).to(devices[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(F.relu(self.net1(x.to(self.devices[0]))).to(self.devices[1]))


def basic(world: World) -> float:
    """Largest difference of any parameter from one process after a few steps of DDP. Collective."""
    return _under_ddp((world.device, world.device), world)


def model_parallel(world: World) -> tuple[float, str]:
    """The same with the model cut over two devices a rank, and a sentence on which. Collective."""
    count = torch.cuda.device_count() if world.device.type == "cuda" else 0
    if count >= 2 * world.local_size:
        # The rank's own, and one that is no other rank's own: GPU i is that of local rank i.
        devices = (world.device, torch.device("cuda", world.local_rank + world.local_size))
        where = "two GPUs a rank"
    else:
        devices = (world.device, world.device)
        where = f"both halves on one {world.device.type} device: there are no {2 * world.local_size} GPUs here"
    return _under_ddp(devices, world), where


def _under_ddp(devices: tuple[torch.device, torch.device], world: World) -> float:
    torch.manual_seed(0)
    model = ToyModel(devices)
    # NCCL's groups are bound to one GPU a rank: gradients on two go by gloo. Such a module takes no device_ids.
    group = None if devices[0] == devices[1] else dist.new_group(backend="gloo")
    network = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(network.parameters(), lr=RATE)
    for inputs, targets in _batches(world.size, 10, 5):
        optimizer.zero_grad()
        output = network(_part(inputs, world.rank, world.size))
        F.mse_loss(output, _part(targets, world.rank, world.size).to(output.device)).backward()
        optimizer.step()
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    reference = _alone(ToyModel((cpu, cpu)), _batches(world.size, 10, 5))
    return _largest(model.parameters(), reference.parameters())


def mesh(world: World, tensor_size: int) -> float:
    """Largest difference of any parameter of the MLP over a data × tensor mesh from one process. Collective."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

    data_size = world.size // tensor_size
    grid = init_device_mesh(world.device.type, (data_size, tensor_size), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = MLP(32, 64, (64, 32, 32)).double().to(world.device)
    # A layer cut by columns leaves each rank its part of the activations, which is what a layer cut by rows wants: only
    # every second layer ends in an all-reduce.
    plan: dict[str, ParallelStyle] = {
        f"layers.{i}": ColwiseParallel() if i % 2 == 0 else RowwiseParallel() for i in range(4)
    }
    parallelize_module(model, grid["tensor"], plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for inputs, targets in _batches(data_size, 64, 32):
        optimizer.zero_grad()
        rank_batch = (
            _part(batch, grid["data"].get_local_rank(), data_size).to(world.device) for batch in (inputs, targets)
        )
        F.mse_loss(model(next(rank_batch)), next(rank_batch)).backward()
        for parameter in model.parameters():
            assert isinstance(parameter.grad, DTensor)
            shard = parameter.grad.to_local()
            dist.all_reduce(shard, group=grid["data"].get_group())
            shard /= data_size
        optimizer.step()
    torch.manual_seed(0)
    reference = _alone(MLP(32, 64, (64, 32, 32)).double(), _batches(data_size, 64, 32))
    return _largest((p.full_tensor() for p in model.parameters()), reference.parameters())  # type: ignore[attr-defined]


def _batches(parts: int, width: int, outputs: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same random batches of `parts` × PER_RANK samples on every rank, float64."""
    generator = torch.Generator().manual_seed(1)
    rows = parts * PER_RANK

    def draw(columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator, dtype=torch.float64)

    return [(draw(width), draw(outputs)) for _ in range(STEPS)]


def _part(batch: torch.Tensor, index: int, parts: int) -> torch.Tensor:
    return batch.chunk(parts)[index]


def _alone(model: nn.Module, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return model


def _largest(actual: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> float:
    return max(float((a.detach().cpu() - b.detach()).abs().max()) for a, b in zip(actual, expected))


def main(argv: list[str]) -> int:
    """Runs the three examples; returns 1 where one differs from one process. Raises `UserError` for wrong arguments."""
    parser = Parser(prog=f"{PROGRAM} toy", description=about(__doc__))
    parser.add_argument(
        "--tensor", type=positive, help="ranks that share one copy of the MLP; default: 2 where they divide"
    )
    args = parser.parse_args(argv)
    with joined(detect(os.environ)) as world:
        set_threads(world, 0, os.environ)
        tensor_size = args.tensor or (2 if world.size % 2 == 0 else 1)
        if world.size % tensor_size or 32 % tensor_size:
            raise UserError(f"--tensor {tensor_size} must divide {world.size} ranks and the MLP's smallest layer of 32")
        print(f"Running basic DDP example on rank {world.rank}.", flush=True)
        results = {"basic DDP": basic(world)}
        print(f"Running DDP with model parallel example on rank {world.rank}.", flush=True)
        difference, where = model_parallel(world)
        results[f"model parallel under DDP ({where})"] = difference
        print(f"Running 2-D mesh example on rank {world.rank}.", flush=True)
        results[f"MLP over a mesh of {world.size // tensor_size} (data) × {tensor_size} (tensor)"] = mesh(
            world, tensor_size
        )
        worst = [
            max(values)
            for values in zip(*(list(differences.values()) for differences in all_gather_trees(results, world)))
        ]
        if world.leader:
            for name, value in zip(results, worst):
                print(f"{name}: differs from one process by at most {value:.1e}", flush=True)
    return EXIT_DONE if max(worst) < TOLERANCE else EXIT_FAILED
