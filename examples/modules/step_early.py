"""Steps a parameter as soon as its all-reduce is done, while the backward pass computes the gradients of earlier layers.

    lockstep run --ranks 2 -- python examples/modules/step_early.py      # so do torchrun, srun and mpiexec

It helps where memory is short or the optimizer takes long: a gradient is freed at once, so only a few are in memory,
and the optimizer works while other gradients travel. No gradient can be clipped by the norm of all, scaled or added up over several
passes, and a step that turns out not to be finite cannot be left out: earlier parameters have taken it.

The script trains one network so, another with all steps after the backward pass, and compares their weights.
"""

import sys
from collections import deque

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lockstep.training.parallel import world

AHEAD = 3
"""All-reduces that may be under way at once: the backward pass waits for the first one before it starts another."""


class StepEarly:
    """An optimizer for each parameter. The hooks of all ranks run in one order, and so do their all-reduces."""

    def __init__(self, parameters, build):
        self.optimizers = {parameter: build([parameter]) for parameter in parameters}
        self.under_way = deque()
        self.most_bytes = 0
        for parameter in self.optimizers:
            parameter.register_post_accumulate_grad_hook(self.send)

    def send(self, parameter):
        while self.under_way and (len(self.under_way) == AHEAD or self.under_way[0][1].is_completed()):
            self.step_next()
        parameter.grad /= dist.get_world_size()
        self.under_way.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))
        self.most_bytes = max(self.most_bytes, sum(waiting.grad.nbytes for waiting, _ in self.under_way))

    def step_next(self):
        parameter, work = self.under_way.popleft()
        work.wait()
        self.optimizers[parameter].step()
        parameter.grad = None

    def step(self):
        """After the backward pass: the parameters whose all-reduce was still under way."""
        while self.under_way:
            self.step_next()


def network(me):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), *(nn.Sequential(nn.Tanh(), nn.Linear(256, 256)) for _ in range(8))).to(
        me.device
    )


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)


def main(me):
    """Whether both networks have the same weights, on every rank."""
    early, plain = network(me), network(me)
    stepping, optimizer = StepEarly(early.parameters(), adam), adam(plain.parameters())
    torch.manual_seed(me.rank)
    for _ in range(10):
        x, y = torch.randn(32, 64, device=me.device), torch.randint(256, (32,), device=me.device)
        F.cross_entropy(early(x), y).backward()
        stepping.step()

        optimizer.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        for parameter in plain.parameters():
            parameter.grad /= me.size
            dist.all_reduce(parameter.grad)
        optimizer.step()
    same = all(torch.equal(a, b) for a, b in zip(early.parameters(), plain.parameters()))
    if me.rank == 0:
        whole = sum(parameter.nbytes for parameter in plain.parameters())
        print(
            f"{'the same weights' if same else 'other weights'}; at most {stepping.most_bytes:,} of {whole:,} bytes of gradients at once"
        )
    return same


if __name__ == "__main__":
    with world.script() as me:
        same = main(me)
    sys.exit(0 if same else 1)
