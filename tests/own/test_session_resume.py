"""A user's loop that was killed, or signalled, resumes to the same bits."""

from __future__ import annotations

import functools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests import product
from tests.own.job import OwnJob, assert_same, script
from tests.processes import poll
from tests.ranks import training

pytestmark = pytest.mark.promise("session-resume")

Calm = Callable[..., OwnJob]


def job(folder: Path, sync: str, ranks: int, kind: str, **variables: str) -> OwnJob:
    return OwnJob(folder, ranks, kind, f"sync.name={sync}", **variables)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    @functools.cache
    def undisturbed(sync: str, ranks: int, kind: str, **variables: str) -> OwnJob:
        found = job(tmp_path_factory.mktemp("calm"), sync, ranks, kind, **variables)
        done = found.go()
        assert done.code == 0 and "the script goes on after the run" in done.output, done.output
        return found

    return undisturbed


FATES: dict[str, tuple[str, dict[str, str], str, int]] = {
    "a loader of torch's, with processes of its own": ("loader", {"LOOP_WORKERS": "2"}, "0:14:KILL", 1),
    "a loader with a place of its own": ("cursor", {}, "1:13:KILL", 1),
    "two optimizers, micro-batches and clipping": ("batches", {"LOOP_HARD": "1"}, "0:21:KILL", 1),
    "a terminal that is closed": ("part", {}, "1:13:HUP", 75),
    "a signal during an evaluation, which draws again": ("batches", {}, "1:-1:TERM", 75),
}
"""Kind of loop, variables, fate, and exit code of the disturbed start."""


@pytest.mark.promise("signals")
@pytest.mark.parametrize("what", FATES)
def test_a_run_that_is_disturbed_once_resumes_to_the_same_bits(calm: Calm, tmp_path: Path, what: str) -> None:
    kind, variables, fate, code = FATES[what]
    disturbed = job(tmp_path / "run", "flat", 2, kind, **variables)
    left = disturbed.go(LOCKSTEP_TEST_FATE=fate)
    assert left.code == code and "the script goes on" not in left.output, left.output
    step = product.checkpoint_steps(disturbed.run_dir)[0]
    if code == 75:
        status = json.loads((tmp_path / "run/status.json").read_text())
        assert status["code"] == 75 and status["step"] == step >= (13 if ":13:" in fate else 1)
    done = disturbed.go()
    assert done.code == 0 and f"Resuming at step {step}" in done.output, done.output
    assert_same(disturbed, calm("flat", 2, kind, **variables))


def test_a_signal_to_every_process_of_the_job(calm: Calm, tmp_path: Path) -> None:
    """As a cluster sends it: the processes of a loader get it too, and must not take their rank along."""
    disturbed = job(tmp_path / "run", "flat", 2, "loader", LOOP_WORKERS="2")
    disturbed.words.append("checkpoint.every_steps=2")  # step 10 is within an epoch: the loader's processes live
    with disturbed.started(LOCKSTEP_TEST_FATE="1:11:DELAY") as gang:
        poll((tmp_path / "run/checkpoints/step-00000010/manifest.json").exists, 240, "a checkpoint")
        pids = gang.pids()
        assert len(pids) >= 6
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        left = gang.wait(240)
    assert left.code == 75, left.output
    assert disturbed.go().code == 0
    assert_same(disturbed, calm("flat", 2, "loader", LOOP_WORKERS="2"))


def test_a_learning_rate_that_the_checkpoint_overrules_is_reported_once(tmp_path: Path) -> None:
    code = """
import sys, torch
from lockstep import Session
rate, epochs = sys.argv[2:]
with Session(sys.argv[1]) as run:
    model = run.replicate(torch.nn.Linear(4, 2))
    optimizer = run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=float(rate)))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    run.keep(schedule=schedule)
    for epoch in run.epochs(int(epochs)):
        for (x,) in run.batches(torch.utils.data.TensorDataset(torch.randn(32, 4)), 8):
            run.step(lambda x: (model(x).square().mean(), {name: len(x) for name in "abcd"[int(epochs) :]}), x)
        schedule.step()
"""
    outputs = []
    for number, rate in enumerate(("0.1", "0.1", "0.025", "0.025"), 1):
        done = script(2, code, tmp_path / "run", rate, str(number))
        assert done.code == 0, done.output
        outputs.append([line for line in done.output.splitlines() if "learning rate" in line])
    assert [len(lines) for lines in outputs] == [0, 0, 1, 0], outputs
    assert "rank 0" in outputs[2][0] and "0.1 → 0.025" in outputs[2][0], outputs


AGAIN = """
import sys, torch
from lockstep import Session
def start(what, steps):
    with Session(f"{sys.argv[1]}/{what}") as run:
        model = run.replicate(torch.nn.Linear(4, 2))
        optimizer = run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        for epoch in run.epochs(steps=steps):
            for group in optimizer.param_groups if epoch else ():
                group["lr"] = group["lr"] * 0.1 if what == "rate" else 0.01 / epoch
            if what == "weights" and epoch:
                torch._foreach_mul_([p.data for p in model.parameters()], 0.5)
            for (x,) in run.batches(torch.utils.data.TensorDataset(torch.randn(16, 4)), 4):
                for group in optimizer.param_groups if what == "warmed" else ():
                    group["lr"] = group["lr"] * 1.1
                run.step(lambda x: model(x).square().mean(), x)
for what in ("rate", "weights", "value", "warmed"):
    start(what, 6)
    start(what, 8)
"""


def test_what_a_script_changes_a_second_time_as_it_resumes_within_an_epoch_is_named(tmp_path: Path) -> None:
    """A rate that is set from the epoch is not, also where each step moves it."""
    done = script(1, AGAIN, tmp_path)
    named = [line for line in done.output.splitlines() if "warning: " in line]
    whats = ("the learning rate of optimizer.param_groups[0]", "weights")
    assert done.code == 0 and len(named) == 2, done.output
    assert all(
        f"the script changes {what} between the beginning of an epoch" in line for what, line in zip(whats, named)
    ), named


LOGS = """
import os, signal, sys, torch
from lockstep import Session
with Session(sys.argv[1], "checkpoint.every_steps=100") as run:
    model = run.replicate(torch.nn.Linear(4, 2))
    run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    for epoch in run.epochs(2):
        for (x,) in run.batches(torch.utils.data.TensorDataset(torch.randn(16, 4)), 4):
            run.step(lambda x: model(x).square().mean(), x)
        for part in range(4):
            if run.rank and not run.resumed and not part:
                os.kill(os.getpid(), signal.SIGTERM)
            run.boundary()
        if run.leader:
            run.log(seen=1)
"""


def test_the_ranks_save_together_where_one_alone_logs_after_the_evaluation_that_a_start_left(tmp_path: Path) -> None:
    assert [script(2, LOGS, tmp_path / "run").code for _ in range(2)] == [75, 0]
    assert product.checkpoint_steps(tmp_path / "run")[0] == 8


CHANGED = """
import hashlib, sys, torch
from lockstep import Session
folder, sync, compiled = sys.argv[1:]
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.back, self.norm, self.head = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)
        self.tied = torch.nn.ModuleList([self.back, self.norm])
        self.register_buffer("transient", torch.zeros(1), persistent=False)
    def forward(self, x):
        return self.head(self.norm(self.back(x)).relu())
def start(name, epochs):
    with Session(f"{folder}/{name}", f"sync.name={sync}") as run:
        net = Net()
        net.back.requires_grad_(False)
        model = run.replicate(torch.compile(net, backend="eager") if compiled and not run.resumed else net)
        run.optimizer(lambda _: torch.optim.SGD(net.back.parameters(), lr=0.1, momentum=0.9))
        trained = [*net.head.parameters(), *net.norm.parameters()] if run.resumed else [*net.head.parameters()]
        added = run.optimizer(lambda _: torch.optim.Adam(trained, lr=0.01), "added")
        run.average(0.9)
        for epoch in run.epochs(epochs):
            if epoch == 1:
                net.back.requires_grad_(True)
                net.norm.eval()
                added.add_param_group({"params": net.norm.parameters(), "lr": 0.02})
            for (x,) in run.batches(torch.utils.data.TensorDataset(torch.ones(32, 8) / torch.arange(1, 33)[:, None]), 16):
                run.step(lambda x: model(x).square().mean(), x)
            assert net.training and net.norm.training == (epoch < 1), epoch
            net.eval()
            run.boundary()
            net.train()
            net.norm.train(epoch < 1)
        tensors = [*net.state_dict().values(), *run.for_evaluation().state_dict().values()]
        groups = [(len(group["params"]), group["lr"]) for group in added.param_groups]
        return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest(), groups
calm = start("calm", 3)
start("resumed", 2)
print(f"same: {start('resumed', 3) == calm}", flush=True)
print(sorted(Net().state_dict()))
"""


@pytest.mark.parametrize(("sync", "compiled"), [("exact", ""), ("flat", "compiled")])
def test_what_a_script_unfreezes_adds_and_compiles_is_so_after_a_resume(
    tmp_path: Path, sync: str, compiled: str
) -> None:
    """Which parameters are trained, which modules, and the optimizers' groups are those of the checkpoint, whatever a start makes."""
    done = script(1, CHANGED, tmp_path, sync, compiled)
    assert done.code == 0 and "same: True" in done.output, done.output
    assert done.output.count("has changed the groups of parameters of added") == 1, done.output
    exported = training("export", str(tmp_path / "calm"), str(tmp_path / "weights.safetensors"))
    assert exported.code == 0, exported.output
    assert str(sorted(load_file(tmp_path / "weights.safetensors"))) in done.output, "what the plain network loads"


DRAWING = """
import random, sys, torch
from lockstep import Session
with Session(sys.argv[1]) as run:
    model = run.replicate(torch.nn.Linear(4, 2))
    run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    alike, late, own = torch.Generator().manual_seed(1), random.Random(3), random.Random(run.rank)
    if len(sys.argv) > 3:
        late.seed(run.rank)
    run.keep(alike=alike, late=late, own=own)
    print(run.rank, "begins", torch.rand(1, generator=alike).item(), late.random(), own.random(), flush=True)
    for epoch in run.epochs(int(sys.argv[2])):
        for x in run.batches(torch.ones(16, 4), 8):
            run.step(lambda x: model(x).square().mean(), x)
    print(run.rank, "ends", torch.rand(1, generator=alike).item(), late.random(), own.random(), flush=True)
"""


def test_at_another_number_of_ranks_generators_that_are_alike_resume(tmp_path: Path) -> None:
    """Alike on all ranks when they were saved, and when they are made; another is named."""
    draws: list[dict[str, list[str]]] = []
    for ranks, *words in ((2, "1"), (1, "2"), (2, "3", "late")):
        done = script(ranks, DRAWING, tmp_path / "run", *words)
        assert done.code == 0, done.output
        lines = [line.split() for line in done.output.splitlines()]
        draws.append({" ".join(line[:2]): line[2:] for line in lines if line[1:2] in (["begins"], ["ends"])})
        named = [line for line in done.output.splitlines() if "the number of ranks has changed" in line]
        assert len(named) == (len(draws) > 1), done.output
        assert not named or f"another state of {'late, own' if words[1:] else 'own'}: none is restored" in named[0], (
            named
        )
    first, one, two = draws
    assert one["0 begins"] == [*first["0 ends"][:2], first["0 begins"][2]]
    assert [two[f"{rank} begins"][0] for rank in (0, 1)] == [one["0 ends"][0]] * 2
    assert two["1 begins"][2] == first["1 begins"][2] != two["0 begins"][2]


def test_a_mistake_of_the_user_that_all_ranks_find_is_printed_once(tmp_path: Path) -> None:
    """And each rank's own where they differ. Any other error has its traceback on each rank."""
    code = """
import sys, torch
from lockstep import Session
from tests.product import UserError
with Session(sys.argv[1]) as run:
    raise ValueError("a bug") if sys.argv[2] == "bug" else UserError(sys.argv[2] or f"of rank {run.rank}")
"""
    for what, count in (("the same", 1), ("", 3)):
        done = script(3, code, tmp_path / "run", what)
        assert done.code == 2 and done.output.count("error: ") == count, done.output
    done = script(3, code, tmp_path / "run", "bug")
    assert done.code == 1 and done.output.count("Traceback") == 3, done.output
