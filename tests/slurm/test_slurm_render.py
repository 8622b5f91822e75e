"""The batch script: golden files, purity, and that nothing a person writes gets out of its place. Needs no SLURM."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.jobs import sweep
from lockstep.jobs.cli import options
from lockstep.jobs.slurm import render
from lockstep.jobs.spec import profile as profiles
from lockstep.jobs.spec.model import JobSpec
from lockstep.training.contract import UserError
from tests.processes import PYTHON, ROOT, run

GOLDEN = Path(__file__).parent / "golden"
FOLDER = Path("/shared/lockstep/slurm/big/submitit")
BIG: dict[str, Any] = {
    "name": "big", "recipe": "bag_of_tricks", "nodes": 2, "gpus": 4, "cpus": 32, "memory": "64Gi", "time_limit": "2h",
    "run_dir": "/shared/runs/big", "shards": "/shared/shards", "env": {"EXPERIMENT": "1e3"}, "max_restarts": 5,
    "slurm": {
        "partition": "gpu", "account": "team", "python": "/shared/venv/bin/python", "gpu_type": "a100", "socket_interface": "ib0",
        "modules": ["cuda/12.4"], "setup": ["ulimit -l unlimited"], "patch": {"mail_user": "a@example.org", "begin": "now+1hour"},
    },
}  # fmt: skip
SPECS: dict[str, dict[str, Any]] = {
    "gpu": BIG,
    "cpu": {
        "name": "small", "recipe": "smoke", "ranks_per_node": 2, "run_dir": "/shared/runs/small",
        "slurm": {"python": "/shared/venv/bin/python"},
    },
    "command": {
        "name": "own", "command": ["./train.sh", "--text", "it's\n#SBATCH --uid=0"], "run_dir": "/shared/runs/own",
        "slurm": {"python": "/usr/bin/python3"},
    },
    "pyxis": {**BIG, "slurm": {"container": "pyxis", "image": "/images/a.sqsh", "mounts": ["/data", "/x:/y:ro"]}},
    "apptainer": {**BIG, "slurm": {"container": "apptainer", "image": "/images/a.sif", "constraint": "nvlink&a100"}},
}  # fmt: skip


@pytest.mark.parametrize("name", [*SPECS, "array", "after"])
def test_golden(name: str) -> None:
    """`WRITE_GOLDEN=1` writes them anew: read the difference."""
    spec = JobSpec.of(SPECS.get(name, BIG))
    text = render.script(spec, FOLDER, "4711" if name == "after" else None, 6 if name == "array" else 1)
    path = GOLDEN / f"{name}.sh"
    if os.environ.get("WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()
    assert text == render.script(spec, FOLDER, "4711" if name == "after" else None, 6 if name == "array" else 1)
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, timeout=30)
    assert checked.returncode == 0, checked.stderr


def test_the_example_does_not_drift(tmp_path: Path) -> None:
    env = {**os.environ, "LOCKSTEP_HOME": "/shared/lockstep", "PYTHONPATH": str(ROOT)}
    example = (ROOT / "deploy/slurm/example.sbatch").read_text()
    words = ["render", "slurm", "job.yaml", "--profile", "gpu-cluster", "--gpus", "4"]
    words += ["--set", "slurm.python=/shared/venv/bin/python", "--set", "run_dir=/shared/runs/smoke"]
    words += ["--set", "cpus=32", "--set", "memory=256Gi"]
    program = f"import sys; sys.argv[:] = ['lockstep', *{words!r}]; from lockstep.jobs.cli.main import main; main()"
    done = run([PYTHON, "-c", program], env, 60, ROOT)
    assert done.code == 0 and done.output == example, "make example-slurm"


@pytest.mark.parametrize(("mode", "code"), [(0o700, 0), (0o2700, 0), (0o750, 2), (0o701, 2)])
def test_the_script_takes_no_payload_from_a_folder_that_others_can_write(tmp_path: Path, mode: int, code: int) -> None:
    """A folder below one with the group bit set inherits that, and is still its owner's alone."""
    folder = tmp_path / "submitit"
    folder.mkdir()
    folder.chmod(mode)
    (line,) = (line for line in render.script(JobSpec.of(BIG), folder).splitlines() if "is not mine alone" in line)
    done = subprocess.run(["bash", "-euc", line], capture_output=True, text=True, timeout=20)
    assert done.returncode == code, done


def test_what_slurm_must_be_told() -> None:
    text = render.script(JobSpec.of(BIG), FOLDER)
    flags = dict(re.findall(r"#SBATCH --([a-z-]+)(?:=(\S+))?", text))
    assert flags["signal"] == "USR2@90", "grace_seconds and 30 s for the requeue"
    assert flags["time"] == "120" and flags["ntasks-per-node"] == "4" and flags["gres"] == "gpu:a100:4"
    assert "requeue" in flags and flags["open-mode"] == "append" and flags["mem"] == "65536M"
    srun = next(line for line in text.splitlines() if line.startswith("srun "))
    assert "--cpus-per-task=8 --kill-on-bad-exit=1" in srun and flags["cpus-per-task"] == "8"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch": {"signal": "B:KILL@1"}}, "slurm.patch may not set signal: use grace_seconds"),
        ({"patch": {"requeue": False}}, "may not set requeue: use max_restarts"),
        ({"patch": {"output": "/tmp/x"}}, "may not set output"),
        ({"patch": {"mail_user": "a\n#SBATCH --uid=0"}}, "must be plain text, a whole number or true, got"),
        ({"patch": {"mail_user": "$(id)"}}, "must be plain text"),
        ({"patch": {"mail_user": "a`id`"}}, "must be plain text"),
        ({"patch": {"mail_user": ["a"]}}, "must be plain text, a whole number or true"),
        ({"patch": {"Mail User": "a"}}, "is not an option of sbatch"),
        ({"patch": {"setup": "rm"}}, "use slurm.setup"),
        ({"partition": "gpu --uid=0"}, "must be one word"),
        ({"partition": "gpu\n#SBATCH"}, "must be one word"),
        ({"constraint": "a;id"}, "must be features such as"),
        ({"licenses": "matlab:0"}, "must be licenses such as matlab:2,ansys"),
        ({"licenses": "matlab:2;id"}, "must be licenses such as matlab:2,ansys"),
        ({"exclude": "n[1-2] x"}, "must be a list of nodes"),
        ({"image": "a b"}, "must be an image"),
        ({"mounts": ["/a:/b,/c"]}, "must be /path"),
        ({"setup": ["a\nb"]}, "must be one line"),
        ({"python": "python"}, "must be an absolute path"),
    ],
)  # fmt: skip
def test_hostile_settings_are_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        render.script(JobSpec.of({**BIG, "slurm": change}), FOLDER)
    assert "\n" not in str(caught.value)


def test_licenses_have_a_server_and_a_number() -> None:
    spec = JobSpec.of({**BIG, "slurm": {"licenses": "matlab@server:2,ansys"}})
    assert "#SBATCH --licenses=matlab@server:2,ansys\n" in render.script(spec, FOLDER)


@pytest.mark.parametrize("folder", ["/home/a b/x", "/home/%j/x", "/home/a'b", "/home/a\n/x", "/home/$x"])
def test_folders_that_a_script_cannot_name(folder: str) -> None:
    with pytest.raises(UserError, match="LOCKSTEP_HOME"):
        render.script(JobSpec.of(BIG), Path(folder))


WORDS = st.text("abz09_./:,;@%+=[]()*~!&| -", max_size=30)
"""What a value may hold, most of it: text of any letters is nearly always refused, and says nothing about a script."""


@given(
    text=st.one_of(st.text(max_size=30), WORDS, st.text("ab1-\n\r#\"'`$\\ ", max_size=30)),
    where=st.sampled_from(["partition", "account", "qos", "reservation", "licenses", "wckey", "gpu_type", "patch"]),
)
@settings(max_examples=300, deadline=None)
def test_no_text_leaves_its_line(text: str, where: str) -> None:
    """Whatever stands in a setting, the script has the lines of the script without it, and #SBATCH ones only."""
    slurm: dict[str, Any] = {"patch": {"mail_user": text}} if where == "patch" else {where: text}
    try:
        script = render.script(JobSpec.of({**BIG, "slurm": slurm}), FOLDER)
    except UserError as error:
        assert "\n" not in str(error)
        return
    own = [line for line in script.splitlines() if line not in _plain_lines()]
    assert 1 <= len(own) <= 3 and all(line.startswith("#SBATCH --") for line in own), own


@functools.cache
def _plain_lines() -> frozenset[str]:
    return frozenset(render.script(JobSpec.of({**BIG, "slurm": {}}), FOLDER).splitlines())


def test_profiles_lie_below_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCKSTEP_PROFILES", str(tmp_path))
    (tmp_path / "mine.yaml").write_text("slurm: {partition: gpu, account: team}\ncpus: 8\n")
    (tmp_path / "job.yaml").write_text("name: a\nrecipe: smoke\nslurm: {account: other}\n")
    spec = options.build(tmp_path / "job.yaml", {"slurm.qos": "high"}, "mine")
    assert (spec.slurm.partition, spec.slurm.account, spec.slurm.qos, spec.cpus) == ("gpu", "other", "high", 8)
    assert options.build(None, {"recipe": "smoke"}, str(tmp_path / "mine.yaml")).slurm.account == "team"
    with pytest.raises(UserError, match="there is no profile 'mien' in .*did you mean 'mine'"):
        profiles.load("mien")
    with pytest.raises(UserError, match="takes a name or the path"):
        profiles.load("../mine")
    (tmp_path / "bad.yaml").write_text("recipe: smoke\n")
    with pytest.raises(UserError, match="'recipe' belongs in the job"):
        profiles.load("bad")
    (tmp_path / "bad.yaml").write_text("cpus: 2\nslurm:\n  partitoin: x\n")
    with pytest.raises(
        UserError, match=r"bad\.yaml, line 3: unknown setting 'slurm\.partitoin'; did you mean 'partition'"
    ):
        options.build(tmp_path / "job.yaml", {}, "bad")


def test_the_profiles_are_sound() -> None:
    paths = sorted((ROOT / "jobs/spec/cluster_profiles").glob("*.yaml"))
    assert {path.stem for path in paths} >= {"gpu-cluster", "cpu-cluster", "pyxis-cluster", "apptainer-cluster"}
    for path in paths:
        below = profiles.load(str(path))
        spec = JobSpec.of({"name": "a", "recipe": "smoke", "nodes": 2, "run_dir": "/shared/a", **below})
        assert f"#SBATCH --partition={spec.slurm.partition}\n" in render.script(spec, FOLDER)
        assert set(yaml.safe_load(path.read_text())) <= set(profiles.ALLOWED)


def test_sweeps() -> None:
    spec = JobSpec.of({"name": "g", "recipe": "smoke", "overrides": {"epochs": 2}})
    values = sweep.parse(["lr=0.1,1e-3", "loss.reduction=sum,mean"])
    found = sweep.expand(spec, values)
    assert [one.name for one in found] == ["g-0", "g-1", "g-2", "g-3"]
    assert found[1].overrides == {"epochs": 2, "lr": 0.1, "loss.reduction": "mean"}
    assert sweep.expand(spec.model_copy(update={"run_dir": "/r/g"}), {"lr": [1.0]})[0].run_dir == "/r/g/g-0"
    for texts, message in (
        (["lr"], "takes NAME=VALUE"), (["lr="], "takes NAME=VALUE"), (["lr=0.1", "lr=0.2"], "is given twice"),
        (["lr=[1"], "--sweep lr, line 1: expected"), (["lrr=1,2"], "unknown setting 'lrr'; did you mean 'lr'"),
        (["lr=fast,slow"], "must be a number"), (["lr=0.1,0.2,0.1"], "--sweep lr has 0.1 twice"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            sweep.expand(spec, sweep.parse(texts))
    with pytest.raises(UserError, match="more than 1000"):
        sweep.expand(spec, {"lr": list(range(1001))})
