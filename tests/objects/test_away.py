"""An outage of the bucket during a run: the training continues, and the bucket has all of it afterwards."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.events import events, weights_digest
from tests.objects.server import Proxy, environment
from tests.objects.test_checkpoints import BOUND, JOB, assert_nothing_else, go, new, start, steps
from tests.objects.test_run_directory import METRICS, UNSENT, assert_shown_alike, attempts, lines
from tests.processes import PYTHON, poll, ranks_of
from tests.ranks import live

pytestmark = pytest.mark.promise("object-stores")


class Away:
    """A fault: from the first PUT with `since` in its path on, no request is answered until `back`."""

    def __init__(self, since: str, how: str = "cut") -> None:
        self.since, self.how = since, how
        self.begun = self.back = False
        self.paths = list[str]()

    def __call__(self, _: int, method: str, path: str) -> str:
        self.begun = self.begun or (method == "PUT" and self.since in path)
        if not self.begun or self.back:
            return ""
        self.paths.append(path)
        return self.how


def await_step(run_dir: Path, step: int) -> None:
    """Waits until the run logs this step."""
    poll(lambda: any(event["step"] == step for event in events(run_dir, "log")), BOUND, f"step {step}")


@pytest.mark.parametrize("how", ["cut", "503"])
def test_it_comes_back_before_the_end(how: str, server: int, proxy: Proxy, expected: str, tmp_path: Path) -> None:
    name = new()
    run_dir, laptop, away = tmp_path / "a" / name, tmp_path / "laptop", Away("step-", how)
    laptop.mkdir()
    proxy.reset(away)
    with start(proxy, run_dir, name, METRICS, PACE="0", WAIT=str(tmp_path / "go")) as gang:
        await_step(run_dir, 9)
        # The first save that is sent may be a later save.
        poll(lambda: len({Path(path).parts[:-1] for path in away.paths}) > 1, BOUND, "a save that was given up")
        away.back = True
        (tmp_path / "go").touch()
        done = gang.wait(BOUND)
    assert done.code == 0 and weights_digest(run_dir) == expected and steps(server, name) == [12, 6], done.output
    assert "a checkpoint is not in the bucket" in done.output and UNSENT not in done.output, done.output
    assert_shown_alike(proxy, run_dir, name, laptop)


def test_it_stays_away_until_the_end(server: int, proxy: Proxy, expected: str, tmp_path: Path) -> None:
    """The next start on this node sends every missing file, and again a file that arrives damaged."""
    name, run_dir, away = new(), tmp_path / "a", Away("step-00000012")
    proxy.reset(away)
    done = go(proxy, run_dir, name)
    assert done.code == 1 and "is not in the bucket" in done.output and weights_digest(run_dir) == expected, done.output
    assert done.output.count(UNSENT) == 1 and "Traceback" not in done.output, done.output
    assert steps(server, name) == [9, 6]
    proxy.reset(lambda _, method, path: "spoiled" if method == "PUT" and "00012/state.safe" in path else "")
    damaged = go(proxy, run_dir, name)
    assert damaged.code == 1 and "is not in the bucket" in damaged.output and steps(server, name) == [9, 6], (
        damaged.output
    )
    proxy.reset()
    before = lines(run_dir)
    again = go(proxy, run_dir, name)
    assert again.code == 0 and steps(server, name) == [12, 6] and weights_digest(run_dir) == expected, again.output
    assert lines(run_dir)[: len(before)] == before
    other_dir = tmp_path / "b"
    assert go(proxy, other_dir, name, STEPS="15").code == 0
    assert attempts(other_dir) == [1, 2, 3, 4] and set(before) <= set(lines(other_dir))
    assert_nothing_else(server, name)


@pytest.mark.promise("survivors")
def test_rank_0_is_lost_meanwhile(server: int, proxy: Proxy, expected: str, tmp_path: Path) -> None:
    """The rank that replaces rank 0 sends the events of both."""
    name, run_dir, away = new(), tmp_path / "run", Away("step-00000006")
    env = {**environment(proxy.port), "SERVER": str(server), "PACE": "0", "WAIT": str(tmp_path / "go")}
    words = ["--ranks", "2", "--max-restarts", "0", "--", PYTHON, JOB, str(run_dir), f"s3://bucket/{name}"]
    proxy.reset(away)
    with live(*words, env=env) as gang:
        poll(lambda: away.begun, BOUND, "the second checkpoint")
        await_step(run_dir, 9)
        os.kill(ranks_of(gang.processes[0].pid)[0], signal.SIGKILL)
        count = len(away.paths)
        (tmp_path / "go").touch()
        poll(lambda: events(run_dir, "rank_lost") and len(away.paths) > count, BOUND, "the rank in its place asks")
        away.back = True
        done = gang.wait(BOUND)
    proxy.reset()
    assert done.code == 0 and "Resuming" not in done.output, done.output
    assert weights_digest(run_dir) == expected and steps(server, name) == [12, 6], done.output
    assert go(proxy, tmp_path / "b", name, STEPS="15").code == 0
    history = lines(tmp_path / "b")
    assert attempts(tmp_path / "b") == [1, 2] and set(lines(run_dir)) <= set(history), history
