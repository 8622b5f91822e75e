"""`make smoke`: nodes in containers, and one machine beside them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.containers.jobs import BOUND, assert_same, weights
from tests.engine import NAME, Built, docker
from tests.processes import ROOT, require

pytestmark = pytest.mark.containers


@pytest.mark.promise("images")
def test_make_smoke_and_one_container_of_four_ranks_end_in_the_same_weights(cpu_image: Built, tmp_path: Path) -> None:
    """`make smoke`: two containers × two ranks, accuracy, all four ranks in Prometheus, nothing left."""
    there = os.environ.get("PROMETHEUS_IMAGE") or "prom/prometheus" in docker("images")
    require(there, "no image of Prometheus: set PROMETHEUS_IMAGE")
    words = ["make", "smoke", f"OUT={tmp_path}/containers", f"IMAGE={NAME}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^ok +left behind +nothing$", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^ok +ranks that trained +4 in 2 containers$", done.stdout, re.MULTILINE), done.stdout
    assert (
        re.search(r"^ok +targets that Prometheus scraped +4$", done.stdout, re.MULTILINE) and "NOT" not in done.stdout
    )
    # The same image as one machine: bits depend on torch's build, so the other side is that build too.
    words = [
        "--ranks",
        "4",
        "run",
        "smoke",
        "--run-dir",
        "/runs/local",
        "--set",
        "threads=1",
        "preempt.grace_seconds=20",
    ]
    local = docker("create", "--shm-size", "256m", cpu_image.name, *words).strip()
    try:
        docker("start", "--attach", local, timeout=BOUND)
        docker("cp", f"{local}:/runs/local", str(tmp_path / "local"))
    finally:
        docker("rm", "--force", "--volumes", local)
    assert_same(weights(tmp_path / "containers/smoke"), weights(tmp_path / "local"))
