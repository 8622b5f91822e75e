"""A signal that comes while a script of one's own is still starting: nobody loses it, and it ends with one line."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.processes import PYTHON, clean_env, poll, processes, started
from training.checkpoint import store
from training.launch import early

LAUNCH = [PYTHON, "-m", "training", "launch", "--max-restarts", "2"]
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
import torch
with Session(here / "run") as run:
    reached("opened")
    model = run.replicate(torch.nn.Linear(2, 1))
    run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    for _ in run.epochs(2):
        for x, in run.batches(torch.utils.data.TensorDataset(torch.ones(64, 2)), 4):
            run.step(model(x).mean())
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
        ("between", "HUP", "launcher"), ("between", "INT", "a rank"), ("between", "USR2", "a rank"),
        ("opened", "USR1", "launcher"),
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
    early_enough = output.count(f"SIG{name} before the ranks were connected")
    saved = bool(store.candidates(tmp_path / "run/checkpoints"))
    assert early_enough + output.count(f"ended early by SIG{name}") == 1, output
    assert saved != bool(early_enough), "75 says that nothing is lost"
    assert saved or place != "opened"


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


WAITING = "import signal, sys, time; sys.argv[1:] and signal.signal(int(sys.argv[1]), print); print(flush=True); time.sleep(60)"


@pytest.mark.parametrize("number", early.FORWARDED)
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
            assert held.ending([1]) == (number if held.release() else None)
            return False

    assert not ended(PYTHON, "-c", WAITING), "it waits"
    assert not ended(PYTHON, "-c", WAITING, str(int(signal.SIGTERM))) or number != signal.SIGTERM
    assert ended("sh", "-c", "echo; exec sleep 60")
    assert ended(PYTHON, "-c", WAITING, grace=0) and ended(PYTHON, "-c", WAITING, again=True)


KEEPING = """
import os, signal, sys, time
os.environ["LOCKSTEP_LAUNCHER"] = str(os.getppid())
import lockstep
from training.launch import early
early.HOLD_SECONDS = 0.5
number = int(sys.argv[1])
os.kill(os.getpid(), number)
if sys.argv[2] == "give back":
    early.give_back()
time.sleep(0.2)
print("alive", flush=True)
time.sleep(30)
"""


@pytest.mark.parametrize("number", early.FORWARDED)
@pytest.mark.parametrize("how", ["give back", "no Session"])
def test_what_came_before_a_session_that_is_never_opened_ends_the_program(number: signal.Signals, how: str) -> None:
    began = time.monotonic()
    with started([PYTHON, "-c", KEEPING, str(int(number)), how], clean_env()) as process:
        output, _ = process.communicate(timeout=20)
    assert process.returncode == -number and ("alive" in output) == (how == "no Session"), output
    assert time.monotonic() - began < 15
