"""Jobs of the Compose backend on a real engine, with unique names, on one volume that is a folder of this machine."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine import remove_jobs
from tests.events import events
from tests.jobs.test_jobs_contract import Bench, composed
from tests.product import JobSpec

BOUND = 600
SHORT = {"epochs": 6, "threads": 1, "evaluate.every": 6, "checkpoint.every_steps": 4, "checkpoint.keep": 50}
"""Settings of the recipe `smoke`: 72 steps."""


class Jobs:
    def __init__(self, bench: Bench) -> None:
        self.bench, self.backend, self.image = bench, bench.backend, bench.image
        self.suffix, self.names = uuid.uuid4().hex[:6], set[str]()

    def spec(self, name: str, **more: Any) -> JobSpec:
        name = f"{name}-{self.suffix}"
        self.names.add(name)
        values = {
            "name": name, "image": self.image, "nodes": 2, "ranks_per_node": 1, "max_restarts": 2, "memory": "2Gi",
            "shm": "128Mi", "grace_seconds": 20, "volumes": [{"claim": self.bench.claim, "path": "/runs"}],
        }  # fmt: skip
        return JobSpec.of({**values, **more})

    def smoke(self, name: str, **more: Any) -> JobSpec:
        return self.spec(name, recipe="smoke", overrides={**SHORT, **more.pop("overrides", {})}, **more)

    def container(self, spec: JobSpec, node: int) -> str:
        return f"lockstep-{spec.name}-node-{node}-1"

    def run(self, spec: JobSpec) -> Path:
        return self.bench.folder / Path(spec.run_directory).relative_to("/runs")

    def events(self, spec: JobSpec, kind: str) -> list[dict[str, Any]]:
        return events(self.run(spec), kind)

    def assert_succeeds(self, spec: JobSpec) -> None:
        status = self.backend.wait(spec.name, BOUND)
        assert status.state == "succeeded", (status, *self.backend.logs(spec.name))


@pytest.fixture(scope="module")
def jobs(cpu_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    with composed(cpu_image, tmp_path_factory.mktemp("jobs") / "volume") as bench:
        suite = Jobs(bench)
        yield suite
        remove_jobs(*suite.names)
