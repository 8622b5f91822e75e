"""What a job on SLURM survives: each disturbance once, and the weights are those of the undisturbed run, bit by bit."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.backends.slurm_query import Unreachable
from jobs.spec import JobSpec
from tests.events import events
from tests.processes import PYTHON, clean_env, gang, poll
from tests.slurm.conftest import Bench, once
from training import checkpoint

EPOCHS = 20
STEPS = EPOCHS * 8
SETTINGS: dict[str, Any] = {
    "data.source": "synthetic", "data.options": {"n": 192, "n_test": 50, "size": 8, "noise": 1.5}, "data.num_shards": 3,
    "augment.crop": 1, "model": "tests.nets:Paced", "model_options": {}, "global_batch_size": 24, "uneven": "drop",
    "epochs": EPOCHS, "precision": "float64", "evaluate.every": EPOCHS, "loss.reduction": "mean", "optim.name": "sgd",
    "lr": 0.05, "bias_lr_factor": 1, "weight_decay": 0, "schedule": [], "checkpoint.every_steps": 10, "log.every": 1,
    "threads": 1,
}  # fmt: skip


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, data_root: Path) -> Path:
    """The same training on 2 ranks of this machine, without SLURM."""
    words = [f"{name}={json.dumps(value) if not isinstance(value, str) else value}" for name, value in SETTINGS.items()]
    return trained_here(tmp_path_factory.mktemp("whole") / "run", 2, *words, f"data.root={data_root}")


def trained_here(run: Path, ranks: int, *words: str, timeout: float = 180) -> Path:
    """The smoke recipe with the settings `words`, trained on ranks of this machine, without SLURM, to its end."""
    done = gang(ranks, "run", "smoke", "--run-dir", str(run), "--set", *words, env=clean_env(), timeout=timeout)
    assert done.code == 0, done.output
    return run


def assert_same(one: Path, other: Path, steps: int = STEPS) -> None:
    first, second = (
        checkpoint.load(path / f"checkpoints/step-{steps:08d}")["shared"]["model"] for path in (one, other)
    )
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


class Training:
    """A slow job of 2 nodes × 1 rank that becomes fast once the test lets it. `pace`: seconds a step until then."""

    def __init__(self, bench: Bench, name: str, pace: float = 0.2, **more: Any) -> None:
        self.bench, self.name, self.run = bench, name, bench.folder / name
        self.slow = bench.folder / f"{name}.slow"
        self.slow.touch()
        self.spec = JobSpec.of(
            {
                "name": name, "recipe": "smoke", "nodes": 2, "run_dir": str(self.run), "grace_seconds": 5, "cpus": 1,
                "overrides": {**SETTINGS, "data.root": str(bench.data_root)}, "max_restarts": 4, "memory": "2Gi",
                "env": {"LOCKSTEP_TEST_PACE": str(pace), "LOCKSTEP_TEST_PACE_FILE": str(self.slow)}, **more,
            }
        )  # fmt: skip
        bench.backend.submit(self.spec)
        self.job_id = bench.backend.job_id(name)

    def reaches(self, step: int) -> None:
        poll(lambda: any(event.get("step", 0) >= step for event in events(self.run)), 90, f"step {step}")

    def attempts(self) -> int:
        return max((event["attempt"] for event in events(self.run)), default=0)

    def ends_like(self, undisturbed: Path) -> None:
        self.slow.unlink(missing_ok=True)
        found = self.bench.backend.wait(self.name, 150)
        log = "\n".join(self.bench.backend.logs(self.name))
        assert (found.state, found.code) == ("succeeded", 0), f"{found}\n{log}"
        assert_same(self.run, undisturbed)

    def saved_at(self) -> list[int]:
        return [event["step"] for event in events(self.run, "preempted") if event["saved"]]

    def resumed_at(self) -> list[int]:
        return [event["step"] for event in events(self.run, "resumed")]


def test_the_time_limit(bench: Bench, undisturbed: Path) -> None:
    """SLURM's own clock: it looks every 30 s, and signals up to 30 s before the lead that the script asks for."""
    job = Training(bench, "limited", pace=0.5)
    job.reaches(2)
    bench.cluster.ask("scontrol", "update", f"jobid={job.job_id}", "timelimit=1")
    poll(job.saved_at, 60, "the signal and the checkpoint")
    poll(lambda: bench.backend.status("limited").state == "restarting", 30, "the requeue")
    bench.cluster.ask("scontrol", "update", f"jobid={job.job_id}", "timelimit=60")
    job.ends_like(undisturbed)
    assert job.resumed_at() == job.saved_at() and job.attempts() == 2
    assert bench.backend.status("limited").ranks[0].restarts == 1


def test_a_higher_partition_preempts(bench: Bench, undisturbed: Path) -> None:
    job = Training(bench, "low")
    job.reaches(2)
    urgent = {"partition": "urgent", "exclusive": True}
    bench.backend.submit(bench.command("high", "print('urgent work')", nodes=2, ranks_per_node=1, slurm=urgent))
    poll(job.saved_at, 60, "the signal and the checkpoint")
    assert bench.backend.wait("high", 90).state == "succeeded"
    job.ends_like(undisturbed)
    assert job.resumed_at() == job.saved_at() and job.attempts() == 2


def test_a_requeue_by_hand(bench: Bench, undisturbed: Path) -> None:
    job = Training(bench, "by-hand")
    job.reaches(12)  # a checkpoint is there, should the grace not be enough to save another
    bench.cluster.ask("scontrol", "requeue", job.job_id)
    poll(lambda: bench.backend.status("by-hand").state == "restarting", 30, "the requeue")
    job.ends_like(undisturbed)
    assert job.attempts() == 2 and job.resumed_at()[0] >= 10


def test_a_node_is_powered_off(bench: Bench, undisturbed: Path) -> None:
    job = Training(bench, "unlucky")
    job.reaches(12)
    bench.cluster.node("stop", "node2")
    try:
        poll(lambda: bench.backend.status("unlucky").state == "restarting", 90, "SLURM's notice")
    finally:
        bench.cluster.node("start", "node2")
    job.ends_like(undisturbed)
    assert job.attempts() == 2 and job.resumed_at()[0] % 10 == 0 and not job.saved_at()


def test_the_controller_is_restarted(bench: Bench, undisturbed: Path) -> None:
    job = Training(bench, "headless")
    job.reaches(2)
    # The controller writes its state some seconds after a change; killed before, it would not know of the job at all.
    changed = time.time()
    bench.cluster.ask("scontrol", "update", f"jobid={job.job_id}", "admincomment=here")
    state = bench.cluster.folder / "state/job_state"
    poll(lambda: state.exists() and state.stat().st_mtime >= changed, 30, "the controller's state on the disk")
    bench.cluster.node("stop", "ctl")
    try:
        if not bench.cluster.accounting:
            with pytest.raises(Unreachable, match="controller does not answer"):
                bench.backend.status("headless")
        told = bench.backend.wait("headless", 1)
        assert (told.state, told.final) == ("running", False), told
    finally:
        bench.cluster.node("start", "ctl")
    job.ends_like(undisturbed)
    assert job.attempts() == 1, "the ranks have not noticed"


@once
def test_a_signal_before_the_ranks_are_there(bench: Bench, undisturbed: Path) -> None:
    """It is held back while torch is being imported, and ends the run at its first step."""
    job = Training(bench, "early")
    folder = bench.backend.folder / "early/submitit"
    poll(
        lambda: all("Loading pickle" in _text(folder / f"{job.job_id}_{rank}_log.out") for rank in (0, 1)),
        60,
        "the tasks",
    )
    bench.cluster.ask("scancel", "--signal=USR2", job.job_id)
    poll(job.saved_at, 60, "the checkpoint")
    job.ends_like(undisturbed)
    assert job.attempts() == 2 and job.saved_at()[0] <= 3


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@once
@pytest.mark.parametrize("struck", ["every task", "one task"])
def test_a_signal_while_a_task_is_being_started(bench: Bench, monkeypatch: pytest.MonkeyPatch, struck: str) -> None:
    """Nothing holds it back yet, so the task dies of it: the job is started again, once.

    Where every task dies, only the script is left to ask for that. Where one dies, SLURM ends the others, and
    what asks is whichever comes first: the script, or the task of a rank that had been started and says so.
    """
    which = '"${SLURM_PROCID}"' if struck == "every task" else "1"
    first = f'[ "${{SLURM_RESTART_COUNT:-0}}" != 0 ] || [ "${{SLURM_PROCID}}" != {which} ] || kill -USR2 $$'
    _stand_in(bench, monkeypatch, first)
    slurm = {"container": "apptainer", "image": "/images/none.sif", "python": PYTHON}
    bench.backend.submit(bench.command("struck", "print('through')", max_restarts=1, slurm=slurm))
    found = bench.backend.wait("struck", 60)
    assert (found.state, found.ranks[0].restarts) == ("succeeded", 1), found
    for rank in (0, 1):
        said = [line for line in bench.backend.logs("struck", rank=rank) if not line.startswith("slurmstepd")]
        assert said[-1] == "through", said
        if struck == "every task" or rank == 1:  # nobody was there who could have said anything
            assert said == ["through"], said
        for line in said[:-1]:  # the rank may have ended before SLURM got to it
            assert re.fullmatch(r"through|rank 0 ended with \d+; SLURM starts job \d+ again", line), said


def _stand_in(bench: Bench, monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    """In Apptainer's place: a program that does `first` and then runs the words on the node."""
    programs = bench.folder / "bin"
    programs.mkdir()
    (programs / "apptainer").write_text(f'#!/bin/sh\n{first}\nwhile [ "$1" != sh ]; do shift; done\nexec "$@"\n')
    (programs / "apptainer").chmod(0o755)
    for name in ("sh", "env"):
        (programs / name).symlink_to(f"/usr/bin/{name}")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")


@once
def test_restarts_are_used_up(bench: Bench) -> None:
    """The job ends saved and in a known state; submitted again, it goes on."""
    job = Training(bench, "spent", max_restarts=0)
    job.reaches(2)
    bench.cluster.ask("scancel", "--signal=USR2", job.job_id)
    found = bench.backend.wait("spent", 60)
    assert (found.state, found.code) == ("preempted", 75), found
    assert found.reason == "saved, and all 0 restarts are used up: submit it again to go on"
    job.slow.unlink()
    bench.backend.submit(job.spec, "replace")
    assert bench.backend.wait("spent", 90).state == "succeeded"
    assert job.resumed_at() == job.saved_at()


@once
def test_without_scontrol_the_script_asks(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container there is no scontrol: rank 0 leaves a note, and the script has the job started again."""
    _stand_in(bench, monkeypatch, f"PATH={bench.folder}/bin")
    slurm = {"container": "apptainer", "image": "/images/none.sif", "python": PYTHON}
    program = "import os, shutil, sys; print(shutil.which('scontrol')); sys.exit(75 * (os.environ['LOCKSTEP_RESTARTS'] == '0'))"
    bench.backend.submit(bench.command("inside", program, max_restarts=1, nodes=2, ranks_per_node=1, slurm=slurm))
    found = bench.backend.wait("inside", 60)
    assert (found.state, found.ranks[0].restarts) == ("succeeded", 1), found
    assert list(bench.backend.logs("inside", rank=0)) == ["None", "None"]
