"""Every SLURM rule is provoked once, and a sound job provokes none. Needs no SLURM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.jobs.slurm import render
from lockstep.jobs.slurm.rules import RULES
from lockstep.jobs.spec.model import JobSpec

GOOD: dict[str, Any] = {
    "name": "good", "recipe": "resnet18", "nodes": 2, "gpus": 4, "cpus": 16, "memory": "64Gi", "run_dir": "/shared/runs/good",
    "slurm": {"socket_interface": "ib0"},
}  # fmt: skip
CASES: list[tuple[str, dict[str, Any]]] = [
    ("LS101", {"elastic": {"min_nodes": 1, "max_nodes": 2}}),
    ("LS102", {"time_limit": "2m"}),
    ("LS102", {"time_limit": "10m", "grace_seconds": 600}),
    ("LS103", {"run_dir": "/tmp/run"}),
    ("LS104", {"folder": "/tmp/home/slurm"}),
    ("LS105", {"slurm": {}}),
    ("LS106", {"ranks_per_node": 2}),
    ("LS107", {"env": {"WANDB_API_KEY": "abc"}}),
    ("LS108", {"max_restarts": 0}),
    ("LS109", {"cpus": 2}),
    ("LS110", {"slurm": {"container": "pyxis"}}),
    ("LS111", {"slurm": {"image": "a:1"}}),
    ("LS112", {"shards": "/not/there"}),
    ("LS113", {"env": {"WORLD_SIZE": "8"}}),
    ("LS113", {"env": {"SLURM_NTASKS": "8"}}),
    ("LS114", {"memory": "2Gi"}),
    ("LS115", {"slurm": {"container": "apptainer", "image": "IMAGE"}}),
    ("LS116", {"slurm": {"host": "login.example"}}),
]


def findings(change: dict[str, Any]) -> list[str]:
    values = {**GOOD, **change}
    folder = Path(values.pop("folder", "/shared/lockstep/slurm/good/submitit"))
    spec = JobSpec.of(values)
    return [item.id for item in RULES.apply(spec, render.manifests(spec, folder))]


def test_a_sound_job_provokes_none() -> None:
    assert findings({}) == []


@pytest.mark.parametrize(("rule", "change"), CASES)
def test_the_rule_finds_its_footgun(
    rule: str, change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _packages(tmp_path).mkdir(parents=True)
    assert rule in findings(change)


def _packages(folder: Path) -> Path:
    """Those of an image that is a folder."""
    (folder / "IMAGE/usr").mkdir(parents=True)
    return folder / "IMAGE/opt/venv/lib/python3.11/site-packages"


def test_an_image_with_submitit_and_one_that_cannot_be_seen_are_sound(tmp_path: Path) -> None:
    (_packages(tmp_path) / "submitit").mkdir(parents=True)
    for image in (str(tmp_path / "IMAGE"), "/images/lockstep.sif", "registry/lockstep:1"):
        slurm = {**GOOD["slurm"], "container": "apptainer", "image": image}
        assert findings({"slurm": slurm}) == []


def test_every_rule_is_provoked() -> None:
    assert {rule.id for rule in RULES.all()} == {rule for rule, _ in CASES}
