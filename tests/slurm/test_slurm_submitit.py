"""Drivers of ten lines, with submitit alone and with Lockstep: preempted on a real SLURM, and resumed; and submitit's local tasks."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.events import events
from tests.processes import PYTHON, ROOT, poll, run, started
from tests.slurm.conftest import Bench, accounted, every
from tests.slurm.trainings import Hold, training

pytestmark = pytest.mark.promise("submitit")

SUBMITIT_ALONE = """
import submitit
from lockstep import JobSpec
from lockstep.jobs.slurm.render import slurm_parameters, training_task

spec = JobSpec.load("job.yaml")
executor = submitit.AutoExecutor(folder="submitit", cluster="slurm")
executor.update_parameters(**slurm_parameters(spec))
job = executor.submit(training_task(spec))
print(job.job_id, flush=True)
print(job.results()[0]["accuracy"])
"""
LOCKSTEP = """
from lockstep import JobSpec, submit

job = submit(JobSpec.load("job.yaml"), "slurm")
print(job.backend.job_id(job.name), flush=True)
assert job.wait(300).state == "succeeded"
print(job.summary()["accuracy"])
"""
FUNCTION = """
import os, sys, time
import lockstep, submitit, torch

def main(folder):
    data = torch.utils.data.TensorDataset(torch.arange(64.0).reshape(32, 2) / 64, torch.ones(32, 1))
    with lockstep.Session(f"{folder}/run", sync="flat", threads=1) as run:
        torch.manual_seed(0)
        model = run.replicate(torch.nn.Linear(2, 1))
        optimizer = run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        run.keep()
        for epoch in run.epochs(30):
            for x, y in run.batches(data, 8):
                run.step(torch.nn.functional.mse_loss(model(x), y))
                time.sleep(0.1 * os.path.exists(f"{folder}/slow"))
        return run.size, [value.tolist() for value in model.parameters()]

if __name__ == "__main__":
    cluster, tasks, folder = sys.argv[1:4]
    executor = submitit.AutoExecutor(folder=f"{folder}/submitit", cluster=cluster)
    slurm = {"nodes": 2, "slurm_wckey": ""} if cluster == "slurm" else {}
    executor.update_parameters(timeout_min=20, tasks_per_node=int(tasks), **slurm)
    job = executor.submit(lockstep.resumable(main), folder)
    print(job.job_id, flush=True)
    print(job.results())
"""


def requeued(bench: Bench, job_id: str) -> None:
    """Waits for the start that a signal has brought about, which need not wait as long as SLURM would have it."""

    def waits() -> bool:
        shown = bench.cluster.ask("scontrol", "show", "job", "-o", job_id)
        return "JobState=PENDING" in shown and "Restarts=1" in shown

    every(0.2, waits, 60, "the requeue")
    bench.cluster.ask("scontrol", "update", f"jobid={job_id}", "starttime=now+2")


@accounted
@pytest.mark.parametrize("driver", [SUBMITIT_ALONE, LOCKSTEP], ids=["submitit alone", "lockstep.submit"])
def test_a_driver_of_ten_lines_is_preempted_and_resumed(bench: Bench, driver: str) -> None:
    assert len([line for line in driver.splitlines() if line]) <= 10
    hold, path = Hold(bench.folder / "ten.hold"), bench.folder / "ten"
    spec = training(bench, "ten", epochs=2, env=hold.env, max_restarts=0)
    (bench.folder / "job.yaml").write_text(json.dumps(spec.plain()))
    with started([PYTHON, "-c", driver], dict(os.environ), cwd=bench.folder) as process:
        assert process.stdout is not None
        job_id = next(line for line in process.stdout if not line.startswith("warning: ")).strip()
        hold.reached()
        bench.cluster.ask("scancel", "--signal=USR2", job_id)
        poll(lambda: events(path, "preempted"), 60, "the signal and the checkpoint")
        hold.let_go()
        requeued(bench, job_id)
        said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert len(events(path, "resumed")) == 1 and float(said.splitlines()[-1]) >= 0


@accounted
def test_a_function_with_a_session_is_requeued_by_submitit_when_all_ranks_have_saved(bench: Bench) -> None:
    program = bench.folder / "driver.py"
    program.write_text(FUNCTION)
    words = [PYTHON, str(program), "slurm", "1"]
    undisturbed, folder = bench.folder / "undisturbed", bench.folder / "own"
    for one in (undisturbed, folder):
        one.mkdir()
    done = run([*words, str(undisturbed)], dict(os.environ), 240)
    assert done.code == 0, done.output
    (folder / "slow").touch()
    with started([*words, str(folder)], dict(os.environ)) as process:
        assert process.stdout is not None
        job_id = process.stdout.readline().strip()
        poll(
            lambda: [event for event in events(folder / "run", "epoch") if event["epoch"] == 2], 120, "the second epoch"
        )
        bench.cluster.ask("scancel", "--signal=USR2", job_id)
        poll(lambda: events(folder / "run", "preempted"), 60, "the signal and the checkpoint")
        (folder / "slow").unlink()
        requeued(bench, job_id)
        said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert said.splitlines()[-1] == done.output.splitlines()[-1] and said.splitlines()[-1].startswith("[(2, [[[")
    assert len(events(folder / "run", "resumed")) == 1


def test_submitits_local_tasks_are_the_ranks_of_one_world(tmp_path: Path) -> None:
    program = tmp_path / "driver.py"
    program.write_text(FUNCTION)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = run([PYTHON, str(program), "local", "2", str(tmp_path)], env, 240)
    assert done.code == 0 and re.fullmatch(r"\[\(2, (.*)\), \(2, \1\)\]", done.output.splitlines()[-1]), done.output


SPEC_OF_TWO = """
import submitit
from lockstep import JobSpec
from lockstep.jobs.slurm.render import training_task

spec = JobSpec.load("job.yaml")
executor = submitit.AutoExecutor(folder="submitit", cluster="local")
executor.update_parameters(timeout_min=5, tasks_per_node=int(TASKS))
print(executor.submit(training_task(spec)).results())
"""


@pytest.mark.parametrize("tasks", [1, 2])
def test_another_number_of_tasks_than_the_spec_asks_for_is_refused_by_name(tmp_path: Path, tasks: int) -> None:
    """And a spec takes its code along."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own/train.py").write_text(
        "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], os.getcwd())\n"
    )
    values = {
        "name": "two",
        "command": [PYTHON, "train.py"],
        "code": "own",
        "ranks_per_node": 2,
        "run_dir": str(tmp_path / "run"),
    }
    (tmp_path / "job.yaml").write_text(json.dumps(values))
    home = tmp_path / "home"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "LOCKSTEP_HOME": str(home)}
    done = run([PYTHON, "-c", SPEC_OF_TWO.replace("TASKS", str(tasks))], env, 120, tmp_path)
    logs = "".join(path.read_text() for path in (tmp_path / "submitit").glob("*_log.out"))
    if tasks == 2:
        assert done.code == 0 and all(f"rank {rank} of 2 {home}/code/" in logs for rank in (0, 1)), (done, logs)
        return
    assert (
        done.code == 1
        and "submitit has started 1 tasks on 1 nodes, and the spec has nodes 1 and ranks_per_node 2" in done.output
    )
    assert "slurm_parameters(spec)" in done.output and "rank 0 of" not in logs
