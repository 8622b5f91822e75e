"""Jobs on a real SLURM that belong together or are driven by a program: sweeps, preparation, the example driver."""

from __future__ import annotations

import json
import os

import pytest

from tests import product
from tests.events import events
from tests.processes import PYTHON, ROOT, poll, run, started
from tests.slurm.conftest import LATER, Bench, lockstep
from tests.slurm.trainings import Hold, training


@pytest.mark.promise("sweeps")
def test_a_sweep_is_one_array(bench: Bench) -> None:
    spec = training(bench, "grid", epochs=1, nodes=1)
    done = lockstep("submit", "slurm", str(bench.file(spec)), "--sweep", "lr=0.1,0.001", "--wait", "120", bound=180)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0][:5] == ["NAME", "LR", "STATE", "EXIT", "ACCURACY"]
    assert [line[:4] for line in lines[1:]] == [
        ["grid-0", "0.1000", "succeeded", "0"],
        ["grid-1", "0.001", "succeeded", "0"],
    ]
    again = lockstep("wait", "slurm", "grid", "--sweep", "--timeout", "60")
    assert (again.returncode, again.stdout) == (0, done.stdout), "the table can be had later, too"
    ids = [bench.backend.job_id(f"grid-{index}").split("_") for index in (0, 1)]
    assert ids[0][0] == ids[1][0] and [one[1] for one in ids] == ["0", "1"]
    runs = [json.loads((bench.folder / "grid" / f"grid-{index}" / "summary.json").read_text()) for index in (0, 1)]
    assert runs[0]["config_hash"] != runs[1]["config_hash"]
    again = lockstep("submit", "slurm", str(bench.file(spec)), "--sweep", "lr=0.1,0.001")
    assert again.returncode == 2 and "grid-0 has already finished" in again.stderr, again


@pytest.mark.promise("slurm-survives")
def test_a_part_of_a_sweep_is_requeued_alone(bench: Bench) -> None:
    """The array's last element bears the array's own id: a requeue by that id would take all the others along."""
    hold = Hold(bench.folder / "part.hold")
    spec = training(bench, "part", nodes=1, max_restarts=2, env=hold.env)
    bench.backend.sweep("part", product.sweep(spec, {"lr": [0.1, 0.01]}))
    runs = [bench.folder / "part" / f"part-{index}" for index in (0, 1)]
    for path in runs:
        poll(lambda: events(path, "step"), 60, "the training")
    bench.signal("part-1")
    poll(lambda: events(runs[1], "preempted"), 60, "the signal and the checkpoint")
    hold.let_go()
    found = [bench.wait(f"part-{index}", 120) for index in (0, 1)]
    assert [(one.state, one.ranks[0].restarts) for one in found] == [("succeeded", 0), ("succeeded", 1)], found


def test_shards_are_prepared_once_and_waited_for(bench: Bench) -> None:
    shards = bench.folder / "shards"
    spec = training(bench, "fed", shards=str(shards), nodes=1)
    assert bench.backend.prepare(spec).created and not bench.backend.prepare(spec).created
    bench.backend.submit(spec)
    shown = bench.cluster.ask("scontrol", "show", "job", "-o", bench.backend.job_id("fed"))
    assert f"Dependency=afterok:{bench.backend.job_id('fed-prepare')}" in shown
    assert bench.wait("fed", 120).state == "succeeded" and (shards / "synthetic").is_dir()
    assert f"{shards}/synthetic" in bench.backend.prepare(spec).where
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
    assert found.state == "failed" and "depends on has failed" in found.reason, found


@pytest.mark.promise("slurm-truth")
def test_the_lost_answer_for_an_array_is_found_again(bench: Bench) -> None:
    """By its name and comment, and it is not submitted twice."""
    specs = [training(bench, f"lost-{n}", nodes=1, env={"N": str(n)}, slurm=LATER) for n in (0, 1)]
    before = {item.name: bench.backend.job_id(item.name) for item in bench.backend.sweep("lost", specs)}

    def forget(name: str, **more: object) -> None:
        path = bench.note(name, "job.json")
        path.write_text(json.dumps({**json.loads(path.read_text()), "job_id": None, **more}))

    for name in before:
        forget(name)
    assert {name: bench.backend.job_id(name) for name in before} == before
    forget("lost-0", comment="of nobody")
    assert bench.backend.status("lost-0").state == "pending", "somebody may be at it at this moment"
    forget("lost-0", since=0.0)
    assert bench.backend.status("lost-0").state == "lost"


def test_the_driver_submits_again_after_a_preemption_and_shows_a_traceback(bench: Bench) -> None:
    driver = [PYTHON, str(ROOT / "examples/driver.py")]
    hold, path = Hold(bench.folder / "again.hold"), bench.folder / "again"
    spec = training(bench, "again", nodes=1, max_restarts=0, env=hold.env)
    with started([*driver, str(bench.file(spec)), "--poll", "0.5"], dict(os.environ)) as process:
        hold.reached()
        log = bench.log("again")
        bench.signal("again")
        poll(lambda: events(path, "preempted"), 60, "the signal and the checkpoint")
        # SLURM starts it again. A signal before it gets any further ends it for good, as max_restarts is 0.
        poll(lambda: log.read_text().count("Loading pickle") == 2, 60, "the next start")
        bench.signal("again")
        hold.let_go()
        said, _ = process.communicate(timeout=240)
    accuracy = bench.backend.summary("again")["accuracy"]
    assert process.returncode == 0 and "again: preempted" in said and f"again  succeeded  {accuracy:.4f}\n" in said, (
        said
    )
    assert len(events(path, "resumed")) == 1
    done = run([*driver, str(bench.file(bench.command("wrong", "1 / 0"))), "--poll", "0.5"], dict(os.environ))
    assert done.code == 1 and "Traceback (most" in done.output and "ZeroDivisionError" in done.output, done.output
