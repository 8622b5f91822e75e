"""What the benchmarks say of their figures: intervals, targets, comparison with a record, and who used the machine."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import measure
from benchmarks.figures import Figure, Run, compared, figure, interval, options, ratios
from benchmarks.measure import Load, interleaved, steady
from lockstep.training.contract import UserError
from tests.processes import poll

SPIN = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    """Of a skewed noise, for which a mean and its deviation would not."""
    rng = random.Random(1)
    for n in (6, 7, 15, 30):
        held = 0
        for _ in range(2000):
            low, high = interval(sorted(rng.expovariate(1.0) ** 3 for _ in range(n))) or (1.0, 0.0)
            held += low <= 0.6931471805599453**3 <= high
        assert 0.94 < held / 2000 <= 1, n
    assert interval([1.0, 2.0, 3.0, 4.0, 5.0]) is None, "five values hold it with 94 %"
    assert interval([float(n) for n in range(15)]) == (3.0, 11.0)  # the table in Conover's book


@pytest.mark.parametrize(
    ("values", "better", "target", "said"),
    [
        ([0.3] * 9 + [9.0], "less", 0.5, "met"),
        ([0.6] * 9, "less", 0.5, "missed"),
        ([0.4] * 5 + [0.6] * 5, "less", 0.5, "open"),
        ([0.4] * 5, "less", 0.5, "open"),
        ([1.2] * 9, "more", 1.0, "met"),
        ([0.9] * 9, "more", 1.0, "missed"),
    ],
)
def test_a_target_is_met_by_the_whole_interval(values: list[float], better: str, target: float, said: str) -> None:
    assert figure(values, better=better).meets(target) == said  # type: ignore[arg-type]


def test_ratios_are_paired_round_by_round() -> None:
    found = ratios({"ours": [1.0, 10.0, 100.0], "theirs": [2.0, 20.0, 200.0]}, "ours", "theirs")
    assert found.median == 0.5 and found.quartiles == (0.5, 0.5)


def test_worse_is_beyond_both_intervals_and_on_the_bad_side() -> None:
    old = {
        "wait": figure([1.0, 1.1, 1.2] * 4),
        "rate": figure([100.0, 110.0] * 6, better="more"),
        "gone": figure([1.0] * 9),
    }
    near = {"wait": figure([1.1, 1.2, 1.3] * 4), "rate": figure([90.0, 105.0] * 6, better="more")}
    assert compared(old, near) == {}
    other = {"wait": figure([2.0, 2.1] * 6), "rate": figure([200.0] * 9, better="more"), "new": figure([9.0] * 9)}
    assert list(compared(old, other)) == ["wait"]
    assert list(compared(old, {"rate": figure([50.0] * 9, better="more")})) == ["rate"]


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    options(parser, rounds=15)
    return parser.parse_args(list(words))


def test_check_names_what_became_worse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "record.json"
    words = ["--out", str(out)]
    assert Run("try", arguments(*words)).finish({"wait": figure([1.0, 1.1] * 5, "ms")}, {"raw": [1]}) == 0
    before = out.read_bytes()
    assert Run("try", arguments(*words, "--check")).finish({"wait": figure([1.05, 1.1] * 5, "ms")}, {}) == 0
    assert Run("try", arguments(*words, "--check")).finish({"wait": figure([2.0, 2.1] * 5, "ms")}, {}) == 1
    said = capsys.readouterr().out
    assert "worse: wait:" in said and "1 of 1 figures are worse" in said and out.read_bytes() == before, said


@pytest.mark.parametrize(
    "record", [None, "{", "[]", '{"machine": {}}', '{"machine": {"cpu": "another", "cores": 1}, "figures": {}}']
)
def test_check_refuses_before_it_measures(tmp_path: Path, record: str | None) -> None:
    out = tmp_path / "record.json"
    if record is not None:
        out.write_text(record)
    with pytest.raises(UserError, match=r"run once without --check|record here first"):
        Run("try", arguments("--out", str(out), "--check"))


def test_check_refuses_other_settings_and_names_what_it_cannot_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "record.json"
    given = argparse.Namespace(rounds=15, out=out, check=False, batch=64)
    few = {"wait": figure([1.0] * 9), "few": figure([1.0] * 5), "gone": figure([1.0] * 9)}
    assert Run("try", given).finish(few, {}) == 0
    other = argparse.Namespace(rounds=15, out=out, check=True, batch=128)
    with pytest.raises(UserError, match="was measured with --batch 64, this run has 128"):
        Run("try", other)
    same = argparse.Namespace(rounds=7, out=out, check=True, batch=64)
    assert (
        Run("try", same).finish({"wait": figure([1.0] * 9), "few": figure([9.0] * 9), "new": figure([1.0] * 9)}, {})
        == 0
    )
    said = capsys.readouterr().out
    assert "not compared: few: the record has 5 values" in said and "not compared: gone: only in the record" in said
    assert "not compared: new: only in the new run" in said and "not compared: wait" not in said


def test_a_record_is_read_back_as_it_was(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    found = figure([3.0, 1.0, 2.0] * 5, "MB/s", "more")
    Run("try", arguments("--out", str(out))).finish({"rate": found, "once": figure([1.0])}, {})
    again = Run("try", arguments("--out", str(out), "--check"))
    assert again._recorded == {"rate": found, "once": figure([1.0])} and isinstance(again._recorded["rate"], Figure)
    assert json.loads(out.read_text())["figures"]["rate"] == json.loads(json.dumps(dataclasses.asdict(found)))


def test_what_others_use_is_told_and_what_we_use_is_not() -> None:
    before = measure._own()
    own = subprocess.Popen([sys.executable, "-c", SPIN])
    try:
        poll(lambda: own.poll() is not None or _spent(own.pid) > 0.5, 30, "half a second of CPU time of our own")
        assert measure._own() - before > 0.5
    finally:
        own.kill()
        own.wait()
    assert measure._own() - before > 0.5, "what has ended counts, too"
    load, before = Load(), measure._own()
    start = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=-3, stderr=-3); print(p.pid)"
    pid = int(subprocess.run([sys.executable, "-c", start, SPIN], capture_output=True, text=True, check=True).stdout)
    try:  # the one that started it has ended: it is no child of ours
        poll(lambda: _spent(pid) > 1, 30, "a second of CPU time of somebody else")
        theirs, mine = load.taken(), measure._own() - before
    finally:
        os.kill(pid, signal.SIGKILL)
    assert theirs["others"] > 0.1 and theirs["busy"] and mine < 0.7, (mine, theirs)


def _spent(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def test_warming_up_ends_when_the_figure_is_steady() -> None:
    assert not steady([1.0] * 5) and steady([1.0] * 6) and not steady([3.0, 2.9, 2.8, 2.0, 1.5, 1.4])
    assert steady([float(n) for n in range(1, 21)]), "after twenty it goes on"
    calls: dict[str, int] = {"slow": 0, "fast": 0}

    def called(name: str) -> None:
        calls[name] += 1

    times = interleaved({name: lambda name=name: called(name) for name in calls}, 4, warm_up=None)  # type: ignore[misc]
    assert all(len(values) == 4 for values in times.values()) and all(10 <= count <= 24 for count in calls.values())
