"""The tutorials' commands for SLURM run as printed, in the page's order, on a real SLURM."""

from __future__ import annotations

import os

import pytest

from tests.events import events
from tests.printed import Reader, pages
from tests.processes import poll
from tests.slurm.conftest import Bench

ENDS = {
    "docs/tutorials/your-own-training.md": ("two-nodes", "succeeded"),
    "docs/tutorials/to-slurm.md": ("digits", "cancelled"),
}
"""Page → the job that its commands leave, and the job's last state."""


class Page(Reader):
    """Runs a page in the environment of the test's cluster."""

    NEED = "on SLURM"
    BOUND = 300

    def before(self, command: str) -> None:
        """Restarts the finished job with more epochs before `lockstep cancel`."""
        if command.startswith("lockstep cancel "):
            small = "--nodes 1 --set ranks_per_node=1 --set overrides.epochs=500"
            again = f"lockstep submit slurm digits.yaml --replace --fresh {small}"
            self.after(again, self.run(again))
            path = self.folder / "runs/jobs/digits"
            poll(lambda: any(event["epoch"] > 2 for event in events(path, "epoch")), 120, "digits trains again")


@pytest.mark.promise("printed")
@pytest.mark.parametrize("page", pages(Page.NEED))
def test_what_the_page_prints_works_on_the_cluster(bench: Bench, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(bench.folder))
    reader = Page(bench.folder / "page", dict(os.environ))
    reader.reads(page)
    name, state = ENDS[page]
    status = bench.wait(name, 120)
    assert status.state == state, (status, *bench.backend.logs(name))
    assert state != "cancelled" or events(reader.folder / "runs/jobs" / name, "preempted")[-1]["saved"]
    assert [row.name for row in bench.backend.list()] == [name]
