"""A loop of one's own that was killed, or signalled, goes on to the same bits."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import product
from tests.events import events
from tests.own.job import OwnJob, assert_same, script
from tests.processes import poll

pytestmark = pytest.mark.promise("session-resume")

ALONE = ("data_parallel",)
OPTIONS = {"powersgd": ["sync.options={rank: 1, start: 3}"]}
Calm = Callable[..., OwnJob]


def job(folder: Path, sync: str, ranks: int, kind: str, **variables: str) -> OwnJob:
    return OwnJob(folder, ranks, kind, f"sync.name={sync}", *OPTIONS.get(sync, ()), **variables)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    @functools.cache
    def undisturbed(sync: str, ranks: int, kind: str, **variables: str) -> OwnJob:
        found = job(tmp_path_factory.mktemp("calm"), sync, ranks, kind, **variables)
        done = found.go()
        assert done.code == 0 and "the script goes on after the run" in done.output, done.output
        return found

    return undisturbed


def _kill(number: int) -> tuple[str, int, str, int, str]:
    """Scenario: (strategy, ranks, kind of loop, workers, fate)."""
    draw = random.Random(number)
    every = sorted(product.strategies())
    sync = every[number % len(every)]
    ranks = 1 if sync in ALONE else draw.choice([1, 2, 2, 2, 3])
    kind = draw.choice(["batches", "batches", "loader", "part"])
    fate = f"{draw.randrange(ranks)}:{draw.randrange(2, 24)}:KILL"
    return sync, ranks, kind, draw.choice([0, 0, 0, 1, 2]), fate


ALWAYS = (4, 9, 18)
"""Of flat, zero1 and powersgd: the whole state on each rank, a part of it, and a memory of its own."""
SCENARIOS = [_kill(number) for number in range(int(os.environ.get("LOCKSTEP_SCENARIOS", "0"))) or ALWAYS]


@pytest.mark.parametrize(("sync", "ranks", "kind", "workers", "fate"), SCENARIOS, ids=str)
def test_killed_anywhere_it_goes_on_to_the_same_bits(
    calm: Calm, tmp_path: Path, sync: str, ranks: int, kind: str, workers: int, fate: str
) -> None:
    disturbed = job(tmp_path / "run", sync, ranks, kind)
    died = disturbed.go(LOCKSTEP_TEST_FATE=fate, LOOP_WORKERS=str(workers))
    assert died.code != 0, died.output
    saved = product.checkpoint_steps(disturbed.run_dir)
    assert saved or int(fate.split(":")[1]) <= 10, "the one after step 2 is on the disk by step 10"
    # What a loader of torch's own draws for a sample depends on the number of its workers; with `batches` it does not.
    again = workers if kind == "loader" else (workers + 1) % 3
    done = disturbed.go(LOOP_WORKERS=str(again))
    assert done.code == 0 and ("Resuming at step" in done.output) == bool(saved), done.output
    assert_same(disturbed, calm(sync, ranks, kind, **({"LOOP_WORKERS": str(workers)} if kind == "loader" else {})))


FATES: dict[str, tuple[str, dict[str, str], str, int]] = {
    "a loader with a place of its own": ("cursor", {}, "1:13:KILL", 1),
    "two optimizers, micro-batches and clipping": ("batches", {"LOOP_HARD": "1"}, "0:21:KILL", 1),
    "a signal to one rank": ("batches", {}, "1:13:TERM", 75),
    "a terminal that is closed": ("part", {}, "1:13:HUP", 75),
    "a signal during an evaluation, which draws again": ("batches", {}, "1:-1:TERM", 75),
}
"""Kind of loop, variables, fate, and exit code of the disturbed start."""


@pytest.mark.promise("signals")
@pytest.mark.parametrize("what", FATES)
def test_disturbed_once_it_goes_on_to_the_same_bits(calm: Calm, tmp_path: Path, what: str) -> None:
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


@pytest.mark.parametrize("kind", ["batches", "loader"])
def test_a_signal_to_every_process_of_the_job(calm: Calm, tmp_path: Path, kind: str) -> None:
    """As a cluster sends it: the processes of a loader get it too, and must not take their rank along."""
    disturbed = job(tmp_path / "run", "flat", 2, kind, LOOP_WORKERS="2")
    with disturbed.started(LOCKSTEP_TEST_FATE="1:11:DELAY") as gang:
        poll((tmp_path / "run/checkpoints/step-00000010/manifest.json").exists, 60, "a checkpoint")
        pids = gang.pids()
        assert len(pids) >= 6
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        left = gang.wait(60)
    assert left.code == 75, left.output
    assert disturbed.go().code == 0
    assert_same(disturbed, calm("flat", 2, kind, LOOP_WORKERS="2"))


def test_all_ranks_are_killed_at_once(calm: Calm, tmp_path: Path) -> None:
    """As by a machine that goes out."""
    disturbed, held = job(tmp_path / "run", "zero1", 2, "batches"), tmp_path / "held"
    with disturbed.started(LOCKSTEP_TEST_FATE="0:13:HOLD", LOCKSTEP_TEST_HELD=str(held)) as gang:
        poll(held.exists, 60, "rank 0 in its thirteenth pass")
        poll((tmp_path / "run/checkpoints/step-00000010/manifest.json").exists, 60, "a checkpoint")
        gang.send_signal(signal.SIGKILL)
        assert gang.wait(30).code == 1
    done = disturbed.go()
    assert done.code == 0 and "Resuming at step 1" in done.output, done.output
    assert_same(disturbed, calm("zero1", 2, "batches"))


@pytest.mark.promise("other-world-size")
@pytest.mark.parametrize("sync", ["flat", "zero1", "fsdp"])
def test_it_goes_on_with_another_number_of_ranks(tmp_path: Path, sync: str) -> None:
    """The optimizer's momentum comes along: weights as without a break, but for the order of additions."""
    exact = {"LOOP_EXACT": "1", "LOOP_BATCH": "41"}
    undisturbed, resized = (job(tmp_path / name, sync, 2, "batches", **exact) for name in ("calm", "run"))
    assert undisturbed.go().code == 0
    assert resized.go(LOCKSTEP_TEST_FATE="1:9:TERM").code == 75
    resized.ranks = 3
    done = resized.go()
    assert done.code == 0 and "Resuming at step" in done.output, done.output
    before, after = (one.leaves() for one in (undisturbed, resized))
    names = [name for name in before if name.startswith(("/shared/model/", "/shared/optimizer/state/"))]
    assert len(names) > 10
    for name in names:
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-10, msg=f"{sync}: {name}")


def test_a_run_that_is_complete_trains_no_more(calm: Calm) -> None:
    complete = calm("flat", 2, "batches")
    before = complete.leaves()
    done = complete.go()
    assert done.code == 0 and "The run is complete: 3 epochs" in done.output, done.output
    assert complete.leaves().keys() == before.keys() and len(events(complete.run_dir, "epoch")) == 3


@pytest.mark.promise("not-finite")
def test_a_gradient_that_is_not_finite_moves_no_weight(tmp_path: Path) -> None:
    stopped = job(tmp_path / "stop", "flat", 2, "batches")
    done = stopped.go(LOCKSTEP_TEST_FATE="1:9:NANINPUT")
    assert done.code == 1 and "diverged at step 9: rank 1: loss" in done.output, done.output
    assert json.loads((tmp_path / "stop/status.json").read_text())["code"] == 1
    skipped = OwnJob(tmp_path / "skip", 2, "batches", "sync.name=flat", "nonfinite=skip")
    done = skipped.go(LOCKSTEP_TEST_FATE="1:9:NANINPUT")
    assert done.code == 0 and "left out step 9: rank 1: loss" in done.output, done.output
    weights = {name: value for name, value in skipped.leaves().items() if "generators" not in name}
    assert all(bool(torch.isfinite(value).all()) for value in weights.values() if value.is_floating_point())


@pytest.mark.promise("named-rank")
def test_a_rank_that_dies_is_named_and_an_error_of_the_scripts_own_keeps_its_traceback(tmp_path: Path) -> None:
    died = OwnJob(tmp_path / "died", 2, "batches", "collective_timeout=5", grace=2)
    done = died.go(LOCKSTEP_TEST_FATE="1:9:STOP")
    assert done.code == 1 and "rank 1 did not arrive (last seen at step" in done.output, done.output
    done = OwnJob(tmp_path / "failed", 1, "batches").go(LOCKSTEP_TEST_FATE="0:9:RAISE")
    assert done.code == 1 and "Traceback" in done.output and "ArithmeticError: this rank" in done.output, done.output
    status = json.loads((tmp_path / "failed/status.json").read_text())
    assert status["code"] == 1 and "ArithmeticError" in status["reason"]


def test_a_learning_rate_that_the_checkpoint_overrules_is_said_once(tmp_path: Path) -> None:
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
            run.step(lambda x: model(x).square().mean(), x)
        schedule.step()
"""
    outputs = []
    for number, rate in enumerate(("0.1", "0.1", "0.025", "0.025"), 1):
        done = script(2, code, tmp_path / "run", rate, str(number))
        assert done.code == 0, done.output
        outputs.append([line for line in done.output.splitlines() if "learning rate" in line])
    assert [len(lines) for lines in outputs] == [0, 0, 1, 0], outputs
    assert "rank 0" in outputs[2][0] and "0.1 → 0.025" in outputs[2][0], outputs


LATER = """
import sys, torch
from lockstep import Session
for name in ("first", "second", "third"):
    try:
        with Session(f"{sys.argv[1]}-{name}") as run:
            if name != "first":
                raise ValueError("in the " + name)
        print("a done", flush=True)
    except ValueError:
        if name == "third":
            raise
"""


def test_an_error_that_all_ranks_raise_is_printed_once(tmp_path: Path) -> None:
    """And each rank's own where they differ."""
    code = """
import sys, torch
from lockstep import Session
with Session(sys.argv[1]) as run:
    model = run.replicate(torch.nn.Linear(4, 2))
    if sys.argv[2] == "same" or run.rank == 1:
        model(torch.ones(3))
    raise ValueError("another")
"""
    done = script(3, code, tmp_path / "same", "same")
    assert done.code == 1 and done.output.count("Traceback") == 1, done.output
    assert [done.output.count(f"rank {rank}: RuntimeError: ") for rank in range(3)] == [0, 1, 1], done.output
    done = script(3, LATER, tmp_path / "later")
    assert done.code == 1 and done.output.count("Traceback") == 1 and done.output.count("a done") == 3, done.output
    assert done.output.count("ValueError: in the third (the same as on rank 0)") == 2, done.output
    done = script(3, code, tmp_path / "different", "different")
    assert done.code == 1 and done.output.count("Traceback") == 2, done.output
    assert done.output.count("rank 2: ValueError: another (the same as on rank 0)") == 1, done.output
