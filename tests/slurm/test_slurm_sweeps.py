"""Jobs on a real SLURM that belong together or are driven by a program: sweeps, preparation, the example driver, submitit."""

from __future__ import annotations

import json
import os

from lockstep.jobs import sweep
from lockstep.jobs.slurm.backend import training_task
from tests.events import events
from tests.processes import PYTHON, ROOT, poll, run, started
from tests.slurm.conftest import Bench, accounted, lockstep
from tests.slurm.trainings import Hold, training

DRIVER = [PYTHON, str(ROOT / "examples/driver.py")]


def test_a_sweep_is_one_array(bench: Bench) -> None:
    spec = training(bench, "grid", epochs=1, nodes=1)
    done = lockstep("submit", "slurm", str(bench.file(spec)), "--sweep", "lr=0.1,0.001", "--wait", "120", bound=180)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0][:5] == ["NAME", "LR", "STATE", "EXIT", "ACCURACY"]
    assert [line[:4] for line in lines[1:]] == [
        ["grid-0", "0.1000", "succeeded", "0"], ["grid-1", "0.001", "succeeded", "0"]
    ]  # fmt: skip
    again = lockstep("wait", "slurm", "grid", "--sweep", "--timeout", "60")
    assert (again.returncode, again.stdout) == (0, done.stdout), "the table can be had later, too"
    ids = [bench.backend.job_id(f"grid-{index}") for index in (0, 1)]
    assert [one.split("_")[1] for one in ids] == ["0", "1"] and len({one.split("_")[0] for one in ids}) == 1
    runs = [json.loads((bench.folder / "grid" / f"grid-{index}" / "summary.json").read_text()) for index in (0, 1)]
    assert runs[0]["config_hash"] != runs[1]["config_hash"]
    again = lockstep("submit", "slurm", str(bench.file(spec)), "--sweep", "lr=0.1,0.001")
    assert again.returncode == 2 and "grid-0 has already finished: succeeded" in again.stderr, again


def test_a_part_of_a_sweep_is_requeued_alone(bench: Bench) -> None:
    """The array's last element bears the array's own id: a requeue by that id would take all the others along."""
    hold = Hold(bench.folder / "part.hold")
    spec = training(bench, "part", nodes=1, max_restarts=2, env=hold.env)
    bench.backend.sweep("part", sweep.expand(spec, {"lr": [0.1, 0.01]}))
    runs = [bench.folder / "part" / f"part-{index}" for index in (0, 1)]
    for path in runs:
        poll(lambda: events(path, "step"), 60, "the training")
    bench.cluster.ask("scancel", "--signal=USR2", bench.backend.job_id("part-1"))
    poll(lambda: events(runs[1], "preempted"), 60, "the signal and the checkpoint")
    hold.let_go()
    found = [bench.wait(f"part-{index}", 120) for index in (0, 1)]
    assert [(one.state, one.ranks[0].restarts) for one in found] == [("succeeded", 0), ("succeeded", 1)], found


def test_shards_are_prepared_once_and_waited_for(bench: Bench) -> None:
    shards = bench.folder / "shards"
    spec = training(bench, "fed", shards=str(shards), nodes=1)
    first = bench.backend.prepare(spec)
    assert first.created and not bench.backend.prepare(spec).created
    bench.backend.submit(spec)
    shown = bench.cluster.ask("scontrol", "show", "job", "-o", bench.backend.job_id("fed"))
    assert f"Dependency=afterok:{bench.backend.job_id('fed-prepare')}" in shown
    assert bench.wait("fed", 120).state == "succeeded"
    assert (shards / "synthetic").is_dir()
    assert bench.backend.prepare(spec).where == f"the shards are in {shards}/synthetic"
    hungry = training(bench, "hungry", shards=str(bench.folder / "none"), nodes=1)
    # Nothing starts meanwhile, so that the preparation has not ended when it is cancelled.
    bench.cluster.ask("scontrol", "update", "PartitionName=main", "State=DOWN")
    try:
        bench.backend.prepare(hungry)
        bench.backend.submit(hungry)
        bench.backend.cancel("hungry-prepare")
    finally:
        bench.cluster.ask("scontrol", "update", "PartitionName=main", "State=UP")
    found = bench.wait("hungry")
    assert (found.state, found.reason) == (
        "failed", "the job that it depends on has failed: see its logs, then submit again"
    )  # fmt: skip


@accounted
def test_submitit_alone_can_drive_it(bench: Bench) -> None:
    import submitit

    spec = training(bench, "plain", nodes=1)
    folder = bench.folder / "submitit"
    executor = submitit.AutoExecutor(folder=folder, cluster="slurm")
    executor.update_parameters(nodes=1, tasks_per_node=2, timeout_min=10, mem_gb=2)
    job = executor.submit(training_task(spec.model_copy(update={"ranks_per_node": 2})))
    results = job.results()
    assert results[0]["world_size"] == 2 and results[1] is None
    executor.update_parameters(tasks_per_node=1)
    bad = executor.submit(training_task(spec.model_copy(update={"run_dir": "/proc/nowhere"})))
    error = bad.task(0).exception()
    assert error is not None and "rank 0 ended with 2: " in str(error)


def test_the_lost_answer_for_an_array_is_found_again(bench: Bench) -> None:
    later = {"patch": {"begin": "now+1hour"}}
    specs = [training(bench, f"lost-{n}", nodes=1, env={"N": str(n)}, slurm=later) for n in (0, 1)]
    before = {item.name: bench.backend.job_id(item.name) for item in bench.backend.sweep("lost", specs)}
    for name in before:
        path = bench.backend.folder / name / "job.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "job_id": None}))
    assert {name: bench.backend.job_id(name) for name in before} == before
    record = bench.backend.folder / "lost-0" / "job.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "job_id": None, "comment": "of nobody"}))
    found = bench.backend.status("lost-0")
    assert (found.state, found.reason) == ("pending", "is being submitted"), "somebody may be at it at this moment"
    record.write_text(json.dumps({**json.loads(record.read_text()), "since": 0.0}))
    assert bench.backend.status("lost-0").state == "lost"


def test_the_driver_submits_again_after_a_preemption_and_shows_a_traceback(bench: Bench) -> None:
    hold, path = Hold(bench.folder / "again.hold"), bench.folder / "again"
    spec = training(bench, "again", nodes=1, max_restarts=0, env=hold.env)
    with started([*DRIVER, str(bench.file(spec)), "--poll", "0.5"], dict(os.environ)) as driver:
        hold.reached()
        job_id = bench.backend.job_id("again")
        log = bench.backend.folder / f"again/submitit/{job_id}_0_log.out"
        bench.cluster.ask("scancel", "--signal=USR2", job_id)
        poll(lambda: events(path, "preempted"), 60, "the signal and the checkpoint")
        # SLURM starts it again. A signal before it gets any further ends it for good, as max_restarts is 0.
        poll(lambda: log.read_text().count("Loading pickle") == 2, 60, "the next start")
        bench.cluster.ask("scancel", "--signal=USR2", job_id)
        hold.let_go()
        said, _ = driver.communicate(timeout=240)
    assert driver.returncode == 0, said
    assert "again: preempted" in said and "again  succeeded" in said
    assert len(events(path, "resumed")) == 1
    spec = bench.command("wrong", "1 / 0")
    done = run([*DRIVER, str(bench.file(spec)), "--poll", "0.5"], dict(os.environ))
    assert done.code == 1 and "Traceback (most recent call last):" in done.output, done.output
    assert "ZeroDivisionError: division by zero" in done.output


def test_the_example_driver(bench: Bench) -> None:
    spec = training(bench, "driven", nodes=1)
    words = [str(bench.file(spec)), "--sweep", "lr=0.1,0.01", "--poll", "0.5"]
    done = run([*DRIVER, *words], dict(os.environ), 240)
    assert done.code == 0, done.output
    for index in (0, 1):
        accuracy = bench.backend.summary(f"driven-{index}")["accuracy"]
        assert f"driven-{index}  succeeded  {accuracy:.4f}\n" in done.output
