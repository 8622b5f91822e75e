"""A rank that gets no further while another one waits for it is named within seconds, with what it does and where, and may be ended."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.processes import LAUNCH, PYTHON, ROOT, clean_env, poll, started
from tests.runs import Job

SCRIPT = ROOT / "tests/faults/hanging.py"
SAID = {
    "lock": r"rank 1 waits \(hanging\.py:\d+ in hang\), and rank 0 waits",
    "stop": r"rank 1 stands stopped, and rank 0 waits",
    "loop": r"rank 1 computes \(hanging\.py:\d+ in hang\), and rank 0 waits",
    "loader": r"rank 1 waits for its data loader \(hanging\.py:\d+ in <module>\), and rank 0 waits",
    "pipe": r"rank 1 waits \(hanging\.py:\d+ in hang\), and rank 0 waits",
}


def _launch(run_dir: Path, kind: str, *flags: str) -> list[str]:
    return [*LAUNCH, "--ranks", "2", "--grace", "5", *flags, "--", PYTHON, "-u", str(SCRIPT), str(run_dir), kind]


@pytest.mark.promise("named-rank")
@pytest.mark.parametrize(
    "kind", ["lock", "loader", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("stop", "loop", "pipe"))]
)
def test_the_rank_that_hangs_is_named_and_ended(tmp_path: Path, kind: str) -> None:
    run_dir = tmp_path / "run"
    mark = Job(run_dir, run_dir)
    with started(
        _launch(run_dir, kind, "--end-hangs", "--max-restarts", "1"), clean_env(LOCKSTEP_TEST_MARK=mark.mark)
    ) as launcher:
        poll(lambda: (run_dir / "hang.json").exists() or launcher.poll() is not None, 300, "hang.json")
        hang = json.loads((run_dir / "hang.json").read_text())
        output, _ = launcher.communicate(timeout=300)
    assert re.search(rf"launch: no step for \d+ s: {SAID[kind]}", output), output
    assert re.fullmatch(rf"no step for \d+ s: {SAID[kind]}", hang["said"]) and hang["step"] >= 30, hang
    assert [one["rank"] for one in hang["ranks"]] == [1, 0] and "most recent call first" in hang["ranks"][1]["stacks"]
    # The attempt that begins anew does not hang.
    assert launcher.returncode == 0 and "all ranks start again" in output, output
    assert not (run_dir / "hang.json").exists()
    mark.assert_gone()


@pytest.mark.promise("named-rank")
def test_one_that_goes_on_by_itself_is_no_longer_said_to_hang(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with started(_launch(run_dir, "slow"), clean_env()) as launcher:
        poll(lambda: (run_dir / "hang.json").exists() or launcher.poll() is not None, 300, "hang.json")
        output, _ = launcher.communicate(timeout=300)
    assert (
        launcher.returncode == 0 and "rank 1 waits (hanging.py" in output and "rank 1 gets further again" in output
    ), output
    assert not (run_dir / "hang.json").exists()
