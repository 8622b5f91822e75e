"""`lockstep doctor slurm` where SLURM's commands fail: that is no answer, and no word about the cluster. Needs no SLURM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ANSWERS = {
    "sinfo": 'case "$*" in *version*) echo "slurm 22.05";; *%G*) echo "main*|gpu:2|n1";; '
    '*%N*) echo "main*|up|infinite|idle|n1";; *) echo "main*";; esac',
    "sbatch": "echo slurm 22.05",
    "scontrol": 'case "$*" in ping) echo "Slurmctld(primary) at host is UP";; *) echo "PreemptMode = OFF";; esac',
    "sacctmgr": 'echo "root|normal"',
    "sacct": "true",
    "srun": 'echo "srun: Unable to allocate resources" >&2; exit 1',
}
FAILS = 'echo "error: Unable to contact slurm controller (connect failure)" >&2; exit 1'


def _doctor(folder: Path, *silent: str) -> dict[str, dict[str, str]]:
    """What doctor says where these commands fail, by check; of `scontrol` and `sinfo` they answer first."""
    programs = folder / "bin"
    programs.mkdir()
    for name, answer in ANSWERS.items():
        first = {"scontrol": "ping", "sinfo": "--version"}.get(name)
        if name in silent:
            answer = f'case "$*" in {first}) {answer};; *) {FAILS};; esac' if first else FAILS
        (programs / name).write_text(f"#!/bin/sh\n{answer}\n")
        (programs / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "LOCKSTEP_HOME": str(folder / "home")}
    program = "import sys; sys.argv[0] = 'lockstep'; from lockstep.jobs.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "doctor", "slurm", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        env=env,
    )
    assert "Traceback" not in done.stderr, done
    return {check["name"]: check for check in json.loads(done.stdout)}


def test_where_all_answer(tmp_path: Path) -> None:
    found = _doctor(tmp_path)
    results = {name: found[name]["result"] for name in ("partition", "gpus", "account", "accounting", "preemption")}
    assert set(results.values()) == {"ok"}, found


@pytest.mark.parametrize(
    ("command", "checks"),
    [
        ("sinfo", ["partition", "gpus"]), ("scontrol", ["preemption"]), ("sacct", ["accounting"]), ("sacctmgr", ["account"]),
    ],
)  # fmt: skip
def test_a_question_that_failed_is_no_answer(tmp_path: Path, command: str, checks: list[str]) -> None:
    found = _doctor(tmp_path, command)
    for check in checks:
        assert found[check]["result"] == "cannot tell", found
        assert "Unable to contact" in found[check]["detail"], found
    assert not [name for name in found if name not in checks and found[name]["result"] in ("missing", "warning")], found
