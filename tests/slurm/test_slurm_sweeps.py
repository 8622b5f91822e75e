"""Jobs on a real SLURM that belong together: sweeps, preparation."""

from __future__ import annotations

import pytest

from tests import product
from tests.events import events
from tests.processes import poll
from tests.slurm.conftest import Bench, lockstep
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
    ids = [bench.job_id(f"grid-{index}").split("_") for index in (0, 1)]
    assert ids[0][0] == ids[1][0] and [job_id[1] for job_id in ids] == ["0", "1"]
    runs = [(bench.folder / "grid" / f"grid-{index}" / "run.yaml").read_text() for index in (0, 1)]
    assert "lr: 0.1\n" in runs[0] and "lr: 0.001\n" in runs[1]
    again = lockstep("submit", "slurm", str(bench.file(spec)), "--sweep", "lr=0.1,0.001")
    assert again.returncode == 2 and "grid-0 has already finished" in again.stderr, again


@pytest.mark.promise("slurm-survives")
def test_a_part_of_a_sweep_is_requeued_alone(bench: Bench) -> None:
    """The last element of a job array has the array's own id. A requeue of that element leaves the other elements alone."""
    hold = Hold(bench.folder / "part.hold")
    spec = training(bench, "part", nodes=1, max_restarts=2, env=hold.env)
    bench.backend.sweep("part", product.sweep(spec, {"lr": [0.1, 0.01]}))
    runs = [bench.folder / "part" / f"part-{index}" for index in (0, 1)]
    for path in runs:
        poll(lambda: events(path, "step"), 60, "the training")
    bench.signal("part-1")
    poll(lambda: events(runs[1], "preempted"), 60, "the signal and the checkpoint")
    hold.let_go()
    statuses = [bench.wait(f"part-{index}", 120) for index in (0, 1)]
    assert [(status.state, status.ranks[0].restarts) for status in statuses] == [("succeeded", 0), ("succeeded", 1)], (
        statuses
    )


def test_shards_are_prepared_once_and_waited_for(bench: Bench) -> None:
    shards = bench.folder / "shards"
    spec = training(bench, "fed", shards=str(shards), nodes=1)
    assert bench.backend.prepare(spec).created and not bench.backend.prepare(spec).created
    bench.backend.submit(spec)
    text = bench.cluster.ask("scontrol", "show", "job", "-o", bench.job_id("fed"))
    assert f"Dependency=afterok:{bench.job_id('fed-prepare')}" in text
    assert bench.wait("fed", 120).state == "succeeded" and (shards / "synthetic").is_dir()
    assert f"{shards}/synthetic" in bench.backend.prepare(spec).where
    hungry = training(bench, "hungry", shards=str(bench.folder / "none"), nodes=1)
    # The partition is down, so the preparation cannot end before it is cancelled.
    bench.cluster.ask("scontrol", "update", "PartitionName=main", "State=DOWN")
    try:
        bench.backend.prepare(hungry)
        bench.backend.submit(hungry)
        bench.backend.cancel("hungry-prepare")
    finally:
        bench.cluster.ask("scontrol", "update", "PartitionName=main", "State=UP")
    status = bench.wait("hungry")
    assert status.state == "failed" and "depends on has failed" in status.reason, status
