"""Signals that arrive while a user's script is still starting: none is lost, and what they end says so in one line."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.processes import PYTHON, ROOT, clean_env, poll, ranks_of, run, started
from tests.ranks import launching
from tests.warm.gang import running

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
from tests import product
while place == "import" and not product.a_signal_is_held():  # the launcher imports torch itself, and may take longer
    time.sleep(0.02)
reached("between")
with Session(here / "run") as run:
    print("opened", flush=True)
"""


@pytest.mark.parametrize(("place", "name", "to"), [("import", "USR1", "launcher"), ("between", "INT", "a rank")])
def test_a_signal_while_a_script_starts(tmp_path: Path, place: str, name: str, to: str) -> None:
    ranks = 2 if to == "a rank" else 1
    command = [*LAUNCH, "--ranks", str(ranks), "--", PYTHON, "-c", SCRIPT, str(tmp_path), place]
    with started(command, clean_env(LOCKSTEP_THREADS="1")) as launcher:
        poll(lambda: len(list(tmp_path.glob("reached-*"))) == ranks, what="the place")
        os.kill(ranks_of(launcher.pid)[1] if to == "a rank" else launcher.pid, signal.Signals[f"SIG{name}"])
        (tmp_path / "go-on").touch()
        output, _ = launcher.communicate(timeout=240)
    assert launcher.returncode == 75 and "Traceback" not in output and "start again" not in output, output
    assert output.count(f"SIG{name} before the ranks were connected") == 1, output
    assert not (tmp_path / "run").exists(), "75 says that nothing is lost: nothing has begun"


def test_ranks_that_open_no_session_end_when_their_time_is_over(tmp_path: Path) -> None:
    """After a signal, ranks have half of the grace to open a Session. The launcher ends other ranks by a signal that they
    do not catch: one line, and no restart."""
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
        os.kill(ranks_of(launcher.pid)[1], signal.SIGUSR1)
        output, _ = launcher.communicate(timeout=240)
    assert launcher.returncode == 1 and output.count("\n") == 1 and "SIGUSR1" in output, output


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
    with launching("--max-restarts", "2", "--ranks", "2", "--", PYTHON, "-c", program, str(tmp_path)) as launcher:
        poll((tmp_path / "ending").exists, what="the end of rank 1")
        launcher.send_signal(signal.SIGUSR1)
        done = launcher.wait(240)
    assert done.code == 0 and done.output.count("start again") == 1, done.output


def test_a_program_that_opens_no_session_has_its_signals() -> None:
    """The program's handler takes signals that came before it. A child gets none of them, and takes later signals at once."""
    program = """
import os, signal, time
os.environ["LOCKSTEP_LAUNCHER"] = str(os.getppid())
import lockstep
from tests import product
product.hold_signals_for(6)
os.kill(os.getpid(), signal.SIGUSR1)
ready, begun = os.pipe()
if not (child := os.fork()):
    os.write(begun, b"1")
    time.sleep(60)
os.read(ready, 1)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
heard = []
signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
while not heard:
    time.sleep(0.01)
print("heard")
"""
    done = run([PYTHON, "-uc", program], clean_env(), 240)
    assert (done.code, done.output) == (0, "-15\nheard\n")


def test_a_session_takes_over_what_came_before_it(tmp_path: Path) -> None:
    program = """
import os, signal, sys
os.environ["LOCKSTEP_LAUNCHER"] = str(os.getppid())
import lockstep
print(sorted({"torch", "lockstep.jobs"} & set(sys.modules)))
from tests import product
product.hold_signals_for(240)
os.kill(os.getpid(), signal.SIGTERM)
with lockstep.Session(sys.argv[1]) as run:
    print("went on")
"""
    done = run([PYTHON, "-uc", program, str(tmp_path / "run")], clean_env(LOCKSTEP_THREADS="1"), 240)
    first, *others = done.output.splitlines()
    assert done.code == 75 and first == "[]" and len(others) == 1 and "SIGTERM" in others[0], done.output


LOADER = """
import pathlib, sys, time
here = pathlib.Path(sys.argv[1])
if __name__ != "__main__":  # a loader's process, which imports the script
    (here / "importing").touch()
    while not (here / "go-on").exists():
        time.sleep(0.02)
import torch
from lockstep import Session
if __name__ == "__main__":
    with Session(here / "run") as run:
        net = run.replicate(torch.nn.Linear(1, 1))
        run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.01))
        loader = torch.utils.data.DataLoader(torch.ones(8, 1), 1, num_workers=1, multiprocessing_context=sys.argv[2])
        for epoch in run.epochs(1):
            for x in run.iterate(loader):
                run.step(lambda x: net(x).mean(), x, samples=1)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_signal_to_all_processes_while_a_loader_imports(tmp_path: Path, method: str) -> None:
    """The loader's process would end, and the rank fail without it."""
    script = tmp_path / "train.py"
    script.write_text(LOADER)
    with running([[str(script), str(tmp_path), method]], clean_env(LOCKSTEP_THREADS="1", PYTHONPATH=str(ROOT))) as gang:
        poll((tmp_path / "importing").exists, what="a loader's process that imports")
        for pid in gang.pids():
            os.kill(pid, signal.SIGTERM)
        (tmp_path / "go-on").touch()
        done = gang.wait(240)
    assert done.code == 75 and "Traceback" not in done.output, done.output
