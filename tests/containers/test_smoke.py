"""`make smoke`, as a person types it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.engine import NAME, docker
from tests.processes import ROOT, require

pytestmark = pytest.mark.containers


@pytest.mark.promise("images")
def test_make_smoke_trains_in_two_containers_shows_the_metrics_and_leaves_nothing(
    cpu_image: str, tmp_path: Path
) -> None:
    """Two containers × two ranks reach the accuracy, Prometheus sees all four ranks, and OUT= has the run."""
    has_image = os.environ.get("PROMETHEUS_IMAGE") or "prom/prometheus" in docker("images")
    require(has_image, "no image of Prometheus: set PROMETHEUS_IMAGE")
    words = ["make", "smoke", f"OUT={tmp_path}/containers", f"IMAGE={NAME}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "NOT" not in done.stdout, done.stdout + done.stderr
    for row in (
        "left behind +nothing", "ranks that trained +4 in 2 containers", "targets that Prometheus scraped +4",
    ):  # fmt: skip
        assert re.search(rf"^ok +{row}$", done.stdout, re.MULTILINE), done.stdout
    assert (tmp_path / "containers/smoke/summary.json").exists()
