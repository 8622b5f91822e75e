"""The report of a run of a million steps: bounded memory, a bounded page, and nothing that stands out is lost."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import pytest

from lockstep.training.observe.report import charts, record
from lockstep.training.observe.report.series import Series, thinned
from tests import large_run
from tests.processes import PYTHON

READINGS = 100_000


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return large_run.run_directory(tmp_path_factory.mktemp("long") / "run", 64, READINGS, slow=41)


def test_a_hundred_thousand_readings_take_little_memory(long: Path, tmp_path: Path) -> None:
    small = large_run.run_directory(tmp_path / "small", 2, 10)
    words = [PYTHON, "-m", "lockstep.training", "report"]
    peaks = [_peak([*words, str(run), "--out", str(tmp_path / f"{run.name}.html")]) for run in (small, long)]
    assert peaks[1] - peaks[0] < 60 << 10, peaks  # as mappings they take 180 MB


def _peak(words: list[str]) -> int:
    """KiB of a command's memory at the most. A process begins with the peak of the one that started it: a small one stands between."""
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], stdout=2, check=True); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    return int(subprocess.run([PYTHON, "-c", code, *words], stdout=subprocess.PIPE, text=True, check=True).stdout)


def test_of_a_hundred_thousand_readings_the_spike_is_drawn(long: Path) -> None:
    drawn = {chart.title: chart for chart in charts.of([record.read(long)], ["long"])}
    (loss, _) = drawn["Loss"].lines
    values = [y for _, y in loss.points]
    assert len(values) <= 400 and max(values) == 9.0 and loss.points[-1][0] == pytest.approx(100)
    bars = next(chart for title, chart in drawn.items() if title.startswith("Where a step goes"))
    assert len(bars.lines[0].points) == 32 and "rank 41" in [name for name, _ in bars.lines[0].points]


def test_what_is_logged_keeps_its_extremes_and_the_later_attempt_counts(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("config: {recipe: x}\n")
    lines = [
        {
            "event": "log",
            "time": 10.0 + n,
            "step": n,
            "attempt": 1,
            "values": {"a": -7.0 if n == 1234 else 1.0, "b": float(n)},
        }
        for n in range(1, 6001)
    ]
    lines += [{"event": "log", "time": 9e3, "step": 6000, "attempt": 2, "values": {"b": -1.0}}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    drawn = {chart.title: chart for chart in charts.of([record.read(tmp_path)], ["own"])}
    assert min(y for _, y in drawn["Logged: a"].lines[0].points) == -7.0
    assert drawn["Logged: b"].lines[0].points[-1] == [6000, -1.0]


def test_rare_moments_are_not_crowded_out_by_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("config: {recipe: x}\n")
    lines = [{"event": "checkpoint_written", "time": 10.0 + n, "step": n, "path": "x"} for n in range(50_000)]
    lines.insert(31_313, {"event": "preempted", "time": 31_323.5, "step": 31_313, "reason": "TERM"})
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (timeline,) = charts.of([record.read(tmp_path)], ["x"])
    moments = [point[2] for point in timeline.lines[0].points]
    assert moments.count("preempted") == 1 and len(moments) < 1000


def test_thinned_keeps_the_ends_the_lowest_and_the_highest() -> None:
    points = [(n, math.sin(n / 50)) for n in range(10_000)]
    points[777], points[8888] = (777, -5.0), (8888, 5.0)
    kept = thinned(points, 100, lambda point: point[1])
    assert len(kept) <= 100 and kept[0] == points[0] and kept[-1] == points[-1]
    assert points[777] in kept and points[8888] in kept and kept == sorted(kept)


def test_what_was_read_again_counts_once() -> None:
    series = Series()
    for step, value in [(1.0, 9.0), (2.0, 9.0), (None, 3.0), (2.0, 1.0), (None, 4.0)]:
        series.add(step, None, 0.0, value)
    assert [one.value for one in series.fewer(100)] == [4.0, 9.0, 1.0]
