"""A rank stops, dies or fails while the others wait for it in NCCL: that rank is named, and nothing stands still."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests import product
from tests.gpu_rehearsal.rehearsal import rehearsing, settings
from tests.processes import poll

pytestmark = pytest.mark.promise("gpu-standin")

TIMEOUT = 25


def _words(folder: Path, data_root: Path, model: str) -> list[str]:
    changes = {"model": model, "collective_timeout": TIMEOUT, "evaluate__every": 100, "checkpoint__every_steps": 2}
    return ["run", "smoke", "--run-dir", str(folder / "run"), *settings(data_root, **changes)]


@pytest.mark.parametrize("fate", ["STOP", "KILL", "RAISE"])
def test_a_rank_that_nccl_waits_for_holds_none_up(tmp_path: Path, data_root: Path, fate: str) -> None:
    """torch's watchdog aborts the waiting rank. By then the watcher of hangs has named a rank that stands still."""
    words = _words(tmp_path, data_root, "tests.nets:DyingPlain")
    with rehearsing(tmp_path, words, LOCKSTEP_TEST_FATE=f"1:5:{fate}") as gang:
        poll(lambda: gang.ranks[0].code is not None, TIMEOUT + 60, "the end of rank 0")
    assert gang.ranks[0].code == -signal.SIGABRT, gang.output
    lines = [line for line in gang.output.splitlines() if line.startswith("hang: ") and "rank 1 " in line]
    assert lines or fate != "STOP", gang.output


def test_a_rank_that_fails_does_not_wait_for_the_sums_it_has_begun(tmp_path: Path, data_root: Path) -> None:
    """The sums wait for a rank that does not come. Without an abort rank 1 stays for the whole `collective_timeout`."""
    held = tmp_path / "held"
    held.touch()
    changes = {"model": "tests.gpu_rehearsal.nets:Unfinished", "sync__name": product.HOOKS, "collective_timeout": 600}
    words = ["run", "smoke", "--run-dir", str(tmp_path / "run"), *settings(data_root, **changes)]
    with rehearsing(tmp_path, words, LOCKSTEP_TEST_FATE="0:5:WAIT", LOCKSTEP_TEST_HELD=str(held)) as gang:
        poll(lambda: gang.ranks[1].code is not None, 240, "the end of rank 1")
        assert gang.ranks[0].code is None, gang.output
    assert gang.ranks[1].code == 1, gang.output
    assert "ArithmeticError: this rank was told to fail" in gang.ranks[1].output, gang.output
