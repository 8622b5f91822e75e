"""A forked process (tests/warm) is what one from a shell is: in what it finds, and in how it ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.processes import PYTHON, ROOT, clean_env, processes, run
from tests.warm import process
from tests.warm.gang import python, running

FINDS = """
import json, os, signal, sys

with open("/proc/self/status") as file:
    status = dict(line.split(":", 1) for line in file)
libc = 0b11 << 31  # 32 and 33 are its own
print(json.dumps({
    "mask, ignored and caught": [int(status[name], 16) & ~libc for name in ("SigBlk", "SigIgn", "SigCgt")],
    "handlers": {number: str(signal.getsignal(number)) for number in signal.valid_signals()},
    "leads its session and group": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
    "descriptors": sorted(os.listdir("/proc/self/fd")),
    "threads": len(os.listdir("/proc/self/task")),
    "umask": os.umask(0o22),
    "folder": os.getcwd(),
    "words": [__name__, sys.argv, sys.path[0]],
    "variables": sorted(set(os.environ) - {"LC_CTYPE"}),  # which Python sets where there is no locale
}, indent=1))
"""
BEGINS = "import atexit, functools, signal, sys\natexit.register(functools.partial(print, 'last words', flush=True))\n"
ENDS = {
    "an error": (1, BEGINS + "def fail():\n    raise ArithmeticError('of its own')\nfail()\n"),
    "a text": (1, BEGINS + "sys.exit('what is wrong')\n"),
    "a number": (3, BEGINS + "sys.exit(3)\n"),
    "Ctrl-C": (-2, BEGINS + "signal.raise_signal(signal.SIGINT)\n"),
}


def _both(program: str, tmp_path: Path) -> tuple[int, str]:
    """What the program ends with, which is the same in both."""
    (tmp_path / "program.py").write_text(program)
    words = [str(tmp_path / "program.py"), "word"]
    # These tests may have been started in the background, with INT ignored.
    shell, forked = run(["env", "--default-signal", PYTHON, *words]), python(*words)
    assert forked == shell
    return forked.code, forked.output


def test_a_forked_process_finds_what_one_from_a_shell_finds(tmp_path: Path) -> None:
    code, output = _both(FINDS, tmp_path)
    assert code == 0 and '"descriptors"' in output, output


@pytest.mark.parametrize("how", ENDS)
def test_a_forked_process_ends_as_one_from_a_shell_does(how: str, tmp_path: Path) -> None:
    expected, program = ENDS[how]
    code, output = _both(program, tmp_path)
    assert code == expected and output.endswith("last words\n"), output


def test_test_processes_share_a_server_and_each_takes_its_own_processes_with_it() -> None:
    asleep = ["-c", "import time; time.sleep(60)"]
    with running([asleep]) as gang, open(os.devnull, "wb") as nothing:
        other = process._Server("")  # as another test process of this session connects
        second = other.fork(asleep, clean_env(), nothing.fileno(), None, ROOT)
        parents = {pid: parent for pid, _, parent, _ in processes()}
        assert parents[second.pid] == parents[gang.rank_pid(0)] and other.process is None
        other.close()
        assert second.wait(30) == -signal.SIGKILL and gang.processes[0].poll() is None


def test_the_last_rank_s_failure_ends_the_others_and_waiting_costs_no_time() -> None:
    words = [["-c", "import time; time.sleep(60)"], ["-c", "raise SystemExit(2)"]]
    before = time.process_time()
    with running(words) as gang:
        began = time.monotonic()
        assert gang.wait(50).code == 2 and gang.processes[0].returncode == -signal.SIGTERM
        assert time.monotonic() - began < 40
    assert time.process_time() - before < 2, "it waits for the ranks, and asks them not again and again"
