"""Jobs of the Compose backend on a real engine, with names of their own, and what their volumes hold."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import product
from tests.engine import Built, docker, remove_jobs
from tests.product import JobSpec

BOUND = 240


class Jobs:
    """Jobs with names of their own, and what their volumes hold."""

    def __init__(self, image: str, folder: Path) -> None:
        self.backend: Any = product.backend("compose")(interval=0.3)  # type: ignore[call-arg]
        self.image, self.folder = image, folder
        self.suffix, self.names = uuid.uuid4().hex[:6], set[str]()

    def spec(self, name: str, **more: Any) -> JobSpec:
        name = f"{name}-{self.suffix}"
        self.names.add(name)
        values = {
            "name": name, "image": self.image, "nodes": 2, "ranks_per_node": 2, "max_restarts": 2, "memory": "2Gi",
            "shm": "128Mi", "grace_seconds": 20,
        }  # fmt: skip
        return JobSpec.of({**values, **more})

    def smoke(self, name: str, **more: Any) -> JobSpec:
        overrides = {
            "epochs": 3, "threads": 1, "evaluate.every": 3, "checkpoint.every_steps": 4, "checkpoint.keep": 50,
            **more.pop("overrides", {}),
        }  # fmt: skip
        return self.spec(name, recipe="smoke", overrides=overrides, **more)

    def container(self, spec: JobSpec, node: int) -> str:
        return f"lockstep-{spec.name}-node-{node}-1"

    def read(self, spec: JobSpec, name: str) -> str:
        """A file of the run directory; empty where it is not there yet."""
        command = ["docker", "cp", f"{self.container(spec, 0)}:{spec.run_directory}/{name}", "-"]
        done = subprocess.run(command, capture_output=True, timeout=60)
        if done.returncode:
            return ""
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            file = archive.extractfile(archive.next() or tarfile.TarInfo())
            return file.read().decode() if file else ""

    def events(self, spec: JobSpec, kind: str) -> list[dict[str, Any]]:
        lines = self.read(spec, "events.jsonl").splitlines()
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        return [row for row in rows if row["event"] == kind]

    def run_directory(self, spec: JobSpec) -> Path:
        target = self.folder / spec.name
        docker("cp", f"{self.container(spec, 0)}:{spec.run_directory}", str(target))
        return target

    def succeeded(self, spec: JobSpec) -> None:
        found = self.backend.wait(spec.name, BOUND)
        assert found.state == "succeeded", (found, *self.backend.logs(spec.name))


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    newest = sorted((run_dir / "checkpoints").iterdir())[-1]
    return {name: value for file in sorted(newest.glob("*.safetensors")) for name, value in load_file(file).items()}


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys() and first
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.fixture(scope="module")
def jobs(cpu_image: Built, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    made = Jobs(cpu_image.name, tmp_path_factory.mktemp("runs"))
    yield made
    remove_jobs(*made.names)
