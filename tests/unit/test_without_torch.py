"""What runs on a laptop without torch: lint, render and submit, with settings of a recipe checked before anything is sent.

A finder that comes first refuses the packages of the extra [train], wherever they are installed.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from k8s_server import ApiServer

from lockstep.training.extras import EXTRAS
from tests.processes import PYTHON, ROOT, clean_env

BLOCK = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {EXTRAS["train"]!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name.split(".")[0])

sys.meta_path.insert(0, Blocked())
"""
SBATCH = """#!/bin/sh
for script; do :; done # the last argument
cp "$script" "$RECORD" && echo "Submitted batch job 7"
"""
IMAGE = "registry.example/lockstep@sha256:" + "0" * 64
Done = subprocess.CompletedProcess[str]


@pytest.fixture
def lockstep(tmp_path: Path) -> Callable[..., Done]:
    (tmp_path / "block").mkdir()
    (tmp_path / "block/sitecustomize.py").write_text(BLOCK)
    (tmp_path / "bin").mkdir()
    for program, text in {
        "sbatch": SBATCH,
        "srun": "#!/bin/sh\n",
        "squeue": "#!/bin/sh\n",
        "sacct": "#!/bin/sh\n",
    }.items():
        (tmp_path / "bin" / program).write_text(text)
        (tmp_path / "bin" / program).chmod(0o755)

    def run(*words: str, **env: str) -> Done:
        settings = clean_env(
            PYTHONPATH=os.pathsep.join([str(tmp_path / "block"), str(ROOT)]),
            PATH=os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]]),
            LOCKSTEP_HOME=str(tmp_path / "home"), RECORD=str(tmp_path / "script"), **env,
        )  # fmt: skip
        command = [PYTHON, "-c", "from lockstep.jobs.cli.main import main; main()", *words]
        return subprocess.run(
            command, env=settings, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )

    return run


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["render", "k8s", "--recipe", "smoke", "--image", IMAGE], "kind: PyTorchJob"),
        (["render", "compose", "--recipe", "smoke", "--image", IMAGE], "services:"),
        (["render", "slurm", "--recipe", "smoke"], "#SBATCH"),
        (["lint", "--recipe", "smoke", "--image", IMAGE], ""),
        (["lint", "--backend", "slurm", "--recipe", "smoke"], ""),
        (["render", "k8s", "--recipe", "smoke", "--image", IMAGE, "--set", "overrides.sync.name=powersgd"], "powersgd"),
        (["settings", "smoke"], "sync.name"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)  # fmt: skip
def test_without_torch(lockstep: Callable[..., Done], words: list[str], said: str) -> None:
    done = lockstep(*words)
    assert done.returncode == 0 and said in done.stdout, done.stdout + done.stderr


def test_submit_to_kubernetes(lockstep: Callable[..., Done], tmp_path: Path) -> None:
    with ApiServer() as server:
        config = str(server.kubeconfig(tmp_path / "kubeconfig"))
        words = ["submit", "k8s", "--recipe", "smoke", "--image", IMAGE, "--set", "overrides.optim.lr=0.25"]
        done = lockstep(*words, KUBECONFIG=config)
        assert done.returncode == 0 and "smoke: submitted" in done.stdout, done.stdout + done.stderr
        listed = lockstep("list", "k8s", KUBECONFIG=config)
    assert listed.returncode == 0 and listed.stdout.splitlines()[1].startswith("smoke"), listed.stdout + listed.stderr


def test_submit_to_slurm(lockstep: Callable[..., Done], tmp_path: Path) -> None:
    done = lockstep("submit", "slurm", "--recipe", "smoke", "--set", "overrides.optim.lr=0.25")
    assert done.returncode == 0 and "smoke: submitted" in done.stdout, done.stdout + done.stderr
    assert "#SBATCH --job-name=smoke" in (tmp_path / "script").read_text()


@pytest.mark.parametrize(
    ("setting", "said"),
    [("optim.lrr=1", "optim.lrr"), ("optim.lr=fast", "optim.lr"), ("sync.name=gossip", "sync.name")],
)
def test_a_wrong_setting_of_the_recipe_is_refused_before_it_is_sent(
    lockstep: Callable[..., Done], tmp_path: Path, setting: str, said: str
) -> None:
    done = lockstep("submit", "slurm", "--recipe", "smoke", "--set", f"overrides.{setting}")
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "script").exists()


def test_the_finder_blocks(lockstep: Callable[..., Done]) -> None:
    done = lockstep("run", "smoke")
    assert done.returncode == 2 and done.stderr.startswith("error: this needs Lockstep's extra [train], and torch is")
