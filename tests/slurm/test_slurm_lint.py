"""Each rule reports its footgun in an otherwise sound job, and a sound job has no finding. Needs no SLURM."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.helpers import lockstep

GOOD: dict[str, Any] = {
    "name": "good", "recipe": "resnet18", "nodes": 2, "gpus": 4, "cpus": 16, "memory": "64Gi", "run_dir": "/shared/runs/good",
    "slurm": {},
}  # fmt: skip
CASES: list[tuple[str, dict[str, Any]]] = [
    ("LS102", {"time_limit": "2m"}),
    ("LS102", {"time_limit": "10m", "grace_seconds": 600}),
    ("LS103", {"run_dir": "/tmp/run"}),
    ("LS103", {"home": "/tmp/home"}),
    ("LJ006", {"env": {"WANDB_API_KEY": "abc"}}),
    ("LJ005", {"slurm": {"container": "pyxis"}}),
    ("LS110", {"slurm": {"image": "a:1"}}),
    ("LJ010", {"env": {"WORLD_SIZE": "8"}}),
    ("LJ010", {"env": {"SLURM_NTASKS": "8"}}),
]


def findings(folder: Path, change: dict[str, Any]) -> list[str]:
    values = {**GOOD, **change}
    home = values.pop("home", "/shared/lockstep")
    (folder / "job.yaml").write_text(json.dumps(values))
    done = lockstep(folder, "lint", "job.yaml", "--backend", "slurm", "--json", LOCKSTEP_HOME=home)
    return [item["id"] for item in json.loads(done.stdout)]


@pytest.mark.parametrize(("rule", "change"), CASES)
def test_the_rule_finds_its_footgun(rule: str, change: dict[str, Any], tmp_path: Path) -> None:
    assert rule in findings(tmp_path, change)


def test_sound_jobs_provoke_none_and_every_rule_is_provoked(tmp_path: Path) -> None:
    assert findings(tmp_path, {}) == []
    for image in ("/images/lockstep.sif", "registry/lockstep:1"):
        assert findings(tmp_path, {"slurm": {**GOOD["slurm"], "container": "apptainer", "image": image}}) == []
    rules = lockstep(tmp_path, "lint", "--backend", "slurm", "--rules").stdout
    assert {*re.findall(r"LS1\d\d", rules)} == {rule for rule, _ in CASES if rule.startswith("LS1")}
