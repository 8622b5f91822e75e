"""A backend of another package."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests import product
from tests.processes import PYTHON, ROOT, clean_env

SECTION = """
from pydantic import Field
from lockstep.jobs.spec.types import Section

class Cave(Section):
    depth: int = Field(default=1, ge=1)
    \"\"\"Metres.\"\"\"

SECTION = Cave
"""
BACKEND = """
from lockstep.jobs import logs
from lockstep.jobs.backend import Backend, KnownJob
from lockstep.jobs.status import Listed, Status, Submitted
from cave.section import Cave

class CaveBackend(Backend):
    name = "cave"
    def find(self, name, submitting=False):
        plain = {"version": 2, "name": name, "recipe": "smoke"}
        return KnownJob(name, "0", plain, None, "below") if name == "bear" else None
    def create(self, job, old):
        return Submitted(job.spec.name, True, f"{job.spec.section(Cave).depth} m below")
    def observe(self, found):
        return Status("running", "sleeps")
    def stream(self, found, rank, follow, last):
        return logs.last(["snore"], last)
    def stop(self, found):
        return Status("cancelled", "awake")
    def list(self):
        return [Listed("bear", "running", 1, "2026-01-01T00:00:00+00:00")]

BACKEND = CaveBackend
"""


@pytest.mark.promise("one-protocol")
def test_a_backend_of_another_package_is_found_by_its_entry_point(tmp_path: Path) -> None:
    """Its settings are part of job.yaml and of the schema, and every command takes its name."""
    (tmp_path / "cave").mkdir()
    (tmp_path / "cave/__init__.py").touch()
    (tmp_path / "cave/section.py").write_text(SECTION)
    (tmp_path / "cave/backend.py").write_text(BACKEND)
    about = tmp_path / "cave-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: cave\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[lockstep.backends]\ncave = cave\nlocal = cave\n")

    def lockstep(words: str) -> subprocess.CompletedProcess[str]:
        env = clean_env(PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
        command = [PYTHON, "-c", product.PROGRAM, *words.split()]
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert "cave" in json.loads(lockstep("schema").stdout)["properties"]
    for words, printed in {
        "submit cave --recipe smoke --set cave.depth=7": "smoke: submitted (7 m below)\n", "status cave bear": "bear: running – sleeps\n",
        "logs cave bear": "snore\n", "logs cave bear --tail 1": "snore\n",
    }.items():  # fmt: skip
        told = lockstep(words)
        assert (told.returncode, told.stdout) == (0, printed), told
    assert lockstep("list cave").stdout.splitlines()[1].startswith("bear")
    for words, said in {
        "submit cave --recipe smoke --set cave.depth=0": "cave.depth",
        "exec cave bear -- true": "the cave backend", "status cave wolf": "there is no cave job wolf",
        "submit cave --recipe smoke --set code=.": "does not carry code", "render cave --recipe smoke": "k8s, slurm and compose",
        "status local bear": "there is no local job bear",  # a built-in name is not taken over
    }.items():  # fmt: skip
        told = lockstep(words)
        assert told.returncode == 2 and said in told.stderr, told
    (tmp_path / "cave/backend.py").write_text("1 / 0\n")
    told = lockstep("list cave")
    assert told.returncode == 2 and "cave" in told.stderr and "division" in told.stderr, told
    assert "Traceback" not in told.stderr
