"""Variables of a script that a start which resumes does not get back, or that each rank has for itself: each of them is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.own.job import script

pytestmark = pytest.mark.promise("session-resume")

CODE = """
import itertools, random, sys, time, types, torch
from lockstep import Session
COUNTS = {"batches": 0}
class Meter:
    shown = 0
    def __init__(self):
        self.total, self.began = 0.0, time.time()
    def add(self, value):
        self.total += value
class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = 1.0
class Slow(torch.optim.SGD):
    slow = ()
class Slots:
    __slots__ = ("n",)
def augment(x, memory=[]):
    augment.calls += 1
    memory.append(1)
    return x
augment.calls = 0
class Net(torch.nn.Linear):
    last = None
    def forward(self, x):
        y = super().forward(x)
        self.last = y.detach()
        return y
def train(kind, run, steps):
    data, net = torch.randn(64, 4, generator=torch.Generator().manual_seed(1)), Net(4, 1)
    model = run.replicate(net)
    optimizer = run.optimizer(lambda parameters: Slow(parameters, lr=0.1))
    optimizer.slow, loss = [torch.zeros(4)], Loss()
    count, meter, history, average, slow = 0, Meter(), [], torch.zeros(4), None
    slots, unmoved, reader = Slots(), itertools.count(), iter(order := list(range(500)))
    slots.n = 0
    other = itertools.cycle([1, 2]) if kind == "drawn" else None
    weights, noise, best, clock = {name: p.detach().clone() for name, p in net.named_parameters()}, random.Random(3), None, time.time()
    read, network, tries = torch.utils.data.DataLoader([1.0, 2.0]), net, run.values.get("tries", 0)
    ended = filter(None, (number for number in (1, 2)))
    assert len(list(ended)) == 2
    anchor = net.weight.detach().clone() if kind == "anchor" else None
    for epoch in (number for _, number in enumerate(run.epochs(steps=steps))) if kind == "epochs" else run.epochs(steps=steps):
        hard = data[model(data).argsort(0)[:4, 0]].clone() if kind == "hard" else data[epoch : epoch + 4]
        batches = run.batches(data, 8)
        for item in enumerate(one for one in batches) if kind == "enumerate" else zip(batches, read) if kind == "zip" else batches:
            x = {"enumerate": item[1], "zip": item[0]}.get(kind, item)
            run.step(lambda x: model(x).square().mean(), x)
            seen = len(x)
            if kind == "count":
                count, best = count + 1, 0.5 if best is None else best * 0.9
            elif kind == "objects":
                meter.add(1.5)
                Meter.shown += 1
                augment(x)
                slots.n += 1
                loss.gamma += 0.5
                optimizer.slow = [tensor + 1 for tensor in optimizer.slow]
                COUNTS["batches"] += 1
            elif kind == "lists":
                history.append(seen)
                random.shuffle(order)
            elif kind == "tensors":
                average = 0.9 * average + x.mean(0)
                slow = [p.detach().clone() if slow is None else s.lerp(p.detach(), 0.1) for s, p in zip(slow or order, net.parameters())]
                weights = {name: p.detach().clone() for name, p in net.named_parameters()}
            elif kind == "drawn":
                noise.random(), next(other), next(reader)
            elif kind == "calm":
                clock, run.values["tries"] = time.time(), run.values.get("tries", 0) + 1
                tries = run.values["tries"]
                network = run.for_evaluation()
for kind in sys.argv[3:]:
    with Session(f"{sys.argv[1]}/{kind}", sync="flat") as run:
        train(kind, run, int(sys.argv[2]))
"""
NAMED = {
    "count": {"count", "best"}, "lists": {"history", "order"}, "tensors": {"average", "slow", "weights"}, "hard": {"hard"},
    "objects": {"meter.total", "Meter.shown", "augment.calls", "augment.memory", "slots.n", "COUNTS", "meter.shown",
                "loss.gamma", "optimizer.slow"}, "anchor": {"anchor"},
    "drawn": {"noise", "other", "reader"}, "epochs": {"enumerate"}, "enumerate": {"enumerate"}, "zip": {"zip"}, "calm": set(),
}  # fmt: skip


@pytest.mark.parametrize("planned", [(5, 10), (8, 12)])
def test_a_start_that_resumes_names_the_variables_that_do_not(tmp_path: Path, planned: tuple[int, int]) -> None:
    """Counters, lists, averages, objects, copies of the weights, generators, iterators, and what an epoch computes from the weights: each
    has another value than at the save, in the middle of an epoch or at its end. Batches, the time, the last activation, a model for
    evaluation, an iterator that has ended, and what the script restores itself are not named."""
    kinds = [kind for kind in NAMED if planned[0] % 8 or kind not in ("hard", "enumerate", "zip")]
    first, second = (script(2, CODE, tmp_path, str(steps), *kinds) for steps in planned)
    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert "variables of the script" not in first.output, first.output
    runs = re.split("This run is kept|Preprocessing", second.output)[1:]
    assert len(runs) == len(kinds), second.output
    for kind, output in zip(kinds, runs, strict=True):
        listed = re.findall(r"no checkpoint has them: (.*?)\. Put what", output)
        names = {name for line in listed for name in line.split(", ")}
        names.update(re.findall(r"warning: rank 0: (\w+)\(\) goes over run", output))
        assert names == NAMED[kind] and "rank 1: " not in output, (kind, output)


DRAWN = """
import os, sys, numpy as np, torch, torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split
from lockstep import Session
class Rough(torch.optim.SGD):  # as one without a learning rate
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        del self.param_groups[0]["lr"]
    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.1 * parameter.grad
class Own(torch.utils.data.Dataset):
    draws = None
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if kind == "loader" and self.draws is None:
            self.draws = np.random.default_rng()
        return torch.full((4,), float(index)) / 64 + (0 if self.draws is None else self.draws.normal()), index % 3
kind, steps = sys.argv[2], int(sys.argv[3])
if kind == "drawn":
    torch.seed(), np.random.seed()  # as in a process that was not forked
else:
    torch.manual_seed(1), np.random.seed(1)
table, teacher, mask = torch.randn(4, 4), torch.nn.Linear(4, 3).requires_grad_(False), np.random.rand(4)
chosen, _ = random_split(range(64), [48, 16])
torch.seed()
net = torch.nn.Linear(4, 3)
center, total = torch.zeros(4), 0.0
with Session(sys.argv[1], sync="flat") as run:
    model = run.replicate(net)
    run.optimizer(Rough)
    def loss(x, y):
        global total
        total += 1.0 + run.rank
        return F.cross_entropy(model((x - center) @ table), y)
    for epoch in run.epochs(steps=steps):
        data = Own()
        loader = DataLoader(data, 8, num_workers=1, sampler=DistributedSampler(data, run.size, run.rank, shuffle=False))
        for x, y in run.iterate(loader) if kind == "loader" else run.batches(data, 16):
            if kind == "center":
                center = 0.9 * center + 0.1 * x.mean(0)
            run.step(loss, x, y, samples=len(y))
            torch.rand(1)
"""
OF_RANKS = ["the variable table and 2 more is another one on rank 1 than on rank 0"]
OF_STARTS = ["the variable table and 3 more is another one than at the start before"]
MOVED = ["the variable center has another value on rank 1 than on rank 0, and the function of run.step() reads it"]
READ = ["a sample of the dataset differs between two reads"]


@pytest.mark.parametrize(
    ("kind", "ranks", "first", "second"),
    [
        ("drawn", 2, OF_RANKS, [*OF_RANKS, "the variable chosen.indices is another one than at the start before"]),
        ("drawn", 1, [], OF_STARTS),
        ("center", 2, MOVED, ["no checkpoint has them: center, total", *MOVED]),
        ("loader", 2, READ, [*READ, "the loader gives other ones now"]),
        ("seeded", 2, [], []),
    ],
)
def test_what_each_rank_or_start_has_for_itself_is_named(
    tmp_path: Path, kind: str, ranks: int, first: list[str], second: list[str]
) -> None:
    """Two ranks draw another table, teacher and mask before their session, or another start does, and another split. Each rank moves its
    own mean, which the function of a step reads. A loader draws other batches than those that are skipped. What is seeded, the weights, a
    sum for the eye, and torch's generator are not named. The optimizer has no learning rate."""
    for steps, expected in ((3, first), (6, second)):
        done = script(ranks, DRAWN, tmp_path / "run", kind, str(steps))
        lines = [line for line in done.output.splitlines() if "warning: " in line]
        warnings = [line for line in lines if "no checkpoint has them: total." not in line]
        assert done.code == 0 and len(warnings) == len(expected), done.output
        for words, line in zip(expected, warnings):
            assert words in line, done.output
