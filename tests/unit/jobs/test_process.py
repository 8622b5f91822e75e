"""A program in the foreground, before it is there."""

from __future__ import annotations

from tests.processes import PYTHON, run


def test_a_signal_while_a_program_is_started_reaches_it() -> None:
    """A signal that is ignored, as under nohup, stays ignored."""
    program = """
import os, signal, subprocess
from lockstep.jobs.process import Streams, run
start = subprocess.Popen
def slowly(*words, **how):
    os.kill(os.getpid(), signal.SIGTERM)
    return start(*words, **how)
subprocess.Popen = slowly
print(run(["sleep", "60"], Streams()), flush=True)
subprocess.Popen = start
signal.signal(signal.SIGHUP, signal.SIG_IGN)
print(run(["sh", "-c", "kill -HUP $$; exit 3"], Streams()))
"""
    result = run([PYTHON, "-c", program])
    assert (result.code, result.output.split()) == (0, ["143", "3"]), result
