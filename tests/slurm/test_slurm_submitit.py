"""With submitit alone, a function with a Session is preempted on a real SLURM, and resumed."""

from __future__ import annotations

import os
import re

import pytest

from tests.events import events
from tests.processes import PYTHON, poll, run, started
from tests.slurm.conftest import Bench, accounted

pytestmark = pytest.mark.promise("submitit")

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

    poll(waits, 60, "the requeue", pause=0.2)
    bench.cluster.ask("scontrol", "update", f"jobid={job_id}", "starttime=now+2")


@accounted
def test_a_function_with_a_session_is_requeued_by_submitit_when_all_ranks_have_saved(bench: Bench) -> None:
    """It ends as where submitit's local tasks are the ranks of one world."""
    program = bench.folder / "driver.py"
    program.write_text(FUNCTION)
    undisturbed, folder = bench.folder / "undisturbed", bench.folder / "own"
    for one in (undisturbed, folder):
        one.mkdir()
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
        requeued(bench, job_id)
        said, _ = process.communicate(timeout=240)
    assert process.returncode == 0 and said.splitlines()[-1] == result, said
    assert len(events(folder / "run", "resumed")) == 1
