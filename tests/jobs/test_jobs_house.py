"""The structure of jobs/: one folder a backend, and a backend of another package."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from pathlib import Path

from lockstep.jobs import registry
from tests.imports import imported, modules
from tests.processes import PYTHON, ROOT, clean_env

MODULES = modules("jobs")
FOLDERS = tuple(f"{package}." for package in registry.BUILT_IN.values())


def test_a_backend_is_named_in_its_folder_and_in_the_table_alone() -> None:
    """Nobody else imports it, nor goes by its name."""
    names = {*registry.BUILT_IN, *registry.ALIASES}
    for module, path in MODULES.items():
        if f"{module}.".startswith(FOLDERS) or module == "lockstep.jobs.registry":
            continue
        tree = ast.parse(path.read_text())
        assert [name for name in imported(tree, MODULES) if f"{name}.".startswith(FOLDERS)] == [], module
        compared = {
            part.value
            for node in ast.walk(tree) if isinstance(node, ast.Compare)
            for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)
        }  # fmt: skip
        assert not names & compared, module
    for package in registry.BUILT_IN.values():
        others = tuple(folder for folder in FOLDERS if folder != f"{package}.")
        for module, path in MODULES.items():
            if f"{module}.".startswith(f"{package}."):
                assert [
                    name for name in imported(ast.parse(path.read_text()), MODULES) if name.startswith(others)
                ] == [], module


def test_nothing_of_slurm_goes_past_the_transport() -> None:
    """Its files and commands may be on another machine. What runs on the nodes (`task`) is there already."""
    apart = ("lockstep.jobs.slurm.transport.", "lockstep.jobs.slurm.task.")
    known = [
        module for module in MODULES if module.startswith("lockstep.jobs.slurm") and not f"{module}.".startswith(apart)
    ]
    assert len(known) > 8
    for module in known:
        tree = ast.parse(MODULES[module].read_text())
        found = {*imported(tree, MODULES)} & {
            "subprocess",
            "shutil",
            "glob",
            "tempfile",
            "lockstep.jobs.lock",
            "lockstep.jobs.private",
        }
        names = {
            alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "pathlib"
            for alias in node.names
        }  # fmt: skip
        assert not found and names <= {"PurePath", "PurePosixPath"}, f"{module}: {found or names}"
        called = [
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        ]
        assert "open" not in called, module


SECTION = """
from pydantic import Field
from lockstep.jobs.spec.section import Section

class Cave(Section):
    depth: int = Field(default=1, ge=1)
    \"\"\"Metres.\"\"\"

SECTION = Cave
"""
BACKEND = """
from lockstep.jobs.backend import Backend, Found
from lockstep.jobs.status import Listed, Status, Submitted
from cave.section import Cave

class CaveBackend(Backend):
    name = "cave"
    def find(self, name):
        return Found(name, "0", {"name": name, "recipe": "smoke"}, None) if name == "bear" else None
    def create(self, spec, old):
        return Submitted(spec.name, True, f"{spec.section(Cave).depth} m below")
    def observe(self, found):
        return Status("running", "sleeps")
    def stream(self, found, spec, rank, follow):
        yield "snore"
    def stop(self, found):
        return Status("cancelled", "awake")
    def list(self):
        return [Listed("bear", "running", 1, "2026-01-01T00:00:00+00:00")]
    def where(self, found):
        return "below"

BACKEND = CaveBackend
"""


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

    def lockstep(*words: str) -> subprocess.CompletedProcess[str]:
        env = clean_env(PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
        command = [PYTHON, "-c", "from lockstep.jobs.cli.main import main; main()", *words]
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert "cave" in json.loads(lockstep("schema").stdout)["properties"]
    told = lockstep("submit", "cave", "--recipe", "smoke", "--set", "cave.depth=7")
    assert (told.returncode, told.stdout) == (0, "smoke: submitted (7 m below)\n"), told
    told = lockstep("submit", "cave", "--recipe", "smoke", "--set", "cave.depth=0")
    assert told.returncode == 2 and "cave.depth must be at least 1, got 0" in told.stderr, told
    assert lockstep("status", "cave", "bear").stdout == "bear: running – sleeps\n"
    assert lockstep("logs", "cave", "bear").stdout == "snore\n"
    assert lockstep("logs", "cave", "bear", "--tail", "1").stdout == "snore\n"
    told = lockstep("logs", "cave", "bear", "--tail", "1", "-f")
    assert told.returncode == 2 and "the cave backend follows a job from its first line" in told.stderr, told
    told = lockstep("exec", "cave", "bear", "--", "true")
    assert told.returncode == 2 and "the cave backend cannot run a command beside a rank" in told.stderr, told
    assert lockstep("list", "cave").stdout.splitlines()[1].startswith("bear")
    assert "there is no cave job wolf" in lockstep("status", "cave", "wolf").stderr
    told = lockstep("render", "cave", "--recipe", "smoke")
    assert told.returncode == 2 and "render knows k8s, slurm and compose, got 'cave'" in told.stderr, told
    assert (
        "there is no local job bear" in lockstep("status", "local", "bear").stderr
    )  # a built-in name is not taken over
    told = lockstep("list", "lokal")
    assert told.returncode == 2 and "did you mean 'local'?" in told.stderr, told
    (tmp_path / "cave/section.py").write_text("import no_such_module\n")
    told = lockstep("render", "k8s", "--recipe", "smoke")
    assert told.returncode == 0 and "the settings of the backend cave (cave) cannot be read" in told.stderr, told
    (tmp_path / "cave/backend.py").write_text("1 / 0\n")
    told = lockstep("list", "cave")
    assert told.returncode == 2 and "error: the backend cave (cave) cannot be imported: division" in told.stderr, told
    assert "Traceback" not in told.stderr, told
