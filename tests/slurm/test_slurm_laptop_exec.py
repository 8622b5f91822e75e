"""`lockstep exec` and `logs --tail` from a laptop, over a real ssh and through a real SLURM."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import PYTHON, poll
from tests.slurm.conftest import Cluster, lockstep
from tests.slurm.login import HOST, Laptop, laptop
from tests.slurm.test_slurm_exec import PROGRAM, TRAPS
from tests.slurm.test_slurm_laptop import BOUND, WAITS
from tests.terminal import at_a_terminal, drained, until_shown


@pytest.fixture
def here(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Laptop]:
    monkeypatch.chdir(tmp_path)
    with laptop(cluster, tmp_path, monkeypatch) as found:
        yield found


def test_a_command_beside_a_rank_and_the_last_lines(here: Laptop) -> None:
    counts = f"import os\nfor n in range(20): print(n, 'of', os.environ['RANK'], flush=True)\n{WAITS}"
    here.backend.submit(here.spec("inside", counts.replace("GO", f"{here.login.there}/go")))
    poll(lambda: sum("begun" in line for line in here.backend.logs("inside")) == 2, BOUND, "the ranks")
    words = ("slurm", "inside", "--host", HOST)
    assert lockstep("logs", *words, "--rank", "1", "--tail", "3").stdout == "18 of 1\n19 of 1\nbegun\n"
    done = lockstep("logs", *words, "--tail", "3")
    assert done.stdout == "[rank 0] 19 of 0\n[rank 0] begun\n[rank 1] begun\n", done
    told = "echo $RANK $LOCKSTEP_RUN_DIR ${LOCKSTEP_JOB-none}; echo oh >&2; exit 255"
    done = lockstep("exec", *words, "--rank", "1", "--", "sh", "-c", told)
    home = f"{here.login.there}/home"
    assert (done.returncode, done.stdout) == (255, f"1 {home}/runs/inside none\n"), done
    assert "oh" in done.stderr.splitlines() and "Traceback" not in done.stderr
    assert lockstep("exec", *words, "--rank", "2", "--", "true").stderr.endswith("has the ranks 0 … 1, got 2\n")
    data = os.urandom(3 << 20)
    command = [PYTHON, "-c", PROGRAM, "exec", *words, "--"]
    done_ = subprocess.run([*command, "cat"], input=data, capture_output=True, timeout=BOUND)
    assert (done_.returncode, done_.stdout == data, done_.stderr) == (0, True, b"")
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, "sh", "-c", TRAPS], stdin=subprocess.DEVNULL, stdout=pipe) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=BOUND)[0] == b"got\n" and process.returncode == 5
        finally:
            process.kill()
    with subprocess.Popen([*command, "sh", "-c", "echo ready; sleep 600"], stdout=pipe, stderr=pipe) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            assert here.login.drop() > 0
            said = process.communicate(timeout=BOUND)[1].decode().splitlines()
        finally:
            process.kill()
    assert process.returncode == 69 and said[-1].startswith(f"error: the connection to {HOST} is lost"), said
    assert not list((here.login.seen / "home/.local/state/lockstep/slurm/inside/submitit").glob("exec-*"))
    (here.login.seen / "go").touch()
    assert here.backend.wait("inside", BOUND).state == "succeeded"


def test_a_terminal_through_two_machines(here: Laptop) -> None:
    here.backend.submit(here.spec("long", WAITS.replace("GO", f"{here.login.there}/go")))
    poll(lambda: sum("begun" in line for line in here.backend.logs("long")) == 2, BOUND, "the ranks")
    command = [PYTHON, "-c", PROGRAM, "exec", "slurm", "long", "--host", HOST, "--rank", "1", "--", "sh", "-c"]
    with at_a_terminal([*command, f"stty size; echo rank $RANK; test -t 2 && {TRAPS}"]) as (process, ours, _):
        shown = until_shown(ours, b"ready", BOUND)
        assert b"33 77" in shown and b"rank 1" in shown, shown
        os.write(ours, b"~.\x03")  # the first two would be ssh's own
        shown = until_shown(ours, b"got", BOUND)
        assert process.wait(BOUND) == 5 and b"onnection" not in shown + drained(ours)
    (here.login.seen / "go").touch()
