"""The goodput's seconds add up to an outside clock, whatever happened to the job."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests import product
from tests.events import assert_adds_up, summary_of
from tests.own.job import script
from tests.processes import PYTHON, run

pytestmark = pytest.mark.promise("goodput")
STEP, STEPS, EVERY = 0.05, 40, 10
JOB = """
run_dir, sync, *fate = sys.argv[1:]
with Session(run_dir, "checkpoint.every_steps=10", sync=sync) as run:
    model = replicated(run)
    for _ in run.epochs(2):
        for x in run.batches(torch.ones(20 * run.size, 4), run.size):
            time.sleep(0.05)
            run.step(lambda x: model(x).mean(), x)
            if f"{run.rank}:{run.steps}" in fate and not run.resumed:
                os.kill(os.getpid(), signal.SIGKILL if "KILL" in fate else signal.SIGTERM)
        time.sleep(0.3)
"""
"""Two epochs of 20 steps. FATE: RANK:STEP and a signal, of the first start."""


@pytest.fixture(autouse=True, scope="module")
def _warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Starts the process that forks ranks before a clock runs."""
    assert script(1, "", tmp_path_factory.mktemp("warm")).code == 0


def _goodput(*runs: Path) -> dict[str, Any]:
    done = run([PYTHON, "-m", "lockstep", "goodput", *map(str, runs), "--json"])
    assert done.code == 0, done.output
    report: dict[str, Any] = json.loads(done.output)
    return report


def test_a_kill_costs_a_restart_and_the_steps_since_the_checkpoint(tmp_path: Path) -> None:
    began = time.time()
    assert script(2, JOB, tmp_path / "killed", "flat", "1:35", "KILL").code == 1
    time.sleep(1.0)
    assert script(2, JOB, tmp_path / "killed", "flat").code == 0
    assert_adds_up(tmp_path / "killed", began)
    total = _goodput(tmp_path / "killed")["total"]
    seconds, wall = total["seconds"], total["wall_seconds"]
    assert sum(seconds.values()) == pytest.approx(wall, rel=0.001)
    assert STEP * (STEPS - 3) < seconds["productive"] < 2 * STEP * STEPS, "each step once, but for the first ones"
    assert STEP * 5 <= seconds["taken_again"] < wall / 2 and seconds["down"] >= 1.0
    assert seconds["evaluation"] >= 2 * 0.3 and total["restarts"] == 1
    assert seconds["taken_again"] + seconds["down"] < total["lost_to_restarts"] * wall < 0.9 * wall
    assert total["fraction"] == pytest.approx(seconds["productive"] / total["wall_seconds"], abs=0.001)
    summary = summary_of(tmp_path / "killed")["goodput"]
    assert summary["seconds"]["productive"] == pytest.approx(seconds["productive"], abs=0.01)

    both = _goodput(tmp_path / "killed", tmp_path / "killed")
    assert [each["run"] for each in both["runs"]] == [str(tmp_path / "killed")] * 2
    assert both["total"]["wall_seconds"] == pytest.approx(2 * total["wall_seconds"], abs=0.01)
    assert both["total"]["fraction"] == total["fraction"] and both["total"]["restarts"] == 2
    words = run([PYTHON, "-m", "lockstep", "goodput", str(tmp_path / "killed")]).output
    assert "lost to 1 restart" in words and "taken again" in words
    for missing in (tmp_path, tmp_path / "none"):
        done = run([PYTHON, "-m", "lockstep", "goodput", str(missing)])
        assert done.code == 2 and "time.jsonl" in done.output and len(done.output.splitlines()) == 1, done.output


def test_a_clock_that_is_set_back_within_an_attempt_moves_nothing(tmp_path: Path) -> None:
    """The clock is set back by a day before an attempt's last line. The next attempt's gap counts from that line."""
    assert script(1, JOB, tmp_path / "run", "flat", "0:15", "TERM").code == 75
    before = product.goodput(tmp_path / "run").plain()
    path = tmp_path / "run/time.jsonl"
    *lines, last = [json.loads(line) for line in path.read_text().splitlines()]
    last["time"] -= 86_400
    path.write_text("".join(json.dumps(line) + "\n" for line in (*lines, last)))
    assert product.goodput(tmp_path / "run").plain()["seconds"] == before["seconds"]


def test_what_is_damaged_is_left_out_and_shown_as_unknown(tmp_path: Path) -> None:
    run_dir, lines = tmp_path / "run", tmp_path / "run/time.jsonl"
    assert script(1, JOB, run_dir, "flat").code == 0
    whole = product.goodput(run_dir).plain()
    good = lines.read_text().splitlines()
    for bad in (
        "",
        "{",
        "[1]",
        '{"seconds": {"productive": -1}}',
        good[2].replace("productive", "nothing"),
        "9" * 99_999,
    ):
        lines.write_text("\n".join([*good[:2], bad, *good[3:]]) + "\n")
        report = product.goodput(run_dir).plain()
        assert report["wall_seconds"] == pytest.approx(whole["wall_seconds"], abs=0.01)
        assert report["seconds"]["unknown"] == pytest.approx(
            whole["seconds"]["unknown"] + sum(json.loads(good[2])["seconds"].values()), abs=0.01
        )
