"""`launch --live`: ranks are killed, and the others end in the very weights of an undisturbed run. Real processes, real signals."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import product
from tests.events import assert_adds_up, status_of, summary_of, weights_digest
from tests.processes import PYTHON, ROOT, assert_none_inside, poll, ranks_of
from tests.ranks import live
from tests.warm.gang import python
from tests.warm.process import Process

pytestmark = pytest.mark.promise("survivors")

CALLS = """
import json, os, signal, sys, time
import torch, torch.distributed as dist
from lockstep.training.parallel.exchange import all_reduce
from lockstep.training.parallel.live import Live
from lockstep.training.parallel.world import joined

def called(rank, tries):
    total = torch.tensor([10.0 ** rank])
    dist.all_reduce(total)
    tries.append(1)
    if rank == 2 and len(tries) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and len(tries) == 1:
        raise dist.DistBackendError("the answer did not arrive")
    return [total]

opened = dist.init_process_group
def failing(*words, **named):
    dist.init_process_group = opened
    dist.distributed_c10d._world.group_count += 2  # as two connections that fail leave torch
    raise RuntimeError("connect timeout")

with joined() as world:
    regroups, tries = [], []
    if world.rank == 1:
        dist.init_process_group = failing
    live = world.live = Live(world, 60)
    live.regrouped = lambda lost, joined, seconds: regroups.append((lost, world.rank, world.size))
    live.ready()
    live.retryable(lambda: dist.barrier() or [])
    (total,) = live.retryable(lambda: called(live.rank, tries), changes=True)
    first = float(total)
    total += 1000  # as clipping changes a gradient
    time.sleep(1.5 * (live.rank == 0))  # longer than the new group had to connect
    second = all_reduce(torch.ones(1), world)
    line = json.dumps([live.rank, first, len(tries), float(second), regroups])
    os.write(1, f"{line}\\n".encode())  # in one piece: print may write the end of the line by itself
    live.close()
"""
"""Three ranks sum 1, 10 and 100. Rank 0 has the sum, rank 1 fails after it, and rank 2 is killed. Rank 1 also fails to join the new group
at once."""
RANKS = 4
JOB = ROOT / "tests/own/survivors_job.py"
BOUND = 400.0
AGAIN = "again"
UNHEARD_SECONDS = 6.0
"""After this time the ranks report no loss: the process had not joined them yet."""
_KILLED = "ended by SIGKILL"


def command(run_dir: Path, kind: str, *words: str, restarts: int = 0, ranks: int = RANKS) -> list[str]:
    """Returns the arguments after `launch --live`."""
    options = ["--ranks", str(ranks), "--max-restarts", str(restarts)]
    return [*options, "--", PYTHON, str(JOB), str(run_dir), kind, *words]


def readable(run_dir: Path, newest: int | None = None) -> list[dict[str, Any]]:
    """Returns the run's events, or those in its last `newest` bytes. Skips a line that a kill has cut off."""
    events = []
    with contextlib.suppress(OSError), (run_dir / "events.jsonl").open("rb") as file:
        if newest is not None:
            file.seek(max(file.seek(0, os.SEEK_END) - newest, 0))
        for line in file.read().splitlines():
            with contextlib.suppress(ValueError):
                events.append(json.loads(line))
    return events


def hashes(run_dir: Path) -> list[tuple[int, str]]:
    """Returns (step, sha256 of the weights) of the events, in order."""
    return [(event["step"], event["sha256"]) for event in readable(run_dir) if event["event"] == "weights"]


@functools.cache
def undisturbed(kind: str, times: int = 1) -> list[tuple[int, str]]:
    """Returns the hashes of a run of one process without a launcher."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / kind
        done = python(str(JOB), str(run_dir), kind, f"config.times={times}", timeout=2 * BOUND)
        assert done.code == 0, done.output
        return hashes(run_dir)


def disturb(launcher: Process, run_dir: Path, draw: random.Random, moments: list[tuple[str, int]]) -> list[str]:
    """Signals one rank or two after each moment: (kind of event, its step, or the count for `rank_joined`). Returns the signals.

    `AGAIN` as a kind: waits for three ranks, and then for the next event of a kind that is drawn.
    """
    signals: list[str] = []
    lost_at, ranks = 0.0, RANKS
    for kind, moment in moments:
        number, pause = draw.choice((1, 1, 1, 2)), draw.choice((0.0, 0.001, 0.01, 0.05))
        which = signal.SIGTERM if int(10 * draw.random()) == 9 else signal.SIGKILL
        # SIGTERM to so many ranks that the others cannot continue saves and ends the run.
        number = 1 if which == signal.SIGTERM else number
        after = draw.choice(("weights", "evaluation", "checkpoint", "log", "regrouped")) if kind == AGAIN else kind
        waited_from: float | None = None
        deadline = time.monotonic() + BOUND
        while launcher.poll() is None and time.monotonic() < deadline:
            events = readable(run_dir, 1 << 14 if kind == AGAIN else None)
            ready = any(event["event"] == "weights" and event["step"] > 2 for event in events)
            last_of_epoch = [event for event in events if event["event"] == "weights" and not event["step"] % 16]
            of_kind = last_of_epoch if after == "evaluation" else [event for event in events if event["event"] == after]
            if kind == AGAIN:
                for event in events:
                    ranks = event["world_size"] if event["event"] in ("start", "regrouped") else ranks
                heard = any(event["event"] == "regrouped" and event["time"] > lost_at for event in events)
                if waited_from is None and ready and ranks > 2 and (heard or time.time() - lost_at > UNHEARD_SECONDS):
                    waited_from = time.time()
                if waited_from is not None and (
                    any(event["time"] > waited_from for event in of_kind) or time.time() - waited_from > UNHEARD_SECONDS
                ):
                    break
            elif ready and (
                len(of_kind) >= moment if kind == "rank_joined" else any(e["step"] >= moment for e in of_kind)
            ):
                break
            time.sleep(0.01 if kind == AGAIN else 0.002)
        time.sleep(draw.choice((0.0, 0.0, 0.003, 0.01, 0.03)))
        for _ in range(number):
            living = ranks_of(launcher.pid)
            if len(living) < (2 if which != signal.SIGTERM else RANKS) or launcher.poll() is not None:
                break
            rank = draw.choice(sorted(living))
            with contextlib.suppress(ProcessLookupError):
                os.kill(living[rank], which)  # the process alone: its loader's live on
                signals.append(f"{which.name} of rank {rank} at {after} {moment}")
            time.sleep(pause)
        lost_at = time.time()
    return signals


def check(tmp_path: Path, seed: int, kind: str, replaced: bool = False, losses: int = 0) -> None:
    """
    Args:
        replaced: The launcher replaces lost ranks, and more ranks are lost meanwhile.
        losses: Number of losses in a long run, whose steps are slow until the last one.
    """
    run_dir, draw, times = tmp_path / "run", random.Random(seed), 2 if replaced else 1
    slow = tmp_path / "slow"
    if losses:
        times, moments = losses // 2, [(AGAIN, number) for number in range(losses)]
        slow.touch()
    elif replaced:
        moments = [
            ("weights", draw.randrange(3, 9)),
            *[("rank_joined", number) for number in range(1, draw.choice((2, 3)))],
        ]
    else:
        kinds = ("weights", "weights", "checkpoint", "log")
        moments = sorted((draw.choice(kinds), draw.randrange(1, 40)) for _ in range(draw.choice((1, 1, 2))))
    expected = undisturbed(kind, times)
    options = [f"config.times={times}", f"config.joins={replaced}"]
    words = command(run_dir, kind, *options, restarts=20 * max(losses, replaced))
    with live(*words, cwd=tmp_path) as gang:
        signals = disturb(gang.processes[0], run_dir, draw, moments)
        slow.unlink(missing_ok=True)
        ended = gang.wait(BOUND)
        report = f"{signals}\n{ended.output}"
        # A rank that is lost while others are ending causes a restart.
        assert ended.code == 0 or "others have ended" in ended.output, report
        assert status_of(run_dir)["code"] == 0, report
        assert_none_inside(tmp_path)
        # A rank 0 that is lost takes the time since its last line with it, until another rank is 0: 0.2 s or more, of a run of 3 s.
        assert_adds_up(run_dir, unknown=0.15)
    assert hashes(run_dir) == expected, report  # each step once, in order, with these weights
    assert weights_digest(run_dir) == expected[-1][1], report
    events = readable(run_dir)
    lost = [event for event in events if event["event"] == "rank_lost"]
    joined = [event for event in events if event["event"] == "rank_joined"]
    assert signals and (lost or "others have ended" in ended.output), report
    assert bool(joined) == (replaced or losses > 0) and all(event["how"] for event in lost), report
    assert joined or len({event["rank"] for event in lost}) == len(lost), report
    assert len(signals) >= losses and len(lost) >= losses // 2, report


def test_a_rank_that_has_missed_a_result_gets_it_from_one_that_has_it(tmp_path: Path) -> None:
    with live("--no-prefix", "--ranks", "3", "--max-restarts", "0", "--", PYTHON, "-c", CALLS) as gang:
        done = gang.wait(BOUND)
    assert done.code == 0, done.output
    reports = sorted(json.loads(line) for line in done.output.splitlines() if line.startswith(("[0, ", "[1, ")))
    how = {"2": f"{_KILLED}, by hand or because the memory was used up"}
    assert reports == [[0, 111.0, 1, 2.0, [[how, 0, 2]]], [1, 111.0, 1, 2.0, [[how, 1, 2]]]], done.output


@pytest.mark.parametrize(
    ("kind", "ranks", "why"),
    [
        ("summed", 2, "run.sum() after rank 1 was lost (ended by SIGKILL"),
        ("grouped", 2, "and a collective of the script's own needs it"),
        ("changed", 3, "a Tensor that run.step(function, …) was called with is nothing that run.batches() or run.part() has given"),
    ],
)  # fmt: skip
def test_what_cannot_be_taken_again_is_one_restart_with_a_reason(
    kind: str, ranks: int, why: str, tmp_path: Path
) -> None:
    alone = python(str(JOB), str(tmp_path / "alone"), kind, timeout=BOUND)
    words = command(tmp_path / "live", kind, f"config.victim={ranks - 1}", restarts=1, ranks=ranks)
    with live(*words) as gang:
        done = gang.wait(BOUND)
    assert alone.code == done.code == 0, alone.output + done.output
    assert why in done.output and "Traceback" not in done.output, done.output
    assert "launch: all ranks start again; restarts left after that: 0" in done.output, done.output
    expected, summary = (summary_of(tmp_path / name) for name in ("alone", "live"))
    assert (summary["weights_sha256"], summary["restarts"]) == (expected["weights_sha256"], 1)


@pytest.mark.promise("bad-input")
@pytest.mark.parametrize(
    ("kind", "word", "why"),
    [
        ("part", "sync.name=flat", "--live needs sync.name=exact, under which any ranks compute the same, and this run has flat"),
        ("of_rank", "seed=0", "--live cannot continue without a lost rank's state, and keep_of_rank() has loader"),
    ],
)  # fmt: skip
def test_a_run_that_could_not_continue_is_refused(kind: str, word: str, why: str, tmp_path: Path) -> None:
    words = (word, "sync.options={}") if "flat" in word else (word,)
    with live(*command(tmp_path / "run", kind, *words, ranks=2)) as gang:
        done = gang.wait(BOUND)
    assert done.code == 2 and done.output.count(why) == 1 and "Traceback" not in done.output, done.output


def test_a_signal_to_one_rank_has_it_replaced_and_one_to_the_launcher_saves_the_run(tmp_path: Path) -> None:
    """Rank 0 gets a signal, and is replaced. Rank 1 is killed, and is not. The launcher gets a signal: the others save, and the run
    resumes to the same weights."""
    run_dir, slow, expected = tmp_path / "run", tmp_path / "slow", undisturbed("net")
    slow.touch()
    with live(*command(run_dir, "net", restarts=1)) as gang:
        launcher = gang.processes[0]

        def events_of(kind: str) -> list[dict[str, Any]]:
            return [event for event in readable(run_dir) if event["event"] == kind]

        poll(lambda: events_of("weights") or launcher.poll() is not None, BOUND, "the first step")
        os.kill(ranks_of(launcher.pid)[0], signal.SIGTERM)
        poll(lambda: events_of("rank_joined") or launcher.poll() is not None, BOUND, "the replacement")
        os.kill(ranks_of(launcher.pid)[1], signal.SIGKILL)
        poll(lambda: len(events_of("rank_lost")) == 2 or launcher.poll() is not None, BOUND, "the second loss")
        gang.send_signal(signal.SIGTERM)
        done = gang.wait(BOUND)
    assert done.code == 75 and "rank 0 was told to leave by SIGTERM: 3 of 4 ranks continue" in done.output, done.output
    (left, killed), (joined,) = events_of("rank_lost"), events_of("rank_joined")
    assert (left["rank"], left["how"], killed["rank"], joined["rank"]) == (0, "told to leave by SIGTERM", 1, 0)
    slow.unlink()
    with live(*command(run_dir, "net")) as gang:
        done = gang.wait(BOUND)
    assert done.code == 0 and "Resuming at step" in done.output, done.output
    assert hashes(run_dir) == expected


def test_a_script_may_have_several_sessions(tmp_path: Path) -> None:
    """After a loss in the first Session all ranks start again, as the second would wait for the lost rank. A loss in the second is
    survived; no replacement joins it."""
    alone = python(str(JOB), str(tmp_path / "alone"), "twice", timeout=BOUND)
    assert alone.code == 0, alone.output
    for lose in ("one", "two"):
        with live(*command(tmp_path / f"lose-{lose}", "twice", f"config.lose={lose}", restarts=1, ranks=3)) as gang:
            done = gang.wait(BOUND)
        assert done.code == 0, done.output
        for name in ("one", "two"):
            ends = [summary_of(tmp_path / how / name) for how in ("alone", f"lose-{lose}")]
            assert ends[0]["weights_sha256"] == ends[1]["weights_sha256"], name
        assert ("ranks were lost in an earlier Session of this script" in done.output) == (lose == "one"), done.output
        assert ("all ranks start again" in done.output) == (lose == "one"), done.output
        assert not [event for event in readable(tmp_path / f"lose-{lose}/two") if event["event"] == "rank_joined"]


def test_a_step_that_is_thrown_away_has_left_no_trace(tmp_path: Path) -> None:
    """Rank 2 is lost in the fourth step. The checkpoint after that step equals, value by value, that of a run without a loss."""
    checkpoints = []
    for lose in ("false", "true"):
        run_dir = tmp_path / lose / "run"
        run_dir.parent.mkdir()
        with live(*command(run_dir, "thrown", f"config.lose={lose}", "checkpoint.keep=9", ranks=3)) as gang:
            done = gang.wait(BOUND)
        assert done.code == 0 and ("Rank 2 was lost after step 3" in done.output) == (lose == "true"), done.output
        checkpoints.append(product.checkpoint(run_dir / "checkpoints/step-00000004"))
    (shared, ranks), (again_shared, again_ranks) = ((tree["shared"], tree["ranks"]) for tree in checkpoints)
    for kept in (shared["kept"], again_shared["kept"]):
        del kept["variables"]  # of the script, which counts its calls
    for name in ("model", "average", "optimizer", "cursor", "kept"):  # in the last: the loss scale
        assert_equal(again_shared[name], shared[name], name)
    for number in (0, 1):
        for name in ("buffers", "average_buffers", "rng", "losses", "kept"):
            assert_equal(again_ranks[number][name], ranks[number][name], f"{name} of rank {number}")


def assert_equal(left: Any, right: Any, place: str) -> None:
    if isinstance(left, dict) and isinstance(right, dict):
        assert left.keys() == right.keys(), place
        for key in left:
            assert_equal(left[key], right[key], f"{place}.{key}")
    elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        assert len(left) == len(right), place
        for number, (a, b) in enumerate(zip(left, right)):
            assert_equal(a, b, f"{place}.{number}")
    else:
        assert torch.equal(left, right) if isinstance(left, torch.Tensor) else bool(np.all(left == right)), place


KINDS = ("net", "float16", "gan", "net", "part")


@pytest.mark.parametrize("seed", [0, 1, 4])
def test_any_rank_may_be_lost_at_any_moment(seed: int, tmp_path: Path) -> None:
    check(tmp_path, seed, KINDS[seed % 5])


@pytest.mark.parametrize("seed", [2])
def test_a_lost_rank_is_replaced(seed: int, tmp_path: Path) -> None:
    check(tmp_path, seed, KINDS[seed % 5], replaced=True)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 105))
def test_two_hundred_losses(seed: int, tmp_path: Path) -> None:
    check(tmp_path, seed, KINDS[seed % 5], losses=40)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [2, 3, *range(10, 70)])
def test_many_seeds(seed: int, tmp_path: Path) -> None:
    check(tmp_path, seed, KINDS[seed % 5], replaced=seed % 4 == 3)
