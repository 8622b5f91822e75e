"""What the first module's ResNet-9 script imports, over torch and Lockstep: its loop runs as it stands, on CPUs and GPUs.

    from needle_shim import MPI, ResNet9, ddp, ndl      # in place of mpi4py, models, ddp and needle
    mpiexec -np 2 python train_resnet.py                # with mpi4py or without it; so do torchrun, srun and lockstep run

Gradients are averaged during `backward`, not one by one in `step`, and each rank's part of a batch changes from pass to pass.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import horovod
import torch
from horovod import DistributedOptimizer, broadcast_parameters, init
from samples import dataset

from lockstep.training.models.resnet9 import ResNet9

try:
    from mpi4py import MPI
except ImportError:
    MPI = None  # the script imports it, and uses `ddp` alone

__all__ = [
    "MPI", "DistributedOptimizer", "ResNet9", "broadcast_parameters", "data", "ddp", "init", "ndl", "nn", "optim", "partition_dataset",
]  # fmt: skip


class Tensor(torch.Tensor):
    """torch's, and whatever is computed from it. As in needle, `numpy` works for one with a gradient, or on a GPU."""

    def numpy(self):
        return self.detach().cpu().as_subclass(torch.Tensor).numpy()


class Batches:
    """The batches of a loader, pass after pass."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        for batch in self.loader:
            yield [part.as_subclass(Tensor) for part in batch]


def partition_dataset(dataset, batch_size, device, dtype):
    """(this rank's part of each global batch, the size of that part)."""
    loader, per_rank = horovod.partition_dataset(dataset, batch_size, device, dtype)
    return Batches(loader), per_rank


def cifar10(folder, train):
    return dataset("cifar10", "train" if train else "test", Path(folder).parent)


data, optim = SimpleNamespace(CIFAR10Dataset=cifar10), torch.optim
nn = SimpleNamespace(SoftmaxLoss=torch.nn.CrossEntropyLoss)
ddp = ndl = sys.modules[__name__]
