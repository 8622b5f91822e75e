"""The image under SLURM: what srun starts in it, with pyxis or Apptainer, is submitit's payload."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from submitit.core import utils

from tests import product
from tests.containers.test_images import run
from tests.engine import Built, docker
from tests.events import events
from tests.processes import poll
from tests.product import JobSpec, UserError
from tests.slurm.conftest import HERE as CLUSTER
from tests.slurm.conftest import Bench, _missing, bare, bench, cluster  # noqa: F401 - fixtures of that folder

OURS = f"{os.getuid()}:{os.getgid()}"
"""Both run a container as the user who submits."""


@pytest.mark.nightly
def test_a_task_trains_in_the_image(cpu_image: Built, tmp_path: Path) -> None:
    """The words of the batch script behind `apptainer exec IMAGE`, with the variables of srun, one rank."""
    folder = tmp_path / "submitit"
    folder.mkdir(0o700)
    spec = JobSpec.of(
        {
            "name": "inside", "recipe": "smoke", "run_dir": str(tmp_path / "runs/inside"),
            "overrides": {"data.root": str(tmp_path / "data"), "epochs": 1},
            "slurm": {"container": "apptainer", "image": cpu_image.name},
        }
    )  # fmt: skip
    utils.DelayedSubmission(product.slurm_task(spec)).dump(folder / "7_submitted.pkl")
    place = {
        "SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
        "SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_TASKS_PER_NODE": "1",
        "SLURM_JOB_NODELIST": "localhost", "SLURM_NODELIST": "localhost", "SLURM_STEP_ID": "0",
    }  # fmt: skip
    options = ["--user", OURS, "--volume", f"{tmp_path}:{tmp_path}", "--entrypoint", "sh"]
    options += [word for name, value in place.items() for word in ("--env", f"{name}={value}")]
    words = product.slurm_python(spec, folder)
    words = words[words.index(cpu_image.name) + 1 :]
    assert words[0] == "sh"
    submitit = ["-u", "-m", "submitit.core._submit", str(folder)]
    code, output = run(cpu_image.name, *words[1:], *submitit, options=tuple(options), timeout=300)
    assert code == 0, output
    status = json.loads((tmp_path / "runs/inside/status.json").read_text())
    assert status["code"] == 0 and (folder / "7_0_end.json").exists(), (status, output)


@pytest.fixture
def root(cpu_image: Built, tmp_path: Path) -> Iterator[Path]:
    """The image's file system."""
    folder = tmp_path / "image"
    folder.mkdir()
    container = docker("create", cpu_image.name).strip()
    try:
        with subprocess.Popen(["docker", "export", container], stdout=subprocess.PIPE) as process:
            subprocess.run(["tar", "-x", "-C", folder], stdin=process.stdout, check=True, timeout=300)
        yield folder
    finally:
        docker("rm", container)
        shutil.rmtree(folder)


@pytest.mark.skipif(_missing(accounting=False) is not None, reason="no SLURM here")
def test_a_job_of_two_nodes_trains_in_the_image(
    bench: Bench,  # noqa: F811 - the fixture
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a real SLURM, with a stand-in for Apptainer: two ranks, a signal, and a requeue that the script asks for."""
    programs = bench.folder / "programs"
    programs.mkdir()
    (programs / "apptainer").symlink_to(CLUSTER / "apptainer.sh")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    run = bench.folder / "runs/inside"
    spec = JobSpec.of(
        {
            "name": "inside", "recipe": "smoke", "nodes": 2, "run_dir": str(run), "memory": "2Gi", "max_restarts": 0,
            "grace_seconds": 20, "overrides": {"data.root": str(run.parent / "data"), "threads": 1, "epochs": 6},
            "slurm": {"container": "apptainer", "image": str(root)},
        }
    )  # fmt: skip
    asked = {check.name: check for check in product.backend("slurm").doctor(spec)}
    assert asked["node"].result == "ok" and f"python in {root}" in asked["node"].detail, asked["node"]
    bench.backend.submit(spec)
    poll(lambda: events(run, "epoch"), 120, "an epoch")
    bench.cluster.ask("scancel", "--signal=USR2", bench.backend.job_id("inside"))
    found = bench.wait("inside", 300)
    assert (found.state, found.ranks[0].restarts) == ("succeeded", 1), "\n".join(bench.backend.logs("inside"))
    shutil.rmtree(next(root.glob("opt/venv/lib/python3*/site-packages/submitit")))
    with pytest.raises(UserError, match="LS115 error: .* does not have submitit"):
        bench.backend.submit(spec.model_copy(update={"name": "lacking", "run_dir": str(run.parent / "lacking")}))
    asked = {check.name: check for check in product.backend("slurm").doctor(spec)}
    assert asked["node"].result == "missing" and "No module named 'submitit'" in asked["node"].detail
