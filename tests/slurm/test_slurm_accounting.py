"""SLURM with accounting: states that only the accounting knows, and a function that submitit submits, preempts and resumes."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import pytest

from tests.events import events
from tests.processes import PYTHON, poll, run, started
from tests.product import JobSpec
from tests.slurm.conftest import Bench, accounted, lockstep
from tests.slurm.trainings import training

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


def start_requeued(bench: Bench, job_id: str) -> None:
    """Waits until the signal has requeued the job, then starts the job earlier than SLURM would."""

    def is_requeued() -> bool:
        text = bench.cluster.ask("scontrol", "show", "job", "-o", job_id)
        return "JobState=PENDING" in text and "Restarts=1" in text

    poll(is_requeued, 60, "the requeue", pause=0.2)
    bench.cluster.ask("scontrol", "update", f"jobid={job_id}", "starttime=now+2")


@accounted
@pytest.mark.promise("submitit")
def test_a_function_with_a_session_is_requeued_by_submitit_when_all_ranks_have_saved(bench: Bench) -> None:
    """The result equals that of submitit's local tasks as ranks of path world."""
    program = bench.folder / "driver.py"
    program.write_text(FUNCTION)
    undisturbed, folder = bench.folder / "undisturbed", bench.folder / "own"
    for path in (undisturbed, folder):
        path.mkdir()
    done = run([PYTHON, str(program), "local", "2", str(undisturbed)], dict(os.environ), 240)
    result = done.output.splitlines()[-1]
    assert done.code == 0 and re.fullmatch(r"\[\(2, (.*)\), \(2, \1\)\]", result), done.output
    (folder / "slow").touch()
    with started([PYTHON, str(program), "slurm", "1", str(folder)], dict(os.environ)) as process:
        assert process.stdout is not None
        job_id = process.stdout.readline().strip()
        second = lambda: any(event["epoch"] == 2 for event in events(folder / "run", "epoch"))  # noqa: E731
        poll(second, 120, "the second epoch")
        bench.cluster.ask("scancel", "--signal=USR2", job_id)
        poll(lambda: events(folder / "run", "preempted"), 60, "the signal and the checkpoint")
        (folder / "slow").unlink()
        start_requeued(bench, job_id)
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 0 and output.splitlines()[-1] == result, output
    assert len(events(folder / "run", "resumed")) == 1


@accounted
@pytest.mark.promise("slurm-truth")
def test_slurm_has_forgotten_the_job(bench: Bench) -> None:
    """The end comes from the last status, else the tasks' notes, else the accounting."""
    bench.backend.submit(bench.command("old", "print('done')", ranks_per_node=1))
    bench.backend.submit(bench.command("bad", "raise SystemExit(3)", ranks_per_node=1))
    assert (bench.wait("old").state, bench.wait("bad").state) == ("succeeded", "failed")
    bench.cluster.forgets(*(bench.job_id(name) for name in ("old", "bad")))

    def states() -> tuple[str, str]:
        return bench.backend.status("old").state, bench.backend.status("bad").state

    assert states() == ("succeeded", "failed"), "as it was seen at the end"
    folders = [bench.note(name) for name in ("old", "bad")]
    for folder in folders:
        (folder / "ended.json").unlink()
    assert states() == ("succeeded", "failed"), "from what the tasks noted"
    for folder in folders:
        for file in (*folder.glob("submitit/*_end.json"), folder / "ended.json"):
            file.unlink()
    status = bench.backend.status("bad")
    assert (status.state, status.reason, status.exit_code) == ("failed", "exit code 3", 3)
    status = bench.backend.status("old")
    assert status.state == "running" and "results of rank 0" in status.reason, status


def doctor(bench: Bench, spec: JobSpec) -> tuple[int, dict[str, dict[str, Any]]]:
    """Returns doctor's exit code and its rows by name."""
    done = lockstep("doctor", "slurm", str(bench.file(spec)), "--json")
    return done.returncode, {item["name"]: item for item in json.loads(done.stdout)}


@accounted
def test_doctor(bench: Bench) -> None:
    spec = training(bench, "ask", gpus=2, slurm={"account": "root"})
    code, rows = doctor(bench, spec)
    assert code == 0 and {rows[name]["result"] for name in ("preemption", "start")} == {"ok"}, rows
    assert "REQUEUE" in rows["preemption"]["detail"] and "to start at" in rows["start"]["detail"], rows
    code, rows = doctor(bench, JobSpec.of({**spec.plain(), "gpus": 8, "ranks_per_node": 2}))
    assert code == 1 and "configuration is not available" in rows["start"]["detail"], rows
