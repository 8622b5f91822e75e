"""`lockstep top`: which rank is a straggler, which files are trusted, and what the table shows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests import product
from tests.jobs import helpers
from tests.processes import PYTHON
from tests.terminal import SIZE, at_a_terminal, until_shown

TEXT = """# HELP training_step Steps.
# TYPE training_step gauge
training_step{{rank="{rank}",run="{run}"}} {steps}
training_steps_planned{{rank="{rank}",run="{run}"}} 100
training_samples_total{{rank="{rank}",run="{run}"}} {samples}
training_step_duration_seconds_bucket{{le="0.1",rank="{rank}",run="{run}"}} 3
training_step_duration_seconds_sum{{rank="{rank}",run="{run}"}} {spent}
training_step_duration_seconds_count{{rank="{rank}",run="{run}"}} {steps}
training_data_wait_seconds_sum{{rank="{rank}",run="{run}"}} {data}
training_grad_ready_seconds_sum{{rank="{rank}",run="{run}"}} {compute}
training_sync_wait_seconds_sum{{rank="{rank}",run="{run}"}} {sync}
training_last_step_timestamp_seconds{{rank="{rank}",run="{run}"}} {spent}
training_loss{{rank="{rank}",run="{run}"}} NaN
training_finished{{rank="{rank}",run="{run}"}} 0
"""
Shares = tuple[float, float, float]
SLOW: list[Shares] = [(0.0, 0.1, 0.875), (0.025, 0.925, 0.025)]
"""Shares of a step's time of two ranks: data, computing, waiting for the other rank."""


def text(rank: int, *parts: tuple[int, Shares], run: str = "x") -> str:
    """Returns metrics after steps of 0.1 s. Each part has a number of steps and their shares."""
    steps = sum(number for number, _ in parts)
    sums = [sum(number * 0.1 * shares[at] for number, shares in parts) for at in range(3)]
    names = dict(zip(("data", "compute", "sync"), sums))
    return TEXT.format(rank=rank, run=run, steps=steps, samples=16 * steps, spent=0.1 * steps, **names)


def run_of(folder: Path, *ranks: Shares) -> Path:
    """Writes a run directory with the metrics of each rank after 40 steps."""
    (folder / "metrics").mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text("config: {}\n")
    for rank, shares in enumerate(ranks):
        (folder / f"metrics/rank-{rank:05d}.prom").write_text(text(rank, (40, shares)))
    return folder


def straggling(folder: Path, **more: object) -> dict[str, Any]:
    """Writes a status.json that names a straggler."""
    slow_rank = {"rank": 1, "phase": "data", "share": 0.11, **more}
    (folder / "status.json").write_text(json.dumps({"code": None, "slow_rank": slow_rank}))
    return slow_rank


def top(folder: Path) -> list[dict[str, Any]]:
    done = helpers.top(folder, str(folder), "--json", "--every", "0.2")
    assert (done.returncode, done.stderr) == (0, ""), done
    ranks: list[dict[str, Any]] = json.loads(done.stdout)
    return ranks


@pytest.mark.promise("alerts")
def test_top_names_the_straggler_and_its_cost(tmp_path: Path) -> None:
    straggler = straggling(run_of(tmp_path, *SLOW))
    assert [rank["straggler"] for rank in top(tmp_path)] == [None, straggler]
    table = helpers.top(tmp_path, str(tmp_path), "--once", "--every", "0.2").stdout
    assert "STRAGGLER (data)" in table
    assert "rank 1, in data: costs 11 % of every step" in table


@pytest.mark.parametrize(
    "damage",
    [{"rank": "1"}, {"rank": -1}, {"rank": True}, {"share": 1e300}, {"share": None}, {"share": [1]}, {"phase": 7}],
)
def test_a_damaged_word_of_a_straggler_is_none(tmp_path: Path, damage: dict[str, Any]) -> None:
    straggling(run_of(tmp_path, *SLOW), **damage)
    assert [rank["straggler"] for rank in top(tmp_path)] == [None, None]
    (tmp_path / "status.json").write_text('{"slow_rank": ')
    assert [rank["straggler"] for rank in top(tmp_path)] == [None, None]


def test_what_was_before_does_not_blur_the_picture(tmp_path: Path) -> None:
    """1000 even steps, then 40 in which one rank is slow."""
    reader = product.metrics_reader(run_of(tmp_path, *SLOW))
    even, readings = (1000, (0.0, 0.6, 0.3)), []
    for parts in ([[even]] * 2, [[even, (40, shares)] for shares in SLOW]):
        for rank, part in enumerate(parts):
            (tmp_path / f"metrics/rank-{rank:05d}.prom").write_text(text(rank, *part))
            os.utime(tmp_path / f"metrics/rank-{rank:05d}.prom", (1000 + len(readings),) * 2)
        readings.append(reader.read())
    ranks = reader.judged(*readings)
    assert [rank.step for rank in ranks] == [1040, 1040]
    assert ranks[0].sync_wait == pytest.approx(0.875) and ranks[0].step_seconds == pytest.approx(0.1)
    assert ranks[0].images_per_second == pytest.approx(160)  # from step to step, whenever the two were written


def test_a_damaged_textfile_hides_no_other(tmp_path: Path) -> None:
    run_of(tmp_path, *SLOW)
    (tmp_path / "metrics/rank-00002.prom").write_bytes(b"\xff\xfe not text")
    for name in ("rank-x.prom", "rank-²²²²².prom", "rank-00003.prom"):
        (tmp_path / "metrics" / name).write_text("")
    ranks = top(tmp_path)
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert (ranks[0]["step"], ranks[0]["sync_wait"], ranks[0]["images_per_second"]) == (40, 0.875, 160)
    table = helpers.top(tmp_path, str(tmp_path), "--once", "--every", "0.2").stdout
    assert "ssss" in table


def test_a_rank_has_ended_if_its_run_has(tmp_path: Path) -> None:
    """A killed rank's textfile does not show its end. No process holds the run, and status.json has the exit code."""
    run_of(tmp_path, *SLOW)
    assert [rank["exit_code"] for rank in top(tmp_path)] == [None, None]
    (tmp_path / "status.json").write_text('{"code": 1, "reason": "killed"}')
    assert [rank["exit_code"] for rank in top(tmp_path)] == [1, 1]


def test_at_a_terminal_it_fits_and_a_hostile_name_moves_no_cursor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = run_of(Path("x\x1b[2J[/x]"), *[SLOW[0]] * 90, SLOW[1])
    straggling(run, rank=90, phase="d\x1b[2Jata")
    with at_a_terminal([PYTHON, "-c", product.PROGRAM, "top", str(run), "--every", "0.2"]) as (process, ours, _):
        shown = until_shown(ours, b"more ranks", 60)
        process.kill()
    assert b"x\x1b[2J" not in shown and b"d\x1b[2J" not in shown and b"[/x]" in shown and b"STRAGGLER" in shown, shown
    assert shown.count(b"\r\n") < SIZE[0]


@pytest.mark.promise("growth")
def test_top_names_the_straggler_among_a_thousand_ranks(tmp_path: Path) -> None:
    straggling(run_of(tmp_path, *[SLOW[0]] * 700, SLOW[1], *[SLOW[0]] * 323), rank=700)
    ranks = top(tmp_path)
    assert len(ranks) == 1024 and [rank["rank"] for rank in ranks if rank["straggler"]] == [700]
