"""A rank that becomes slow in a real run is named: in which phase, and what it costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.events import events, status_of
from tests.own.job import script

QUIET, MOST, PACE, DELAY, SAMPLES = 15, 600, 0.2, 0.3, 4
"""Steps before the rank becomes slow, and at most. Seconds of each rank's computing in a step, and of the slow rank's wait for its data.
Samples of a rank. Ten seconds of steps are needed, and enough steps to distinguish the rank's slowness from a busy machine's. So the run
ends when the rank is named."""
JOB = f"""
class Samples(Dataset):
    given = 0
    def __len__(self):
        return 2 * {SAMPLES} * {MOST}
    def __getitem__(self, number):
        self.given += 1
        if run.rank == 1 and self.given > {SAMPLES} * {QUIET}:
            time.sleep({DELAY} / {SAMPLES})
        return torch.ones(4)

with Session(sys.argv[1], "log.every=1", sync="exact") as run:
    model = replicated(run)
    for _ in run.epochs(1):
        for x in run.batches(Samples(), 2 * {SAMPLES}):
            def loss(x):
                time.sleep({PACE} / {SAMPLES} * len(x))
                return model(x).mean()
            run.step(loss, x)
            if run.steps % 5 == 0 and run.sum(float('"slow_rank"' in pathlib.Path(sys.argv[1], "events.jsonl").read_text()))[0]:
                break
"""


@pytest.mark.promise("alerts")
def test_a_rank_that_becomes_slow_is_named(tmp_path: Path) -> None:
    done = script(2, JOB, tmp_path / "run")
    assert done.code == 0, done.output
    (named,) = events(tmp_path / "run", "slow_rank")
    assert (named["rank"], named["phase"]) == (1, "data")
    assert named["step"] > QUIET
    alert = status_of(tmp_path / "run")["slow_rank"]
    assert alert["rank"] == 1 and alert["share"] > 0.03
    assert "rank 1, in data: costs" in done.output
