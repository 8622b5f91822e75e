"""Times and samples that a user's run reports. Another start of a complete run leaves its results as they were."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.events import events, status_of, summary_of
from tests.own.job import script

GAN = """
began = time.perf_counter()
with Session(sys.argv[1], "log.every=1", sync="flat") as run:
    both = torch.nn.ModuleDict({"one": torch.nn.Linear(4, 3), "other": torch.nn.Linear(4, 3)})
    model = run.replicate(both)
    one = run.optimizer(lambda _: torch.optim.SGD(both["one"].parameters(), lr=0.1), "one")
    other = run.optimizer(lambda _: torch.optim.SGD(both["other"].parameters(), lr=0.1), "other")
    for epoch in run.epochs(2):
        for x, y in run.batches(DATA, 8):
            for name, optimizer in (("one", one), ("other", other)):
                time.sleep(0.03)
                run.backward(F.cross_entropy(model[name](x), y), samples=len(y))
                run.update(optimizer)
    wall = time.perf_counter() - began
sys.stdout.write(f"WALL {wall}\\n")  # in one piece: both ranks write
"""


def test_two_updates_of_a_batch_count_its_time_once_and_its_samples_in_each(tmp_path: Path) -> None:
    """As in a GAN. The trained seconds stay below the wall seconds."""
    done = script(2, GAN, tmp_path / "run")
    assert done.code == 0, done.output
    summary = summary_of(tmp_path / "run")
    wall = float(re.findall(r"WALL (\S+)", done.output)[0])
    assert summary["steps"] == 16 and 16 * 0.03 <= summary["trained_seconds"] < wall
    assert summary["examples_seen"] == 128
    assert summary["images_per_second"] == pytest.approx(128 / summary["trained_seconds"])
    # The times of a batch's second step begin where its first step ended.
    durations = [event["step_duration"] for event in events(tmp_path / "run", "step")]
    assert len(durations) == 16 and sum(durations) == pytest.approx(summary["trained_seconds"], rel=0.01)
    for rank in (0, 1):
        text = (tmp_path / f"run/metrics/rank-{rank:05d}.prom").read_text()
        assert re.findall(r"training_samples_total\{[^}]*\} (\S+)", text) == ["64.0"], text
        assert re.findall(r"training_learning_rate\{[^}]*\} (\S+)", text) == ["0.1"], text
        assert re.findall(r"training_steps_planned\{[^}]*\} (\S+)", text) == ["16.0"], text


def test_a_complete_run_that_is_started_again_leaves_its_results_as_they_were(tmp_path: Path) -> None:
    run_dir, epochs = tmp_path / "run", "2"
    code = """
with Session(sys.argv[1], "log.format=json") as run:
    model, optimizer = make(run)
    for epoch in run.epochs(int(sys.argv[2])):
        for batch in run.batches(DATA, 8):
            step(run, model, batch)
    run.log(accuracy=0.5, wer=run.sum(1.0)[0])
"""

    def start(epochs: str) -> str:
        done = script(2, code, run_dir, epochs)
        assert done.code == 0, done.output
        return done.output

    start(epochs)
    names = ("summary.json", *(path.relative_to(run_dir) for path in run_dir.glob("checkpoints/*/*")))
    before = {name: (run_dir / name).read_bytes() for name in names}
    status = status_of(run_dir)
    lines = [event for event in events(run_dir) if event["event"] in ("done", "epoch", "step", "checkpoint")]
    output = start(epochs)
    assert {name: (run_dir / name).read_bytes() for name in names} == before
    assert [event for event in events(run_dir) if event["event"] in ("done", "epoch", "step", "checkpoint")] == lines
    # A reader of the lines gets the same numbers once more.
    summaries = [json.loads(line) for line in output.splitlines() if line.startswith('{"event": "done"')]
    assert summaries == [{"event": "done", **json.loads(before["summary.json"])}], output
    again = status_of(run_dir)
    assert again == {**status, "attempt": 2, "goodput": again["goodput"]}, "each start counts, and nothing else is new"
    assert again["goodput"]["restarts"] == 1 and again["failures"] == 0, "the start before ended well"

    # The summary of fewer epochs is not that of a run that was killed before it could write its last one.
    start("3")
    (run_dir / "summary.json").write_bytes(before["summary.json"])
    start("3")
    assert summary_of(run_dir)["epochs"] == 3
