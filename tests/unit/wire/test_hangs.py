"""A rank that others wait for is reported as hanging, and no script that does something else between two steps."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lockstep.training import files
from lockstep.wire import hangs
from lockstep.wire.hangs import Hangs, of_run
from tests.processes import PYTHON, ROOT, poll

RANK = """
import sys, time
from pathlib import Path
from lockstep.wire import hangs
hangs.HANG_SECONDS, hangs.HANG_LOOK_SECONDS = 0.4, 0.1
folder, number = Path(sys.argv[1]), int(sys.argv[2])
hangs.Hangs(number, str(folder), 1, lambda: range(2), False, {}).alive(1, 1)
exec(compile("def wait(): time.sleep(600)", str(folder / "torch/distributed/collective.py"), "exec"))
(folder / f"begun-{number}").touch()
while number or not (folder / "meet").exists():
    time.sleep(0.05)
wait()
"""


@pytest.fixture
def two_ranks(tmp_path: Path) -> Iterator[list[int]]:
    """They sleep between two steps, until there is a file `meet`: then rank 0 waits in a collective."""
    (tmp_path / "train.py").write_text(RANK)
    with ExitStack() as stack:
        errors = stack.enter_context((tmp_path / "errors").open("wb"))
        pids = []
        for number in range(2):
            command = [PYTHON, str(tmp_path / "train.py"), str(tmp_path), str(number)]
            env = os.environ | {"PYTHONPATH": str(ROOT)}
            child = stack.enter_context(subprocess.Popen(command, env=env, cwd=tmp_path, stderr=errors))
            stack.callback(child.kill)
            pids.append(child.pid)
        poll(lambda: all((tmp_path / f"begun-{number}").exists() for number in range(2)), 60, "two ranks")
        yield pids


@pytest.mark.parametrize("stopped", [False, True])
def test_ranks_that_all_do_something_else_do_not_hang_until_one_waits_for_another(
    two_ranks: list[int], stopped: bool, tmp_path: Path
) -> None:
    time.sleep(2)  # they have looked at their stacks
    assert of_run(tmp_path) is None
    if stopped:
        os.kill(two_ranks[1], signal.SIGSTOP)
    (tmp_path / "meet").touch()
    poll(lambda: (tmp_path / "errors").read_text().endswith("hang.jsonl)\n"), 30, "the hang")
    output = (tmp_path / "errors").read_text()
    assert output.count("hang: ") == 1, output
    does = "does not answer" if stopped else "waits (train.py:11 in <module>)"
    assert f"rank 1 {does}, and rank 0 waits" in output, output
    found = of_run(tmp_path)
    assert found is not None and [one.rank for one in found.named] == [1]


def test_what_one_of_several_sessions_gets_done_counts_for_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take turns: one that waits for its turn does not hang. The newest is the one that answers."""
    monkeypatch.setattr(hangs, "HANG_SECONDS", 0.4)
    monkeypatch.setattr(hangs, "HANG_LOOK_SECONDS", 0.1)
    folders = [tmp_path / name for name in ("one", "two")]
    other = {"rank": 1, "what": "waits for others", "where": "", "waits": True, "stacks": ""}
    watches = []
    for folder in folders:
        folder.mkdir()
        watches.append(Hangs(0, str(folder), 1, lambda: range(2), False, {}))
        line = {"time": time.time(), "step": 5, "seconds": 1.0, "size": 2, "ranks": [other]}
        files.append(folder / "hang.jsonl", line)

    def stands(number: int) -> bool:
        found = of_run(folders[number])
        return found is not None and [one.rank for one in found.causes] == [0]

    first, second = watches
    try:
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            first.alive(5, 5)
            time.sleep(0.01)
            assert not stands(0) and not stands(1)
        poll(lambda: stands(1), 30, "the newest")
        assert not stands(0)
        second.close()
        poll(lambda: stands(0), 30, "the other")
    finally:
        second.close()
        first.close()
