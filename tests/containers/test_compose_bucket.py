"""A job without a volume: its data and its state are in a bucket."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.containers.jobs import Jobs
from tests.engine import docker
from tests.objects.server import environment, moto, objects
from tests.product import JobSpec

pytestmark = [pytest.mark.containers, pytest.mark.promise("object-stores")]


def test_another_job_resumes_where_the_first_has_ended(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second job starts with an empty run directory."""
    gateway = docker("network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Gateway}}").strip()
    with moto(tmp_path, "0.0.0.0") as port:
        variables = environment(port)
        names = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key"}
        for name in names:
            monkeypatch.setenv(name, variables[name])

        def job(name: str, epochs: int) -> JobSpec:
            overrides = {"epochs": epochs, "checkpoint.to": "s3://bucket/run", "data.root": "/runs/data"}
            return jobs.smoke(
                name, nodes=1, volumes=[], shards="s3://bucket/shards", overrides=overrides,
                env={"AWS_ENDPOINT_URL": f"http://{gateway}:{port}", "AWS_REGION": variables["AWS_REGION"]},
                secrets={name: {"secret": "bucket", "key": key} for name, key in names.items()},
            )  # fmt: skip

        first = job("first", 1)
        assert jobs.backend.prepare(first).created
        jobs.names.add(f"{first.name}-prepare")
        jobs.assert_succeeds(first.model_copy(update={"name": f"{first.name}-prepare"}))
        assert not jobs.backend.prepare(first).created, "it has written them"
        assert "manifest.json" in objects(port, "shards/digits")
        for name, epochs in (("first", 1), ("second", 2)):
            spec = job(name, epochs)
            jobs.backend.submit(spec)
            jobs.assert_succeeds(spec)
        records = map(json.loads, jobs.backend.logs(spec.name, rank=0))
        (start,) = [event for event in records if event["event"] == "start"]
        assert start["step"] > 0
