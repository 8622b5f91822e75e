"""A rank that others wait for is reported as hanging, and no script that does something else between two steps."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lockstep.wire import hangs, progress
from lockstep.wire.progress import Progress, RunInfo
from tests.processes import PYTHON, ROOT, poll

RANK = """
import sys, time
from pathlib import Path
from lockstep.wire.progress import RunInfo, Progress
folder, number = Path(sys.argv[1]), int(sys.argv[2])
progress = Progress(number, RunInfo(str(folder), 2, 1, False, 60.0), {"LOCKSTEP_NOTE": str(folder / "note")})
progress.alive(1, 1)
exec(compile("def wait(): time.sleep(600)", str(folder / "torch/distributed/collective.py"), "exec"))
while number or not (folder / "meet").exists():
    time.sleep(600 if number else 0.05)  # a process that wakes often may be seen as it computes
wait()
"""
BOUND = 0.4


@pytest.fixture
def two_ranks(tmp_path: Path) -> Iterator[Path]:
    """They sleep between two steps, until there is a file `meet`: then rank 0 waits in a collective."""
    (tmp_path / "train.py").write_text(RANK)
    with ExitStack() as stack:
        for number in range(2):
            command = [PYTHON, str(tmp_path / "train.py"), str(tmp_path), str(number)]
            env = os.environ | {"PYTHONPATH": str(ROOT)}
            child = stack.enter_context(subprocess.Popen(command, env=env, cwd=tmp_path))
            stack.callback(child.kill)
        yield tmp_path


def test_ranks_that_all_do_something_else_do_not_hang_until_one_waits_for_another(
    two_ranks: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hangs, "HANG_SECONDS", BOUND)
    monkeypatch.setattr(hangs, "HANG_LOOK_SECONDS", 0.02)
    watch, calls = hangs.Hangs(two_ranks), [0]

    def ask(*words: object, **options: object) -> dict[int, str]:
        calls[0] += 1
        return progress.stacks(*words, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(hangs, "stacks", ask)

    def look(until: object) -> bool:
        watch.look([0, 1])
        return bool(until())  # type: ignore[operator]

    poll(lambda: look(lambda: calls[0] >= 2), 30, "the second look at their stacks")
    assert hangs.of_run(two_ranks) is None
    (two_ranks / "meet").touch()
    poll(lambda: look(lambda: hangs.of_run(two_ranks)), 30, "the hang")
    output = capfd.readouterr().err
    assert output.count("hang: ") == 1, output
    assert "rank 1 waits (train.py:10 in <module>), and rank 0 waits" in output, output


def test_what_one_of_several_sessions_gets_done_counts_for_the_process(tmp_path: Path) -> None:
    """Sessions take turns: a session that waits for its turn does not hang. The newest session answers."""
    environment = {"LOCKSTEP_NOTE": str(tmp_path / "note")}
    first, second = (
        Progress(0, RunInfo(str(tmp_path / name), 2, 1, False, 60.0), environment) for name in ("one", "two")
    )
    try:
        before = progress.seen(tmp_path, 0)
        first.alive(5, 5)
        after = progress.seen(tmp_path, 0)
        assert before is not None and after is not None and after.done > before.done
        assert after.about.run_dir.endswith("two")
        assert __file__ in progress.stacks(tmp_path, {0: after})[0]
        second.close()
        after_close = progress.seen(tmp_path, 0)
        assert after_close is not None and after_close.about.run_dir.endswith("one") and after_close.steps == 5
        assert __file__ in progress.stacks(tmp_path, {0: after_close})[0]
    finally:
        second.close()
        first.close()
    assert progress.seen(tmp_path, 0) is None


def test_a_line_with_a_time_that_no_clock_has_is_left_out() -> None:
    rank = {"rank": 0, "what": "waits", "where": "", "stacks": "", "loaders": "", "waits": True}
    lines = [{"step": 1, "size": 2, "seconds": 5, "time": at, "ranks": [rank]} for at in (1e20, -1e18, 2.0**62)]
    assert hangs.read_hangs("\n".join(map(json.dumps, lines)).encode()) is None
