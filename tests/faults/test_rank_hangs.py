"""A rank that gets no further while another one waits is named within seconds, with its activity and place, and may be ended."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import pytest

from tests.events import events
from tests.jobs.helpers import top
from tests.processes import PYTHON, ROOT, assert_none_inside, clean_env, free_port, poll, run
from tests.ranks import launching

SCRIPT = ROOT / "tests/faults/hanging.py"
REASONS = {
    "lock": r"rank 1 waits \(hanging\.py:\d+ in hang\)",
    "stop": r"rank 1 stands stopped",
    "loop": r"rank 1 computes \(hanging\.py:\d+ in hang\)",
    "loader": r"rank 1 waits for its data loader \(hanging\.py:\d+ in <module>\)",
    "pipe": r"rank 1 waits \(hanging\.py:\d+ in hang\)",
}


@pytest.mark.promise("named-rank")
@pytest.mark.parametrize(
    ("kind", "launcher"),
    [
        ("loader", "ours"), ("loop", "torchrun"),
        *(pytest.param(kind, "ours", marks=pytest.mark.nightly) for kind in ("lock", "stop", "loop", "pipe")),
        *(pytest.param(kind, "torchrun", marks=pytest.mark.nightly) for kind in ("lock", "loader", "stop", "pipe")),
    ],
)  # fmt: skip
def test_the_rank_that_hangs_is_named_and_ended(tmp_path: Path, kind: str, launcher: str) -> None:
    """Under torchrun each rank has a separate watcher, which sees no other rank."""
    run_dir = tmp_path / "run"
    ours = ["--ranks", "2", "--grace", "5", "--max-restarts", "1", "--", PYTHON, "-u"]
    torchrun = [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", "--master-port"]
    words = [str(SCRIPT), str(run_dir), kind, "end_hangs=true"]
    with tempfile.TemporaryDirectory() as folder:  # with a short path, for the sockets of the loader
        env = clean_env(TMPDIR=folder)
        if launcher == "ours":
            with launching(*ours, *words, env=env, cwd=tmp_path) as gang:
                result = gang.wait(300)
        else:
            result = run([*torchrun, str(free_port()), *words], env, 300, cwd=tmp_path)
        assert_none_inside(tmp_path)
        assert not [path for path in Path(folder).iterdir() if path.name.startswith("lockstep-")]
    # The attempt that begins anew does not hang.
    assert result.code == 0, result.output
    sentence = rf"no step for \d+ s, since \d\d:\d\d:\d\d, after step \d+: {REASONS[kind]}, and rank 0 waits"
    assert re.search(rf"hang: {sentence} \(stacks: ", result.output), result.output
    *_, hang = events(run_dir, "hang")  # before, a rank that waits may have been reported
    assert re.fullmatch(sentence, hang["reason"]) and hang["ranks"] == [1] and hang["step"] >= 29, hang
    assert hang["attempt"] == 1 and [event["attempt"] for event in events(run_dir, "start")] == [1, 2]
    assert not (run_dir / "hang.jsonl").exists()


@pytest.mark.promise("named-rank")
def test_a_rank_that_continues_by_itself_is_no_longer_reported_as_hanging(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with launching("--ranks", "2", "--", PYTHON, "-u", str(SCRIPT), str(run_dir), "held") as gang:
        poll(lambda: events(run_dir, "hang") or gang.processes[0].poll() is not None, 300, "hang.jsonl")
        reports = [json.loads(line) for line in (run_dir / "hang.jsonl").read_text().splitlines()]
        rows = json.loads(top(tmp_path, str(run_dir), "--json", "--every", "0.2").stdout)
        metrics = run_dir / "metrics/rank-00000.prom"
        poll(lambda: re.search(r"(?m)^training_hung_rank{.*} 1", metrics.read_text()), 120, "the metric")
        (run_dir / "GO").touch()
        result = gang.wait(300)
    assert result.code == 0 and "hang: rank 1 gets further again" in result.output, result.output
    ranks = [(rank["rank"], rank["waits"], "most recent call first" in rank["stacks"]) for rank in reports[0]["ranks"]]
    assert sorted(ranks) == [(0, True, True), (1, False, True)], reports  # in the order of their answers
    assert [bool(rank["hang"]) for rank in rows] == [False, True] and "hanging.py:" in rows[1]["hang"], rows
    assert not (run_dir / "hang.jsonl").exists() and "training_hung_rank{" not in metrics.read_text()
