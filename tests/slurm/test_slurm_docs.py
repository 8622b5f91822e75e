"""The commands of the SLURM tutorial, as they are printed, on a real SLURM."""

from __future__ import annotations

import subprocess

import pytest

from tests.printed import PAGES, marked, write_files
from tests.slurm.conftest import Bench

MARKER = "on SLURM"


@pytest.mark.parametrize("page", [page for page in PAGES if marked(MARKER, page)])
def test_what_the_page_prints_works_on_the_cluster(bench: Bench, page: str) -> None:
    write_files(page, bench.folder)
    for command in marked(MARKER, page):
        done = subprocess.run(
            ["bash", "-c", command], cwd=bench.folder, capture_output=True, text=True, timeout=300, check=False
        )
        doctor = " doctor " in command  # which may have found something, and says what
        assert done.returncode in ((0, 1) if doctor else (0,)), f"{command}\n{done.stdout}{done.stderr}"
        if " logs " in command:
            assert '"event": "done"' in done.stdout, done.stdout  # what a job logs is JSON
    assert (bench.folder / "runs/jobs/digits/summary.json").is_file()
