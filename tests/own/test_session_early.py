"""Signals that arrive while a user's script is still starting: none is lost, and what they end says so in one line."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from lockstep.training.launch import early
from tests.processes import PYTHON, clean_env, poll, processes, run, started

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
    [
        ("import", "TERM", "launcher"), ("import", "INT", "launcher"), ("import", "USR1", "launcher"),
        ("between", "INT", "a rank"),
    ],
)  # fmt: skip
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


def test_a_script_that_opens_no_session_ends_when_its_time_is_over(tmp_path: Path) -> None:
    """Half of the grace is for the start. A signal that it does not catch then ends it: one line, and no start more."""
    program = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
    command = [*LAUNCH, "--grace", "4", "--ranks", "1", "--", PYTHON, "-c", program, str(tmp_path / "reached")]
    with started(command) as launcher:
        poll((tmp_path / "reached").exists, what="the program")
        launcher.send_signal(signal.SIGUSR1)
        output, _ = launcher.communicate(timeout=30)
    told = "launch: the ranks were ended by SIGUSR1, which they did not catch\n"
    assert (launcher.returncode, output) == (1, told)


@pytest.mark.parametrize("name", ["USR1", "TERM", "INT"])
def test_a_rank_that_opens_no_session_is_ended_by_what_came_to_it_alone(tmp_path: Path, name: str) -> None:
    """As if it had come to the launcher: one line, and no start more."""
    program = """
import os, pathlib, sys, time
import lockstep
from lockstep.training.launch import early
early.HOLD_SECONDS = 1
(pathlib.Path(sys.argv[1]) / os.environ["RANK"]).touch()
time.sleep(60)
"""
    command = [*LAUNCH, "--grace", "4", "--ranks", "2", "--", PYTHON, "-c", program, str(tmp_path)]
    with started(command) as launcher:
        poll(lambda: len(list(tmp_path.iterdir())) == 2, what="the programs")
        os.kill(_of(launcher.pid)["RANK=1"], signal.Signals[f"SIG{name}"])
        output, _ = launcher.communicate(timeout=30)
    told = f"launch: the ranks were ended by SIG{name}, which they did not catch\n"
    assert (launcher.returncode, output) == (1, told)


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


WAITING = "import signal, sys, time; sys.argv[1:] and signal.signal(int(sys.argv[1]), print); print(flush=True); time.sleep(60)"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_what_a_program_does_not_catch_waits_until_its_bound(number: signal.Signals) -> None:
    """A program that catches it, or TERM, is ready; so is one that is no Python, and one that gets the signal again."""

    def ended(*words: str, grace: float = 60, again: bool = False) -> bool:
        with started([*words], clean_env()) as process:
            assert process.stdout is not None and process.stdout.readline() == "\n"
            held = early.Held(grace)
            held.send([process.pid], number)
            if again:
                held._waiting = {key: came - early.ONCE_SECONDS - 1 for key, came in held._waiting.items()}
                held.send([process.pid], number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(0.5) == -number and held.ending([-number]) == number
            assert held.ending([1]) == (number if held.release([]) else None)
            return False

    assert not ended(PYTHON, "-c", WAITING), "it waits"
    assert not ended(PYTHON, "-c", WAITING, str(int(signal.SIGTERM))) or number != signal.SIGTERM
    assert ended("sh", "-c", "echo; exec sleep 60")
    assert ended(PYTHON, "-c", WAITING, grace=0) and ended(PYTHON, "-c", WAITING, again=True)


IN_A_RANK = """
import os, signal, sys, threading, time
os.environ["LOCKSTEP_LAUNCHER"] = str(os.getppid())
import lockstep
from lockstep.training.launch import early
early.HOLD_SECONDS = 1
number, how = int(sys.argv[1]), sys.argv[2]
if how == "another thread":
    threading.Thread(target=early.give_back).start()
    while not early._no_session.is_set():
        time.sleep(0.01)
os.kill(os.getpid(), number)
if how == "another thread, later":
    threading.Thread(target=early.give_back).start()
    time.sleep(0.2)
if how == "give back":
    early.give_back()
if how == "a handler":
    heard = []
    signal.signal(number, lambda *_: heard.append(1))
    while not heard:
        time.sleep(0.01)
if how == "a child" and not os.fork():
    print("the child lives", early._came or signal.getsignal(number) is early._keep)
    os._exit(0)
if how == "a child":
    os.wait()
time.sleep(0.2)
print("alive", flush=True)
time.sleep(0 if how == "a handler" else 30)
"""


@pytest.mark.parametrize("number", early.FORWARDED)
def test_what_came_before_a_session_that_is_never_opened_ends_the_program(number: signal.Signals) -> None:
    """Or its own handler takes it. A child that it forks meanwhile lives: it was for its parent."""
    said = {
        "give back": "", "no Session": "alive\n", "another thread": "", "another thread, later": "", "a handler": "alive\n",
        "a child": "the child lives False\nalive\n",
    }  # fmt: skip
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        words = {how: [PYTHON, "-uc", IN_A_RANK, str(int(number)), how] for how in said}
        those = {how: stack.enter_context(started(command, clean_env())) for how, command in words.items()}
        found = {how: process.communicate(timeout=20)[0] for how, process in those.items()}
        ended = {how: those[how].returncode for how in said}
    if number == signal.SIGINT:
        found = {how: re.sub("Traceback(.|\n)*KeyboardInterrupt\n", "", text) for how, text in found.items()}
    assert (found, ended) == (said, {how: 0 if how == "a handler" else -number for how in said})
    assert time.monotonic() - began < 20


def test_a_session_takes_over_what_came_and_leaves_the_programs_own_handlers() -> None:
    program = """
import os, signal
os.environ["LOCKSTEP_LAUNCHER"] = str(os.getppid())
import lockstep, sys
print(sorted({"torch", "jobs"} & set(sys.modules)))
def own(*_): pass
signal.signal(signal.SIGUSR1, own)
os.kill(os.getpid(), signal.SIGTERM)
from lockstep.training.resilience.preempt import Signals
signals = Signals(["TERM", "USR1"])
while signals.received is None:
    pass
found = signals.received
signals.restore()
print(found, signal.getsignal(signal.SIGUSR1) is own)
print({signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)} == {signal.SIG_DFL})
"""
    done = run([PYTHON, "-c", program], clean_env(), 60)
    assert done.output.splitlines() == ["[]", "SIGTERM True", "True"], done.output
