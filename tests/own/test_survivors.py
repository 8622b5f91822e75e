"""`launch --live`: ranks are killed, and the others end in the very weights of a run that nobody disturbs. Real processes, real signals."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.events import assert_adds_up
from tests.processes import PYTHON, ROOT, poll, processes, require
from tests.ranks import live
from tests.warm.gang import python
from tests.warm.process import Process

CALLS = """
import json, os, signal, sys, time
import torch, torch.distributed as dist
from lockstep.training.parallel.exchange import reduced
from lockstep.training.parallel.live import Live
from lockstep.training.parallel.world import joined

def called(rank, tries):
    total = torch.tensor([10.0 ** rank])
    dist.all_reduce(total)
    tries.append(1)
    if rank == 2 and len(tries) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and len(tries) == 1:
        raise RuntimeError("[here/gloo/there.cc:1] the answer did not arrive")
    return [total]

with joined() as world:
    told, tries = [], []
    live = world.live = Live(world, 60)
    live.regrouped = lambda lost, joined, seconds: told.append((lost, world.rank, world.size))
    live.ready()
    live.together(lambda: dist.barrier() or [])
    (total,) = live.together(lambda: called(live.rank, tries), changes=True)
    first = float(total)
    total += 1000  # as clipping changes a gradient
    time.sleep(1.5 * (live.rank == 0))  # longer than the new group had to connect
    second = reduced(torch.ones(1), world)
    print(json.dumps([live.rank, first, len(tries), float(second), told]), flush=True)
    live.close()
"""
"""Three ranks sum 1, 10 and 100. One is through with it, one fails behind it, and one is lost then."""
RANKS = 4
JOB = ROOT / "tests/own/survivors_job.py"
BOUND = 400.0
STOPPED_SECONDS = 2
_KILLED = "ended by SIGKILL"


def command(run_dir: Path, kind: str, *words: str, restarts: int = 0, ranks: int = RANKS) -> list[str]:
    """What is written behind `launch --live`."""
    options = ["--ranks", str(ranks), "--lost-seconds", str(STOPPED_SECONDS), "--max-restarts", str(restarts)]
    return [*options, "--", PYTHON, str(JOB), str(run_dir), kind, *words]


def readable(run_dir: Path) -> list[dict[str, Any]]:
    """Its events. A line that a kill has cut off is none."""
    found = []
    with contextlib.suppress(OSError):
        for line in (run_dir / "events.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found


def hashes(run_dir: Path) -> list[tuple[int, str]]:
    """(step, sha256 of the weights) as they were told, in order."""
    return [(event["step"], event["sha256"]) for event in readable(run_dir) if event["event"] == "weights"]


@functools.cache
def undisturbed(kind: str, times: int = 1) -> list[tuple[int, str]]:
    """The hashes of a run of one process, which no launcher has started."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / kind
        done = python(str(JOB), str(run_dir), kind, f"config.times={times}", timeout=BOUND)
        assert done.code == 0, done.output
        return hashes(run_dir)


def ranks_of(launcher: int) -> dict[int, int]:
    """rank → process, of those that live."""
    found = {}
    for pid, state, parent, _ in processes():
        if parent == launcher and state != "Z":
            with contextlib.suppress(OSError):
                told = Path(f"/proc/{pid}/environ").read_bytes()
                told += Path(f"/proc/{pid}/comm").read_bytes()  # of a forked one: tests/warm/launcher.py
                if (match := re.search(rb"(?:^|\0)RANK=(\d+)[\0\n]", told)) is not None:
                    found[int(match[1])] = pid
    return found


def disturb(launcher: Process, run_dir: Path, draw: random.Random, moments: list[tuple[str, int]]) -> list[str]:
    """Loses one rank, or two, after each of these events: (kind, step, or how many of them there are of `rank_joined`). Returns
    what was done."""
    done = []
    for kind, moment in moments:
        number, pause = draw.choice((1, 1, 1, 2)), draw.choice((0.0, 0.001, 0.01, 0.05))
        which = signal.SIGSTOP if draw.random() < 0.2 else signal.SIGKILL
        deadline = time.monotonic() + BOUND
        while launcher.poll() is None and time.monotonic() < deadline:
            told = readable(run_dir)
            ready = any(event["event"] == "weights" and event["step"] > 2 for event in told)
            of_kind = [event for event in told if event["event"] == kind]
            if ready and (
                len(of_kind) >= moment if kind == "rank_joined" else any(e["step"] >= moment for e in of_kind)
            ):
                break
            time.sleep(0.002)
        time.sleep(draw.choice((0.0, 0.0, 0.003, 0.01, 0.03)))
        for _ in range(number):
            living = ranks_of(launcher.pid)
            if len(living) < 2 or launcher.poll() is not None:
                break
            rank = draw.choice(sorted(living))
            with contextlib.suppress(ProcessLookupError):
                os.kill(living[rank], which)  # the process alone: its loader's live on
                done.append(f"{which.name} of rank {rank} at {kind} {moment}")
            time.sleep(pause)
    return done


def check(tmp_path: Path, seed: int, kind: str, replaced: bool = False) -> None:
    """
    Args:
        replaced: lost ranks are replaced, and more are lost as that happens.
    """
    run_dir, draw, times = tmp_path / "run", random.Random(seed), 2 if replaced else 1
    wanted = undisturbed(kind, times)
    if replaced:
        moments = [
            ("weights", draw.randrange(3, 9)),
            *[("rank_joined", number) for number in range(1, draw.choice((2, 3)))],
        ]
    else:
        kinds = ("weights", "weights", "checkpoint", "log")
        moments = sorted((draw.choice(kinds), draw.randrange(1, 40)) for _ in range(draw.choice((1, 1, 2))))
    words = command(run_dir, kind, f"config.times={times}", f"config.joins={replaced}", restarts=20 if replaced else 0)
    with live(*words, cwd=tmp_path) as gang:
        done = disturb(gang.processes[0], run_dir, draw, moments)
        ended = gang.wait(BOUND)
        said = f"{done}\n{ended.output}"
        # A rank that is lost while the first ones end already is a restart.
        assert ended.code == 0 or "others have ended" in ended.output, said
        assert json.loads((run_dir / "status.json").read_text())["code"] == 0, said
        poll(lambda: not below(tmp_path), what=f"the end of every process of {said}")
        assert_adds_up(run_dir)
    assert hashes(run_dir) == wanted, said  # each step once, in order, with these weights
    assert json.loads((run_dir / "summary.json").read_text())["weights_sha256"] == wanted[-1][1], said
    told = readable(run_dir)
    lost = [event for event in told if event["event"] == "rank_lost"]
    joined = [event for event in told if event["event"] == "rank_joined"]
    assert bool(joined) == replaced and all(event["how"] for event in lost), said
    assert replaced or len({event["rank"] for event in lost}) == len(lost), said


def below(folder: Path) -> list[int]:
    """The processes whose current folder it is."""
    found = []
    for pid, state, _, _ in processes():
        with contextlib.suppress(OSError):
            found += [pid] if state != "Z" and os.readlink(f"/proc/{pid}/cwd") == str(folder) else []
    return found


@pytest.mark.promise("survivors")
def test_a_rank_that_has_missed_a_result_gets_it_from_one_that_has_it(tmp_path: Path) -> None:
    require(hasattr(os, "pidfd_open"), "needs Linux")
    with live("--no-prefix", "--ranks", "3", "--max-restarts", "0", "--", PYTHON, "-c", CALLS) as gang:
        done = gang.wait(BOUND)
    assert done.code == 0, done.output
    said = sorted(json.loads(line) for line in done.output.splitlines() if line.startswith(("[0, ", "[1, ")))
    how = {"2": f"{_KILLED}, by hand or because the memory was used up"}
    assert said == [[0, 111.0, 1, 2.0, [[how, 0, 2]]], [1, 111.0, 1, 2.0, [[how, 1, 2]]]], done.output


@pytest.mark.promise("survivors")
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("summed", "run.sum() after rank 2 was lost (ended by SIGKILL"),
        ("changed", "a Tensor that run.step(function, …) was called with is nothing that run.batches() or run.part() has given"),
    ],
)  # fmt: skip
def test_what_cannot_be_taken_again_is_a_restart_with_a_reason(kind: str, why: str, tmp_path: Path) -> None:
    require(hasattr(os, "pidfd_open"), "needs Linux")
    alone = python(str(JOB), str(tmp_path / "alone"), kind, timeout=BOUND)
    with live(*command(tmp_path / "live", kind, restarts=2, ranks=3)) as gang:
        done = gang.wait(BOUND)
    assert alone.code == done.code == 0, alone.output + done.output
    assert why in done.output and "all ranks start again" in done.output, done.output
    expected, found = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("alone", "live"))
    assert (found["weights_sha256"], found["restarts"]) == (expected["weights_sha256"], 1)


@pytest.mark.promise("survivors", "bad-input")
@pytest.mark.parametrize(
    ("kind", "word", "why"),
    [
        ("part", "sync.name=flat", "launch --live needs sync.name=exact, under which any ranks compute the same, and this run has flat"),
        ("of_rank", "seed=0", "launch --live cannot go on without what a rank alone keeps, and keep_of_rank() has loader"),
    ],
)  # fmt: skip
def test_a_run_that_could_not_go_on_is_refused(kind: str, word: str, why: str, tmp_path: Path) -> None:
    words = (word, "sync.options={}") if "flat" in word else (word,)
    with live(*command(tmp_path / "run", kind, *words, ranks=2)) as gang:
        done = gang.wait(BOUND)
    assert done.code == 2 and done.output.count(why) == 1 and "Traceback" not in done.output, done.output


@pytest.mark.promise("survivors")
def test_a_signal_after_a_loss_saves_and_the_run_resumes(tmp_path: Path) -> None:
    require(hasattr(os, "pidfd_open"), "needs Linux")
    run_dir, wanted = tmp_path / "run", undisturbed("part")
    with live(*command(run_dir, "part", "config.hold=30")) as gang:
        poll(lambda: len(hashes(run_dir)) >= 5 or gang.processes[0].poll() is not None, BOUND, "the fifth step")
        os.kill(ranks_of(gang.processes[0].pid)[0], signal.SIGKILL)
        poll((run_dir / "held").exists, BOUND, "the step at which the last rank waits for a signal")
        gang.send_signal(signal.SIGTERM)
        done = gang.wait(BOUND)
    assert done.code == 75, done.output
    with live(*command(run_dir, "part", "config.hold=30")) as gang:
        done = gang.wait(BOUND)
    assert done.code == 0 and "Resuming at step" in done.output, done.output
    assert hashes(run_dir) == wanted


KINDS = ("net", "net", "gan", "net", "part")


@pytest.mark.promise("survivors")
@pytest.mark.parametrize("seed", [0, 2, 4])
def test_any_rank_may_be_lost_at_any_moment(seed: int, tmp_path: Path) -> None:
    require(hasattr(os, "pidfd_open"), "needs Linux")
    check(tmp_path, seed, KINDS[seed % 5])


@pytest.mark.promise("survivors")
@pytest.mark.parametrize("seed", [2])
def test_a_lost_rank_is_replaced(seed: int, tmp_path: Path) -> None:
    require(hasattr(os, "pidfd_open"), "needs Linux")
    check(tmp_path, seed, KINDS[seed % 5], replaced=True)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1, 3, *range(10, 70)])
def test_many_seeds(seed: int, tmp_path: Path) -> None:
    check(tmp_path, seed, KINDS[seed % 5], replaced=seed % 4 == 3)
