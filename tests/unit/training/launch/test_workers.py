"""Many writers, whole lines."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from lockstep.training.contract import ENV_NOTE, say
from lockstep.training.launch.ending import Attempts
from lockstep.training.launch.nodes import Meeting, WorkerId
from lockstep.training.launch.workers import Output, WorkerGroup
from lockstep.wire.hangs import Hangs
from lockstep.wire.progress import Progress, RunInfo
from tests.ranks import training

pytestmark = pytest.mark.promise("restarts")


def test_a_full_disk_costs_a_line_and_not_the_next_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank does not wait for a reader of its lines."""
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:  # closing it fails, too
        monkeypatch.setattr("sys.stdout", full)
        output = Output(0)
        out, errors = output.descriptors
        for _ in range(64):  # more than a pipe holds
            os.write(out, b"x" * 8191 + b"\n")
        os.write(errors, b"said\n")
        os.close(out)
        os.close(errors)
        deadline = time.monotonic() + 60
        output.wait(deadline)
        assert time.monotonic() < deadline and capsys.readouterr().err == "[rank 0] said\n"


def test_the_lines_of_two_ranks_are_whole_where_a_write_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(io.StringIO):
        def write(self, text: str) -> int:
            super().write(text[:8])
            time.sleep(0.3)
            return super().write(text[8:])

    monkeypatch.setattr("sys.stdout", stdout := Slow())
    outputs = [Output(0), Output(1)]
    for output in outputs:
        os.write(output.descriptors[0], b"said\n")
    for output in outputs:
        for descriptor in output.descriptors:
            os.close(descriptor)
        output.wait(time.monotonic() + 60)
    assert sorted(stdout.getvalue().splitlines()) == ["[rank 0] said", "[rank 1] said"]


def test_who_keeps_the_pipe_and_writes_on_is_not_waited_for(capfd: pytest.CaptureFixture[str]) -> None:
    output = Output(0)
    out, errors = output.descriptors
    os.write(out, b"said\n")
    with subprocess.Popen(["yes"], stdout=out, stderr=errors) as writer:
        os.close(out)
        os.close(errors)
        output.end()
        output.wait(time.monotonic() + 60)
        assert writer.wait(60) == -signal.SIGPIPE
    assert "[rank 0] said\n" in capfd.readouterr().out


def test_a_name_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    say("loss of \x1b[2J is not finite")
    output = capsys.readouterr().out + training("evaluate", "none\x1b[2J").output
    assert "\x1b" not in output and output.count("\\x1b[2J") == 2


@pytest.mark.parametrize(("flag", "grace"), [(None, 100.0), (5, 5)])
def test_the_ranks_have_as_long_as_their_run_asks_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flag: int | None, grace: float
) -> None:
    """A script sets its grace. The launcher, which has no flag for it, waits as long before it kills, also when the session has ended: its
    last checkpoint may still be on its way to a bucket."""
    environment = {ENV_NOTE: str(tmp_path / "note")}
    monkeypatch.setitem(os.environ, ENV_NOTE, environment[ENV_NOTE])
    shown = Progress(0, RunInfo(str(tmp_path), 1, 1, ends=False, grace=100.0), environment)
    args = argparse.Namespace(grace=flag, command=["sleep", "600"], prefix=False, ours=False)
    group = WorkerGroup(args, Meeting("", "", "", "", 1, 0, host=True), Attempts(None, 0), Hangs(tmp_path))
    shown.close()
    try:
        group.workers.match([WorkerId(0, 0)], 0, {"PATH": os.defpath})
        assert group._look_for_grace() == grace
    finally:
        group.workers.kill(group.workers.running)
