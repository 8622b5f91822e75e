"""What the pages print for SLURM, as it is printed and in the page's order, on a real SLURM."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from tests.events import events
from tests.printed import Reader, pages, write_files
from tests.processes import PYTHON, ROOT, Result, poll
from tests.slurm.conftest import Bench, Cluster
from tests.slurm.login import AT, laptop

pytestmark = pytest.mark.promise("printed")

SLURM, JOBS, SWEEP = "docs/slurm.md", "docs/jobs.md", "docs/how-to/sweep.md"
OWN, PROJECT = "docs/own-training.md", "docs/how-to/start-a-project.md"
TUTORIAL, OWN_TUTORIAL = "docs/tutorials/to-slurm.md", "docs/tutorials/your-own-training.md"
LAPTOP = "docs/how-to/slurm-from-a-laptop.md"


# What a file says instead where the commands of these pages run. `FOLDER` is the folder of the test.
INSTEAD: tuple[tuple[tuple[str, ...], str, dict[str, Any]], ...] = (
    # To train in seconds, on a few cores; other pages and make have two nodes.
    ((SLURM, JOBS, SWEEP, LAPTOP), "job.yaml", {"overrides": {"epochs": 1, "model": "mlp"}}),
    ((SLURM, JOBS, SWEEP), "job.yaml", {"shards": "FOLDER/shards", "nodes": 1}),
    # The GPUs that SLURM counts are not there, and what belongs to four is more than a node of the tests has. A page asks for rank 3.
    ((SLURM,), "job.yaml", {"overrides.device": "auto", "cpus": 4, "memory": "8Gi", "ranks_per_node": 2}),
    (
        (SLURM, JOBS),
        "profiles/gpu-cluster.yaml",
        {"slurm.partition": "main"},
    ),  # its partition and account are of no cluster
    (
        (SWEEP,),
        "job.yaml",
        {"slurm.patch.begin": "now+1hour"},
    ),  # the third command finds the first one's jobs, which wait
    # As the command's comment says; neither recipe nor shards go with a command.
    ((OWN,), "job.yaml", {"command": ["python", "train.py"], "code": ".", "recipe": None, "shards": None}),
    ((LAPTOP,), "job.yaml", {"slurm.python": PYTHON}),  # there is no /shared
)
ENDS = {
    SLURM: {"smoke-prepare": "succeeded", "smoke": "cancelled", "lr-0": "succeeded", "lr-1": "succeeded"},
    JOBS: {"smoke-0": "succeeded", "smoke-1": "succeeded"},
    SWEEP: dict.fromkeys(("smoke-0", "smoke-1", "smoke-2", "grid-0", "grid-1", "grid-2", "grid-3"), "succeeded"),
    OWN: {"smoke": "succeeded"},
    PROJECT: {"mine": "succeeded"},
    OWN_TUTORIAL: {"two-nodes": "succeeded"},
    TUTORIAL: {"digits": "cancelled"},
}
"""The jobs that the commands of a page leave, and how these end."""


def lay_out(page: str, folder: Path) -> None:
    """What lies in the folder of a reader: the page's files, the repository's, or both."""
    folder.mkdir()
    if page in (SLURM, JOBS, SWEEP):
        for name in ("Makefile", "pyproject.toml"):
            shutil.copy(ROOT / name, folder)
        (folder / ".venv").mkdir()
        (folder / ".venv/bin").symlink_to(Path(PYTHON).parent)  # as after `make setup`
        (folder / ".venv/.train").touch()
        (folder / ".venv/.ready").touch()
    if page in (SLURM, JOBS, SWEEP, OWN):
        shutil.copy(ROOT / "job.yaml", folder)
    if page == OWN:
        shutil.copy(ROOT / "examples/own_loop.py", folder / "train.py")
    write_files(page, folder)
    for of_pages, file, values in INSTEAD:
        if page in of_pages:
            changed(folder / file, values)


def changed(file: Path, values: dict[str, Any]) -> None:
    """Writes settings (`slurm.partition`) into a file that may be new; None takes one away."""
    found = yaml.safe_load(file.read_text()) if file.exists() else {}
    for name, value in values.items():
        *sections, last = name.split(".")
        place = found
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value.replace("FOLDER", str(file.parent)) if isinstance(value, str) else value
        if value is None:
            del place[last]
    file.parent.mkdir(exist_ok=True)
    file.write_text(yaml.safe_dump(found))


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """CI names the virtual environment that it shares between clones. make would install the page's folder into it."""
    monkeypatch.delenv("VENV", raising=False)


class Page(Reader):
    """In the environment of the test, which knows the cluster."""

    MARKER = "on SLURM"
    BOUND = 300

    def files(self, page: str) -> None:
        lay_out(page, self.folder)

    def before(self, command: str) -> None:
        if " cancel " in command:
            self.runs_again(command.split()[3])

    def runs_again(self, name: str) -> None:
        """A job that has ended runs once more, for long enough to be cancelled."""
        file = "job.yaml" if (self.here / "job.yaml").exists() else f"{name}.yaml"
        small = "--nodes 1 --set ranks_per_node=1 --set overrides.epochs=500"
        done = self.run(f"lockstep submit slurm {file} --replace --fresh {small}")
        assert done.code == 0, done.output
        path = self.here / "runs/jobs" / name
        poll(lambda: any(event["epoch"] > 2 for event in events(path, "epoch")), 120, f"{name} trains again")

    def ran(self, done: Result) -> None:
        """How its jobs end is looked at below."""

    CHECKS: ClassVar = {"": ran}


@pytest.mark.parametrize("page", [each for each in pages(Page.MARKER) if each.id != LAPTOP])
def test_what_the_page_prints_works_on_the_cluster(bench: Bench, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = bench.folder / "page"
    monkeypatch.setenv("LOCKSTEP_PROFILES", str(here / "profiles"))
    monkeypatch.setenv("HOME", str(bench.folder))
    reader = Page(here, dict(os.environ))
    reader.reads(page)
    ids = {name: bench.backend.job_id(name) for name in ENDS[page]}
    runs = {name: number for name, number in ids.items() if name[-1].isdigit()}
    assert len({number.split("_")[0] for number in runs.values()}) == len({name[:-2] for name in runs}), (
        "a job array each"
    )
    for number in runs.values() if page == SWEEP else ():
        bench.cluster.ask("scontrol", "update", f"jobid={number}", "starttime=now")
    for name, state in ENDS[page].items():
        found = bench.wait(name, 120)
        assert found.state == state, (found, *bench.backend.logs(name))
        assert state != "cancelled" or events(reader.here / "runs/jobs" / name, "preempted")[-1]["saved"]
    assert {row.name for row in bench.backend.list()} == {*ENDS[page]}


@pytest.mark.nightly
def test_what_the_page_prints_works_from_a_laptop(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with laptop(cluster, tmp_path, monkeypatch) as there:
        there.login.program("lockstep", f'exec {Path(PYTHON).parent}/lockstep "$@"')
        monkeypatch.setenv("LOCKSTEP_SLURM_HOST", AT)  # the page's own has a /shared
        here = there.login.laptop / "page"
        Page(here, dict(os.environ)).reads(LAPTOP)
        (summary,) = (there.login.seen / "home").glob("runs/**/smoke/summary.json")
        assert json.loads(summary.read_text())["world_size"] == 2
