"""Signals that arrive while a user's script is still starting: none is lost, and what they end says so in one line."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.processes import PYTHON, clean_env, poll, processes, run, started

pytestmark = pytest.mark.promise("signals")

LAUNCH = [PYTHON, "-m", "lockstep.training", "launch", "--max-restarts", "2"]
SCRIPT = """
import os, pathlib, sys, time
here, place = pathlib.Path(sys.argv[1]), sys.argv[2]
def reached(name):
    if name == place:
        (here / f"reached-{os.environ['RANK']}").touch()
        while not (here / "go-on").exists():
            time.sleep(0.02)
reached("import")
from lockstep import Session
reached("between")
with Session(here / "run") as run:
    print("opened", flush=True)
"""


def _of(launcher: int) -> dict[str, int]:
    """The launcher's ranks: their processes."""
    found = {}
    for pid, _, parent, _ in processes():
        with contextlib.suppress(OSError, StopIteration):
            if parent == launcher:
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                found[next(entry for entry in environment if entry.startswith(b"RANK=")).decode()] = pid
    return found


@pytest.mark.parametrize(
    ("place", "name", "to"),
    [("import", "TERM", "launcher"), ("import", "USR1", "launcher"), ("between", "INT", "a rank")],
)
def test_a_signal_while_a_script_starts(tmp_path: Path, place: str, name: str, to: str) -> None:
    ranks = 2 if to == "a rank" else 1
    command = [*LAUNCH, "--ranks", str(ranks), "--", PYTHON, "-c", SCRIPT, str(tmp_path), place]
    with started(command, clean_env(LOCKSTEP_THREADS="1")) as launcher:
        poll(lambda: len(list(tmp_path.glob("reached-*"))) == ranks, what="the place")
        os.kill(_of(launcher.pid)["RANK=1"] if to == "a rank" else launcher.pid, signal.Signals[f"SIG{name}"])
        (tmp_path / "go-on").touch()
        output, _ = launcher.communicate(timeout=90)
    assert launcher.returncode == 75 and "Traceback" not in output and "start again" not in output, output
    assert output.count(f"SIG{name} before the ranks were connected") == 1, output
    assert not (tmp_path / "run").exists(), "75 says that nothing is lost: nothing has begun"


@pytest.mark.parametrize(("name", "to"), [("USR1", "launcher"), ("USR1", "a rank"), ("INT", "a rank")])
def test_ranks_that_open_no_session_end_when_their_time_is_over(tmp_path: Path, name: str, to: str) -> None:
    """Half of the grace is for the start. A signal that they do not catch then ends them, also one that came to one of
    them alone: one line, and no start more."""
    program = """
import os, pathlib, sys, time
import lockstep
from tests import product
product.hold_signals_for(1)
(pathlib.Path(sys.argv[1]) / os.environ["RANK"]).touch()
time.sleep(60)
"""
    command = [*LAUNCH, "--grace", "4", "--ranks", "2", "--", PYTHON, "-c", program, str(tmp_path)]
    with started(command) as launcher:
        poll(lambda: len(list(tmp_path.iterdir())) == 2, what="the programs")
        os.kill(_of(launcher.pid)["RANK=1"] if to == "a rank" else launcher.pid, signal.Signals[f"SIG{name}"])
        output, _ = launcher.communicate(timeout=30)
    assert launcher.returncode == 1 and output.count("\n") == 1 and f"SIG{name}" in output, output


def test_a_rank_that_is_ended_since_another_failed_was_not_asked_to_save(tmp_path: Path) -> None:
    """A rank that is still starting answers the agent's TERM with 75. That must not hide the other's failure, or nothing restarts."""
    program = """
import os, pathlib, signal, sys, time
here, first = pathlib.Path(sys.argv[1]), os.environ["LOCKSTEP_RESTARTS"] == "0"
if first and os.environ["RANK"] == "0":
    while not here.exists():
        time.sleep(0.02)
    sys.exit("mine")
if first:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    here.touch()
    time.sleep(60)
"""
    done = run([*LAUNCH, "--ranks", "2", "--", PYTHON, "-c", program, str(tmp_path / "reached")], clean_env())
    assert done.code == 0 and done.output.count("start again") == 1, done.output


def test_a_signal_while_all_ranks_are_about_to_start_again_reaches_them_then(tmp_path: Path) -> None:
    program = """
import os, pathlib, signal, sys, time
here, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
if os.environ["LOCKSTEP_RESTARTS"] == "0":
    signal.signal(signal.SIGTERM, lambda *_: (here / "ending").touch())
    signal.signal(signal.SIGUSR1, lambda *_: (here / "go-on").touch())
    (here / rank).touch()
    while not (here / "1").exists() or (rank == "1" and not (here / "go-on").exists()):
        time.sleep(0.02)
    sys.exit("mine")
heard = []
signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
while not heard:
    time.sleep(0.02)
"""
    command = [*LAUNCH, "--ranks", "2", "--", PYTHON, "-c", program, str(tmp_path)]
    with started(command) as launcher:
        poll((tmp_path / "ending").exists, what="the end of rank 1")
        launcher.send_signal(signal.SIGUSR1)
        output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 0 and output.count("start again") == 1, output


IN_A_RANK = """
import os, signal, sys, time
os.environ["LOCKSTEP_LAUNCHER"] = str(os.getppid())
import lockstep
from tests import product
product.hold_signals_for(1)
number, how = int(sys.argv[1]), sys.argv[2]
os.kill(os.getpid(), number)
if how == "a handler":
    heard = []
    signal.signal(number, lambda *_: heard.append(1))
    while not heard:
        time.sleep(0.01)
if how == "a child" and not os.fork():
    time.sleep(2)
    print("the child lives")
    os._exit(0)
if how == "a child":
    os.wait()
time.sleep(0.2)
print("alive", flush=True)
time.sleep(0 if how == "a handler" else 30)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_came_before_a_session_that_is_never_opened_ends_the_program(number: signal.Signals) -> None:
    """Or its own handler takes it. A child that it forks meanwhile lives: it was for its parent."""
    said = {"no Session": "alive\n", "a handler": "alive\n", "a child": "the child lives\n"}
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        words = {how: [PYTHON, "-uc", IN_A_RANK, str(int(number)), how] for how in said}
        those = {how: stack.enter_context(started(command, clean_env())) for how, command in words.items()}
        found = {how: process.communicate(timeout=20)[0] for how, process in those.items()}
        ended = {how: those[how].returncode for how in said}
    found = {how: re.sub("Traceback(.|\n)*KeyboardInterrupt\n", "", text) for how, text in found.items()}
    assert (found, ended) == (said, {how: 0 if how == "a handler" else -number for how in said})
    assert time.monotonic() - began < 20


def test_a_session_takes_over_what_came_before_it(tmp_path: Path) -> None:
    program = """
import os, signal, sys
os.environ["LOCKSTEP_LAUNCHER"] = str(os.getppid())
import lockstep
print(sorted({"torch", "lockstep.jobs"} & set(sys.modules)))
os.kill(os.getpid(), signal.SIGTERM)
with lockstep.Session(sys.argv[1]) as run:
    print("went on")
"""
    done = run([PYTHON, "-uc", program, str(tmp_path / "run")], clean_env(LOCKSTEP_THREADS="1"), 60)
    first, *others = done.output.splitlines()
    assert done.code == 75 and first == "[]" and len(others) == 1 and "SIGTERM" in others[0], done.output
