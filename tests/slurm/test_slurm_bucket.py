"""A job without a shared disk: its run directory is on the node's disk, and a bucket outlives it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.events import events, weights_digest
from tests.objects.server import environment, moto, read
from tests.processes import ROOT, poll
from tests.product import JobSpec
from tests.slurm.conftest import Bench
from tests.slurm.trainings import SETTINGS, Hold, setting_words, train_here

pytestmark = [pytest.mark.promise("object-stores"), pytest.mark.promise("slurm-survives")]


def test_the_example_resumes_after_its_node_is_lost_with_its_disk(
    bench: Bench, data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, hold = bench.cluster.folder, Hold(bench.folder / "hold", at=13)
    address = next(
        line.split()[0] for line in (cluster / "etc/hosts").read_text().splitlines() if line.endswith(" ctl")
    )
    example = bench.folder / "bucket.yaml"
    example.write_text((ROOT / "examples/bucket.yaml").read_text().replace("s3://BUCKET", "s3://bucket"))
    with moto(bench.folder, "0.0.0.0") as port:
        variables = environment(port, address)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, variables[name])
        spec = JobSpec.load(
            example,
            {
                **{f"overrides.{name}": value for name, value in SETTINGS.items()},
                "env.AWS_ENDPOINT_URL": variables["AWS_ENDPOINT_URL"], "env.LOCKSTEP_TEST_HOLD": str(hold.path),
                "run_dir": str(cluster / "local/run"), "overrides.data.root": str(cluster / "local/data"),  # per node
                "cpus": 1, "memory": "2Gi", "grace_seconds": 5,
            },
        )  # fmt: skip
        bench.backend.prepare(spec)
        bench.backend.submit(spec)
        hold.wait()

        def is_sent() -> bool:
            checkpoints = json.loads(read(port, "runs/bucket/head"))["checkpoints"]
            return [entry["step"] for entry in checkpoints] == [10]

        poll(is_sent, 60, "the checkpoint in the bucket")
        bench.cluster.node("stop", "node1")
        try:
            hold.let_go()
            bench.becomes("bucket", "restarting")
            status = bench.wait("bucket", 150)
        finally:
            bench.cluster.node("start", "node1")
    assert (status.state, status.code) == ("succeeded", 0), (
        f"{status}\n{bench.cluster.log_lines(bench.job_id('bucket'))}"
    )
    run, whole = cluster / "spool/node2-local/run", bench.folder / "whole"
    assert [(event["attempt"], event["step"]) for event in events(run, "start")] == [(1, 0), (2, 10)]
    train_here(whole, 1, *setting_words(SETTINGS), f"data.root={data_root}")
    assert weights_digest(run) == weights_digest(whole)
