"""ResNet-9 on the Horovod interface: Adam 1e-3, weight decay 1e-3, a batch of 128 that the ranks share.

mpiexec -np 2 python examples/modules/horovod_resnet9.py --data cifar10 --root data
torchrun --standalone --nproc-per-node 2 examples/modules/horovod_resnet9.py --data digits --width 8 --epochs 2
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from horovod import (
    DistributedOptimizer,
    allreduce,
    broadcast_optimizer_state,
    broadcast_parameters,
    init,
    partition_dataset,
)
from samples import dataset

from lockstep.training.contract import user_errors
from lockstep.training.models.resnet9 import ResNet9

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", default="cifar10", choices=("cifar10", "digits", "synthetic"))
parser.add_argument("--root", default="data", type=Path)
parser.add_argument("--epochs", default=10, type=int)
parser.add_argument("--batch-size", default=128, type=int, help="of all ranks together")
parser.add_argument("--width", default=64, type=int, help="channels of the first convolution")
parser.add_argument("--log-every", default=100, type=int, help="batches between two lines")
args = parser.parse_args()

rank, device = init()
dtype = torch.float32
torch.manual_seed(rank)

with user_errors():
    data = dataset(args.data, "train", args.root)
loader, per_rank = partition_dataset(data, args.batch_size, device, dtype)

model = ResNet9(int(data.tensors[1].max()) + 1, len(data[0][0]), args.width, device=device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-3)
optimizer = DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
broadcast_parameters(model)
broadcast_optimizer_state(optimizer)
if rank == 0:
    print(f"{len(loader)} batches of {args.batch_size}, {per_rank} on this rank")

began = time.perf_counter()
for _ in range(args.epochs):
    seen = torch.zeros(3, dtype=torch.float64)  # correct, sum of losses, samples
    for number, (x, y) in enumerate(loader, 1):
        logits = model(2 * x - 1)
        loss = F.cross_entropy(logits, y)
        optimizer.zero_grad()
        optimizer.set_samples(len(y))
        loss.backward()
        optimizer.step()
        seen += torch.tensor([int((logits.argmax(1) == y).sum()), loss.item() * len(y), len(y)])
        if number % args.log_every == 0 or number == len(loader):
            correct, total, count = allreduce(seen, average=False).tolist()
            if rank == 0:
                print(f"acc: {correct / count:.4f}; avg_loss: {total / count:.4f}", flush=True)
if rank == 0:
    print(f"Training Time: {time.perf_counter() - began:.2f} s")
