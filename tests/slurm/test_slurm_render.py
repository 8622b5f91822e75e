"""The batch script: golden files, purity, and no setting escapes its place. Needs no SLURM."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import product
from tests.jobs.helpers import lockstep
from tests.processes import ROOT
from tests.product import JobSpec

pytestmark = pytest.mark.promise("slurm-truth")

GOLDEN = Path(__file__).parent / "golden"
FOLDER = Path("/shared/lockstep/slurm/big/submitit")
BIG: dict[str, Any] = {
    "name": "big", "recipe": "bag_of_tricks", "nodes": 2, "gpus": 4, "cpus": 32, "memory": "64Gi", "time_limit": "2h",
    "run_dir": "/shared/runs/big", "shards": "/shared/shards", "env": {"EXPERIMENT": "1e3", "NCCL_SOCKET_IFNAME": "ib0"}, "max_restarts": 5,
    "slurm": {
        "partition": "gpu", "account": "team", "python": "/shared/venv/bin/python", "gpu_type": "a100",
        "modules": ["cuda/12.4"], "setup": ["ulimit -l unlimited"], "patch": {"mail_user": "a@example.org", "begin": "now+1hour"},
    },
}  # fmt: skip
SPECS: dict[str, dict[str, Any]] = {
    "command": {
        "name": "own", "command": ["./train.sh", "--text", "it's\n#SBATCH --uid=0"], "run_dir": "/shared/runs/own",
        "slurm": {"python": "/usr/bin/python3"},
    },
    "pyxis": {**BIG, "slurm": {"container": "pyxis", "image": "/images/a.sqsh", "mounts": ["/data", "/x:/y:ro"]}},
    "apptainer": {**BIG, "slurm": {"container": "apptainer", "image": "/images/a.sif", "constraint": "nvlink&a100"}},
}  # fmt: skip


@pytest.mark.parametrize("name", [*SPECS, "array"])
def test_golden(name: str) -> None:
    """`GOLDEN=write pytest` rewrites the files: read the diff before you commit it. The array waits for a preparation."""
    spec, path = JobSpec.of(SPECS.get(name, BIG)), GOLDEN / f"{name}.sh"
    texts = [
        product.slurm_script(spec, FOLDER, "4711" if name == "array" else None, 6 if name == "array" else 1)
        for _ in "12"
    ]
    if os.environ.get("GOLDEN") == "write":
        path.write_text(texts[0])
    assert texts == [path.read_text()] * 2
    check = subprocess.run(["bash", "-n"], input=texts[0], text=True, capture_output=True, timeout=30)
    assert check.returncode == 0, check.stderr


def test_the_example_does_not_drift() -> None:
    words = (
        "render slurm job.yaml --profile gpu-cluster --gpus 4 --set slurm.python=/shared/venv/bin/python "
        "--set run_dir=/shared/runs/smoke --set cpus=32 --set memory=256Gi"
    )
    done = lockstep(ROOT, *words.split(), LOCKSTEP_HOME="/shared/lockstep")
    assert done.stdout == (ROOT / "deploy/slurm/example.sbatch").read_text(), "make example-slurm"


def test_every_profile_of_a_cluster_renders(tmp_path: Path) -> None:
    values = {"name": "a", "recipe": "smoke", "nodes": 2, "run_dir": "/shared/a", "slurm": {"qos": "high"}}
    (tmp_path / "job.yaml").write_text(json.dumps(values))
    for path in (ROOT / "jobs/spec/cluster_profiles").glob("*.yaml"):
        words = ("render", "slurm", "job.yaml", "--profile", path.stem)
        done = lockstep(tmp_path, *words, LOCKSTEP_HOME="/shared/lockstep")
        assert done.returncode == 0 and "#SBATCH --partition=" in done.stdout, done
        assert "#SBATCH --qos=high\n" in done.stdout, "the profile lies below the job"
        assert "\nenv:" not in path.read_text(), "every backend reads it, and other machines have other interfaces"


@pytest.mark.parametrize(("mode", "code"), [(0o700, 0), (0o2700, 0), (0o750, 2), (0o701, 2)])
def test_the_script_takes_no_payload_from_a_folder_that_others_can_write(tmp_path: Path, mode: int, code: int) -> None:
    """A folder inherits its parent's setgid bit, and still belongs to its owner alone."""
    folder = tmp_path / "submitit"
    folder.mkdir()
    folder.chmod(mode)
    (line,) = (
        line for line in product.slurm_script(JobSpec.of(BIG), folder).splitlines() if "is not mine alone" in line
    )
    done = subprocess.run(["bash", "-euc", line], capture_output=True, text=True, timeout=20)
    assert done.returncode == code, done


def test_the_options_that_slurm_must_get() -> None:
    spec = JobSpec.of({**BIG, "slurm": {**BIG["slurm"], "patch": {"licenses": "matlab@server:2,ansys"}}})
    text = product.slurm_script(spec, FOLDER)
    flags = dict(re.findall(r"#SBATCH --([a-z-]+)(?:=(\S+))?", text))
    expected = {
        "signal": "USR2@90", "time": "120", "ntasks-per-node": "4", "gres": "gpu:a100:4", "open-mode": "append", "mem": "65536M",
        "cpus-per-task": "8", "licenses": "matlab@server:2,ansys", "requeue": "",
    }  # fmt: skip
    assert {name: flags.get(name) for name in expected} == expected, (
        "the signal: grace_seconds, and 30 s for the requeue"
    )
    srun = next(line for line in text.splitlines() if line.startswith("srun "))
    assert "--cpus-per-task=8 --kill-on-bad-exit=1" in srun


@pytest.mark.parametrize(
    "change",
    [
        {"patch": {"signal": "B:KILL@1"}}, {"patch": {"output": "/tmp/x"}}, {"patch": {"cpus_per_task": 5}},
        {"patch": {"num_gpus": 2}}, {"patch": {"test-only": True}}, {"patch": {"mem-per-cpu": "2G"}}, {"patch": {"quiet": True}},
        {"patch": {"mail_user": "a\n#SBATCH --uid=0"}}, {"patch": {"mail_user": "$(id)"}}, {"patch": {"mail_user": "a`id`"}},
        {"patch": {"mail_user": ["a"]}}, {"patch": {"Mail User": "a"}}, {"partition": "gpu --uid=0"}, {"partition": "gpu\n#SBATCH"},
        {"qos": "a\r#SBATCH"}, {"qos": 'a"b'},
        {"constraint": "a;id"}, {"licenses": "matlab:0"}, {"exclude": "n[1-2] x"}, {"image": "a b"}, {"mounts": ["/a:/b,/c"]},
        {"setup": ["a\nb"]}, {"python": "python"}, {"host": "-oProxyCommand=touch x"}, {"host": "a;b"},
    ],
)  # fmt: skip
def test_hostile_settings_are_refused_in_one_line(change: dict[str, Any], tmp_path: Path) -> None:
    """The error names the setting."""
    (tmp_path / "job.yaml").write_text(json.dumps({**BIG, "slurm": change}))
    done = lockstep(tmp_path, "render", "slurm", "job.yaml", LOCKSTEP_HOME="/shared/lockstep")
    ((name, value),) = change.items()
    inner = next(iter(value)) if isinstance(value, dict) else name
    assert done.returncode == 2 and inner.lower() in done.stderr.lower() and done.stderr.count("\n") == 1, done
