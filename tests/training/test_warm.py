"""A forked process (tests/warm) is what one from a shell is: in what it finds, and in how it ends."""

from __future__ import annotations

from pathlib import Path

from tests.processes import PYTHON, run
from tests.warm.gang import python

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
PROGRAMS = {
    "what it finds": (0, FINDS, "}\n"),
    "an error": (1, BEGINS + "def fail():\n    raise ArithmeticError('of its own')\nfail()\n", "last words\n"),
    "a text": (1, BEGINS + "sys.exit('what is wrong')\n", "last words\n"),
    "a number": (3, BEGINS + "sys.exit(3)\n", "last words\n"),
    "Ctrl-C": (-2, BEGINS + "signal.raise_signal(signal.SIGINT)\n", "last words\n"),
}


def test_a_forked_process_finds_and_ends_as_one_from_a_shell_does(tmp_path: Path) -> None:
    for name, (code, program, last) in PROGRAMS.items():
        (tmp_path / "program.py").write_text(program)
        words = [str(tmp_path / "program.py"), "word"]
        # These tests may have been started in the background, with INT ignored.
        shell, forked = run(["env", "--default-signal", PYTHON, *words]), python(*words)
        assert forked == shell, name
        assert forked.code == code and forked.output.endswith(last), (name, forked.output)
