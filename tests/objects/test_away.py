"""An outage of the bucket in the middle of a run: the training continues, and the bucket has all of it afterwards."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.events import events
from tests.objects.server import Proxy, environment
from tests.objects.test_checkpoints import BOUND, JOB, assert_nothing_else, ended, go, new, start, steps
from tests.objects.test_run_directory import METRICS, UNSENT, assert_shown_alike, attempts, lines
from tests.own.test_survivors import ranks_of
from tests.processes import PYTHON, poll
from tests.ranks import live

pytestmark = pytest.mark.promise("object-stores")


class Away:
    """A fault: from the first request with this in its path on, none is answered, until it is `back`."""

    def __init__(self, since: str, how: str = "cut") -> None:
        self.since, self.how = since, how
        self.begun = self.back = False
        self.asked = list[str]()

    def __call__(self, _: int, method: str, path: str) -> str:
        self.begun = self.begun or (method == "PUT" and self.since in path)
        if not self.begun or self.back:
            return ""
        self.asked.append(path)
        return self.how


def trained(run_dir: Path, step: int) -> None:
    """Waits until it has got there."""
    poll(lambda: any(event["step"] == step for event in events(run_dir, "log")), BOUND, f"step {step}")


@pytest.mark.parametrize("how", ["cut", "503"])
def test_it_comes_back_before_the_end(how: str, server: int, proxy: Proxy, expected: str, tmp_path: Path) -> None:
    name = new()
    run_dir, laptop, away = tmp_path / "a" / name, tmp_path / "laptop", Away("step-", how)
    laptop.mkdir()
    proxy.reset(away)
    with start(proxy, run_dir, name, METRICS, PACE="0", WAIT=str(tmp_path / "go")) as gang:
        trained(run_dir, 9)
        # The first save that is sent need not be the first one that is made.
        poll(lambda: len({Path(path).parts[:-1] for path in away.asked}) > 1, BOUND, "a save that was given up")
        away.back = True
        (tmp_path / "go").touch()
        done = gang.wait(BOUND)
    assert done.code == 0 and ended(run_dir) == expected and steps(server, name) == [12, 6], done.output
    assert "a checkpoint is not in the bucket" in done.output and UNSENT not in done.output, done.output
    assert_shown_alike(proxy, run_dir, name, laptop)


def test_it_stays_away_until_the_end(server: int, proxy: Proxy, expected: str, tmp_path: Path) -> None:
    """The next start on this node sends all that is missing."""
    name, run_dir, away = new(), tmp_path / "a", Away("step-00000012")
    proxy.reset(away)
    done = go(proxy, run_dir, name)
    assert done.code == 1 and "is not in the bucket" in done.output and ended(run_dir) == expected, done.output
    assert done.output.count(UNSENT) == 1 and "Traceback" not in done.output, done.output
    assert steps(server, name) == [9, 6]
    proxy.reset()
    before = lines(run_dir)
    again = go(proxy, run_dir, name)
    assert again.code == 0 and steps(server, name) == [12, 6] and ended(run_dir) == expected, again.output
    assert lines(run_dir)[: len(before)] == before
    other = tmp_path / "b"
    assert go(proxy, other, name, STEPS="15").code == 0
    assert attempts(other) == [1, 2, 3] and set(before) <= set(lines(other))
    assert_nothing_else(server, name)


@pytest.mark.promise("survivors")
def test_rank_0_is_lost_meanwhile(server: int, proxy: Proxy, expected: str, tmp_path: Path) -> None:
    """The rank in its place sends what both have written down."""
    name, run_dir, away = new(), tmp_path / "run", Away("step-00000006")
    env = {**environment(proxy.port), "SERVER": str(server), "PACE": "0", "WAIT": str(tmp_path / "go")}
    words = ["--ranks", "2", "--max-restarts", "0", "--", PYTHON, JOB, str(run_dir), f"s3://bucket/{name}"]
    proxy.reset(away)
    with live(*words, env=env) as gang:
        poll(lambda: away.begun, BOUND, "the second checkpoint")
        trained(run_dir, 9)
        os.kill(ranks_of(gang.processes[0].pid)[0], signal.SIGKILL)
        asked = len(away.asked)
        (tmp_path / "go").touch()
        poll(lambda: events(run_dir, "rank_lost") and len(away.asked) > asked, BOUND, "the rank in its place asks")
        away.back = True
        done = gang.wait(BOUND)
    proxy.reset()
    assert done.code == 0 and "Resuming" not in done.output, done.output
    assert ended(run_dir) == expected and steps(server, name) == [12, 6], done.output
    assert go(proxy, tmp_path / "b", name, STEPS="15").code == 0
    found = lines(tmp_path / "b")
    assert attempts(tmp_path / "b") == [1, 2] and set(lines(run_dir)) <= set(found), found
