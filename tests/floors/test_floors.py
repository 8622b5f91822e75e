"""What dispatching needs works in the lowest versions that pyproject.toml allows.

uv installs them into an environment of its own, and the tests of the dispatcher run there. Training's lowest versions
are gigabytes, and are run by hand (tests/README.md).
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.environments import uv
from tests.processes import PYTHON, ROOT, clean_env

TOOLS = (
    "pytest>=8.0",
    "pytest-xdist>=3.7",
    "hypothesis>=6.100",
    "kubernetes-validate>=1.30",
    "jsonschema>=4.20",
    "packaging",
)


@pytest.mark.parametrize(
    ("extras", "files"),
    [
        # The Kubernetes client needs a newer pydantic and PyYAML than Lockstep does, so this one goes without it.
        (
            ("slurm",),
            ("jobs/test_jobs_spec.py", "jobs/test_compose_render.py",
             "slurm/test_slurm_render.py", "slurm/test_slurm_words.py", "slurm/test_slurm_lint.py", "report/test_page.py"),
        ),
        (
            ("k8s", "slurm"),
            ("jobs/test_jobs_cli.py", "kubernetes/test_k8s_api.py", "kubernetes/test_k8s_status.py"),
        ),
    ],
    ids=["dispatcher and slurm", "k8s"],
)  # fmt: skip
def test_the_lowest_versions(extras: tuple[str, ...], files: tuple[str, ...], tmp_path: Path) -> None:
    python = str(tmp_path / "venv/bin/python")
    uv("venv", "--python", PYTHON, str(tmp_path / "venv"))
    wanted = [word for extra in extras for word in ("--extra", extra)]
    uv("pip", "install", "--python", python, "--resolution", "lowest-direct", "-r", "pyproject.toml", *wanted)
    lowest = uv("pip", "freeze", "--python", python)
    (tmp_path / "lowest.txt").write_text(lowest)
    uv("pip", "install", "--python", python, "--constraints", str(tmp_path / "lowest.txt"), *TOOLS)
    words = ["-m", "pytest", "-q", "-n", "2", "--dist", "loadscope", "-p", "no:cacheprovider", "-m", "not containers"]
    # One trains, and one is about times.
    for name in ("test_python_is_a_driver_too", "test_answers_come_at_once"):
        words += ["--deselect", f"tests/jobs/test_jobs_cli.py::{name}"]
    env = clean_env(PYTHONDONTWRITEBYTECODE="1", **{name: os.environ[name] for name in ("CI",) if name in os.environ})
    done = subprocess.run(
        [python, *words, *(f"tests/{file}" for file in files)],
        capture_output=True, text=True, cwd=ROOT, env=env, timeout=600, check=False,
    )  # fmt: skip
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0 and passed and int(passed[1]) > 50, (
        f"{lowest}\n{done.stdout[-6000:]}{done.stderr[-2000:]}"
    )
