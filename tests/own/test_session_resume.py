"""A loop of one's own that was killed, or signalled, goes on to the same bits."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lockstep.training.checkpoint import store
from lockstep.training.sync import STRATEGIES
from tests.events import events
from tests.own.job import OwnJob, assert_same
from tests.processes import poll

ALONE = ("data_parallel",)
OPTIONS = {"powersgd": ["sync.options={rank: 1, start: 3}"]}
Calm = Callable[..., OwnJob]


def job(folder: Path, sync: str, ranks: int, kind: str, **variables: str) -> OwnJob:
    return OwnJob(folder, ranks, kind, f"sync.name={sync}", *OPTIONS.get(sync, ()), **variables)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    @functools.cache
    def undisturbed(sync: str, ranks: int, kind: str, **variables: str) -> OwnJob:
        found = job(tmp_path_factory.mktemp("calm"), sync, ranks, kind, **variables)
        done = found.go()
        assert done.code == 0 and "the script goes on after the run" in done.output, done.output
        return found

    return undisturbed


def _kill(number: int) -> tuple[str, int, str, int, str]:
    """Scenario: (strategy, ranks, kind of loop, workers, fate)."""
    draw = random.Random(number)
    sync = sorted(STRATEGIES)[number % len(STRATEGIES)]
    ranks = 1 if sync in ALONE else draw.choice([1, 2, 2, 2, 3])
    kind = draw.choice(["batches", "batches", "loader", "part"])
    fate = f"{draw.randrange(ranks)}:{draw.randrange(2, 24)}:KILL"
    return sync, ranks, kind, draw.choice([0, 0, 0, 1, 2]), fate


SCENARIOS = [_kill(number) for number in range(int(os.environ.get("LOCKSTEP_SCENARIOS", "10")))]


@pytest.mark.parametrize(("sync", "ranks", "kind", "workers", "fate"), SCENARIOS, ids=str)
def test_killed_anywhere_it_goes_on_to_the_same_bits(
    calm: Calm, tmp_path: Path, sync: str, ranks: int, kind: str, workers: int, fate: str
) -> None:
    disturbed = job(tmp_path / "run", sync, ranks, kind)
    died = disturbed.go(LOCKSTEP_TEST_FATE=fate, LOOP_WORKERS=str(workers))
    assert died.code != 0, died.output
    saved = store.candidates(disturbed.run_dir / "checkpoints")
    assert saved or int(fate.split(":")[1]) <= 10, "the one after step 2 is on the disk by step 10"
    # What a loader of torch's own draws for a sample depends on the number of its workers; with `batches` it does not.
    again = workers if kind == "loader" else (workers + 1) % 3
    done = disturbed.go(LOOP_WORKERS=str(again))
    assert done.code == 0 and ("Resuming at step" in done.output) == bool(saved), done.output
    assert_same(disturbed, calm(sync, ranks, kind, **({"LOOP_WORKERS": str(workers)} if kind == "loader" else {})))


@pytest.mark.parametrize("sync", ["ddp", "zero1"])
def test_all_ranks_are_killed_at_once(calm: Calm, tmp_path: Path, sync: str) -> None:
    """As by a machine that goes out."""
    disturbed = job(tmp_path / "run", sync, 2, "batches")
    held = tmp_path / "held"
    with disturbed.started(LOCKSTEP_TEST_FATE="0:13:HOLD", LOCKSTEP_TEST_HELD=str(held)) as gang:
        poll(held.exists, 60, "rank 0 in its thirteenth pass")
        poll((tmp_path / "run/checkpoints/step-00000010/manifest.json").exists, 60, "a checkpoint")
        gang.send_signal(signal.SIGKILL)
        assert gang.wait(30).code == 1
    done = disturbed.go()
    assert done.code == 0 and "Resuming at step 1" in done.output, done.output
    assert_same(disturbed, calm(sync, 2, "batches"))


def test_a_loader_with_a_place_of_its_own_goes_on_there(calm: Calm, tmp_path: Path) -> None:
    """Nothing is skipped a second time."""
    disturbed = job(tmp_path / "run", "flat", 2, "cursor")
    assert disturbed.go(LOCKSTEP_TEST_FATE="1:13:KILL").code != 0
    done = disturbed.go()
    assert done.code == 0 and "Resuming at step 1" in done.output, done.output
    assert_same(disturbed, calm("flat", 2, "cursor"))


@pytest.mark.parametrize("sync", ["flat", "zero1", "fsdp"])
def test_it_goes_on_with_another_number_of_ranks(tmp_path: Path, sync: str) -> None:
    """The optimizer's momentum comes along: weights as without a break, but for the order of additions."""
    exact = {"LOOP_EXACT": "1", "LOOP_BATCH": "41"}
    undisturbed, resized = (job(tmp_path / name, sync, 2, "batches", **exact) for name in ("calm", "run"))
    assert undisturbed.go().code == 0
    assert resized.go(LOCKSTEP_TEST_FATE="1:9:TERM").code == 75
    resized.ranks = 3
    done = resized.go()
    assert done.code == 0 and "Resuming at step" in done.output, done.output
    before, after = (one.leaves() for one in (undisturbed, resized))
    names = [name for name in before if name.startswith(("/shared/model/", "/shared/optimizer/state/"))]
    assert len(names) > 10
    for name in names:
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("kind", ["batches", "part"])
def test_a_signal_to_one_rank_ends_all_saved(calm: Calm, tmp_path: Path, kind: str, number: signal.Signals) -> None:
    disturbed = job(tmp_path / "run", "flat", 2, kind)
    left = disturbed.go(LOCKSTEP_TEST_FATE=f"1:13:{number.name[3:]}")
    assert left.code == 75, left.output
    assert "the script goes on" not in left.output
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert status["code"] == 75 and status["step"] >= 13
    done = disturbed.go()
    assert done.code == 0 and f"Resuming at step {status['step']}" in done.output, done.output
    assert_same(disturbed, calm("flat", 2, kind))


def test_a_signal_during_an_evaluation(calm: Calm, tmp_path: Path) -> None:
    """What the evaluation draws, it draws again."""
    disturbed = job(tmp_path / "run", "flat", 2, "batches")
    left = disturbed.go(LOCKSTEP_TEST_FATE="1:-1:TERM")
    assert left.code == 75, left.output
    done = disturbed.go()
    assert done.code == 0 and "Resuming at step" in done.output, done.output
    assert_same(disturbed, calm("flat", 2, "batches"))


@pytest.mark.parametrize("kind", ["batches", "loader"])
def test_a_signal_to_every_process_of_the_job(calm: Calm, tmp_path: Path, kind: str) -> None:
    """As a cluster sends it: the processes of a loader get it too, and must not take their rank along."""
    disturbed = job(tmp_path / "run", "flat", 2, kind, LOOP_WORKERS="2")
    with disturbed.started(LOCKSTEP_TEST_FATE="1:11:DELAY") as gang:
        poll((tmp_path / "run/checkpoints/step-00000010/manifest.json").exists, 60, "a checkpoint")
        pids = gang.pids()
        assert len(pids) >= 6
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        left = gang.wait(60)
    assert left.code == 75, left.output
    assert disturbed.go().code == 0
    assert_same(disturbed, calm("flat", 2, kind, LOOP_WORKERS="2"))


def test_two_optimizers_micro_batches_and_clipping(calm: Calm, tmp_path: Path) -> None:
    disturbed = job(tmp_path / "run", "flat", 2, "batches", LOOP_HARD="1")
    assert disturbed.go(LOCKSTEP_TEST_FATE="0:21:KILL").code != 0
    done = disturbed.go()
    assert done.code == 0 and "Resuming at step" in done.output, done.output
    assert_same(disturbed, calm("flat", 2, "batches", LOOP_HARD="1"))


def test_a_run_that_is_complete_trains_no_more(calm: Calm) -> None:
    complete = calm("ddp", 2, "batches")
    before = complete.leaves()
    done = complete.go()
    assert done.code == 0 and "The run is complete: 3 epochs" in done.output, done.output
    assert complete.leaves().keys() == before.keys()
    assert len(events(complete.run_dir, "epoch")) == 3


def test_a_gradient_that_is_not_finite_moves_no_weight(tmp_path: Path) -> None:
    stopped = job(tmp_path / "stop", "flat", 2, "batches")
    done = stopped.go(LOCKSTEP_TEST_FATE="1:9:NANINPUT")
    assert done.code == 1 and "the run diverged at step 9: rank 1: loss is not finite" in done.output, done.output
    assert json.loads((tmp_path / "stop/status.json").read_text())["code"] == 1
    skipped = OwnJob(tmp_path / "skip", 2, "batches", "sync.name=flat", "nonfinite=skip")
    done = skipped.go(LOCKSTEP_TEST_FATE="1:9:NANINPUT")
    assert done.code == 0 and "left out step 9: rank 1: loss is not finite" in done.output, done.output
    weights = {name: value for name, value in skipped.leaves().items() if "generators" not in name}
    assert all(bool(torch.isfinite(value).all()) for value in weights.values() if value.is_floating_point())


def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    died = OwnJob(tmp_path / "run", 2, "batches", "collective_timeout=5", grace=2)
    done = died.go(LOCKSTEP_TEST_FATE="1:9:STOP")
    assert done.code == 1 and "rank 1 did not arrive (last seen at step" in done.output, done.output


def test_an_error_of_the_scripts_own_keeps_its_traceback(tmp_path: Path) -> None:
    failed = OwnJob(tmp_path / "run", 1, "batches")
    done = failed.go(LOCKSTEP_TEST_FATE="0:9:RAISE")
    assert done.code == 1 and "ArithmeticError: this rank was told to fail" in done.output, done.output
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert status["code"] == 1 and "ArithmeticError" in status["reason"]
