"""A loop of one's own that was killed, or signalled, goes on to the same bits."""

from __future__ import annotations

import functools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import product
from tests.own.job import OwnJob, assert_same, script
from tests.processes import poll

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


def test_a_signal_to_every_process_of_the_job(calm: Calm, tmp_path: Path) -> None:
    """As a cluster sends it: the processes of a loader get it too, and must not take their rank along."""
    disturbed = job(tmp_path / "run", "flat", 2, "loader", LOOP_WORKERS="2")
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
