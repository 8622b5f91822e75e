"""Ctrl-C leaves nothing of a suite. CI's two lanes (.ci/lanes.sh) end together, and one that dies is told."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from tests.processes import PYTHON, ROOT, clean_env, poll, run, started
from tests.runs import Job

LAUNCHED = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1], os.environ['RANK']).touch(); time.sleep(60)"


def two_gangs(tmp_path: Path, data_root: Path) -> None:
    """The suite that is interrupted: forked ranks in the middle of a run, and two ranks below the real launcher."""
    job, here = Job(tmp_path / "run", data_root, 2), [tmp_path / name for name in ("0", "1", "held")]
    command = [PYTHON, "-m", "lockstep.training", "launch", "--ranks", "2", "--", PYTHON, "-c", LAUNCHED, str(tmp_path)]
    with started(command), job.started(LOCKSTEP_TEST_FATE="1:5:HOLD", LOCKSTEP_TEST_HELD=str(here[2])):
        poll(lambda: all(path.exists() for path in here), 180, "both gangs")
        Path(os.environ["READY"]).touch()
        time.sleep(60)


def test_nothing_is_left_of_a_suite_that_is_interrupted(tmp_path: Path) -> None:
    """In a worker, as `make` starts it."""
    for name in ("suite", "tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "suite/test_it.py").write_text(
        "from tests.faults.test_interrupted import two_gangs as test_two_gangs\n"
    )
    command = [
        "env", "--default-signal", PYTHON, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:randomly",
        "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'base'}", "-c", str(ROOT / "pyproject.toml"), "-n", "1",
        str(tmp_path / "suite"),
    ]  # fmt: skip
    every = Job(tmp_path / "none", tmp_path)  # of which every process of the suite has the mark
    env = clean_env(MARK=every.mark, READY=str(tmp_path / "ready"), TMPDIR=str(tmp_path / "tmp"))
    with started(command, {name: value for name, value in env.items() if not name.startswith("PYTEST_")}) as suite:
        poll(lambda: (tmp_path / "ready").exists() or suite.poll() is not None, 180, "both gangs")
        held = _sockets(every.pids()) & _listening()
        os.killpg(suite.pid, signal.SIGINT)  # as a terminal does: what is in sessions of its own does not get it
        output, _ = suite.communicate(timeout=30)
        every.assert_gone()
    assert suite.returncode == 2 and "KeyboardInterrupt" in output and held, output
    assert not held & _listening()
    assert list((tmp_path / "tmp").iterdir()) == [], "pytest's own folder is elsewhere"


def _listening() -> set[str]:
    """The inodes of the TCP sockets that listen."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {row[9] for row in rows if row[3] == "0A"}


def _sockets(pids: list[int]) -> set[str]:
    found = set()
    for entry in (entry for pid in pids for entry in Path(f"/proc/{pid}/fd").iterdir()):
        with contextlib.suppress(OSError):  # closed meanwhile
            found.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    return found


def _lanes(front: str, beside: str) -> list[str]:
    lines = ["set -euo pipefail", f". {ROOT}/.ci/lanes.sh", f"f() {{ {front}; }}", f"b() {{ {beside}; }}", "lanes f b"]
    return ["bash", "-c", "\n".join(lines)]


@pytest.mark.parametrize(
    ("front", "beside", "failed"),
    [
        ("suite true", "suite true; suite true", ""),
        ("suite false; suite echo went on", "suite true", "false\n"),
        ("suite true", "suite false; suite true", "false\n"),
        ("suite true", "suite true; kill -KILL $BASHPID", "the lane beside ended with 137: "),
        ("suite true", "exec > /dev/full; suite true", "the lane beside ended with 1: "),
        ("kill -KILL $BASHPID", "suite true", "the lane in front ended with 137: "),
    ],
)
def test_what_fails_or_dies_in_a_lane_fails_ci(front: str, beside: str, failed: str, tmp_path: Path) -> None:
    done = run(_lanes(front, beside), clean_env(TMPDIR=str(tmp_path)))
    assert done.code == bool(failed) and ("all suites passed" in done.output) == (not failed), done.output
    assert f"failed:\n{failed}" in done.output or not failed, done.output
    assert "went on" in done.output or "went on" not in front
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "beside_hears"),
    [("INT", 'trap "" INT TERM'), ("TERM", 'trap "" INT; trap "sleep 0.5; echo torn down late; exit 2" TERM')],
    ids=["INT, one is deaf", "TERM, one hears only that"],
)
def test_a_signal_to_ci_ends_both_lanes(name: str, beside_hears: str, tmp_path: Path) -> None:
    """One suite does its teardown on INT, the other one does not hear it. What would come after them does not begin."""
    (tmp_path / "tmp").mkdir()
    wait = f"while : > {tmp_path}/$0; do sleep 0.05; done"
    front = f"suite sh -c 'trap \"sleep 0.2; echo torn down; exit 2\" INT; {wait}' front; suite echo later"
    beside = f"suite sh -c '{beside_hears}; {wait}' beside; suite echo later"
    both = Job(tmp_path / "none", tmp_path)
    env = clean_env(MARK=both.mark, TMPDIR=str(tmp_path / "tmp"), LANES_GRACE="2")
    with started(["env", "--default-signal", *_lanes(front, beside)], env) as ci:
        poll(lambda: (tmp_path / "front").exists() and (tmp_path / "beside").exists(), what="both suites")
        ci.send_signal(signal.Signals[f"SIG{name}"])
        output, _ = ci.communicate(timeout=30)
        both.assert_gone()
    assert ci.returncode == 128 + signal.Signals[f"SIG{name}"], output
    assert f"stopped by {name}" in output and "torn down" in output and "passed" not in output, output
    said = output.partition("=== the suites beside\n")[2]
    assert "beside\n" in said and "suite echo later" not in output and "=== echo later" not in output, output
    assert ("torn down late" in said) == ("torn down late" in beside_hears), output
    assert list((tmp_path / "tmp").iterdir()) == []
