"""Recorded steps: torch's CUDA graphs hold all that the eager step does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.events import events
from tests.gpu_rehearsal.rehearsal import STEPS, Gang, Rank, differing, trained
from tests.gpu_rehearsal.test_strategies import APPLIES, LOOK_FOR_NAN, READING, RESIDENT

pytestmark = pytest.mark.promise("gpu-standin", "recorded-steps")

NETS = "tests.gpu_rehearsal.nets"
CASES: dict[str, tuple[int, dict[str, object]]] = {
    "nesterov on two ranks": (2, {}),
    "nesterov, one graph": (2, {"nonfinite": "ignore"}),
    "muon": (1, {"optim__name": "muon", "lr": 0.01}),
    "micro-batches": (2, {"micro_batch_size": 6}),
    # Without dropout, which draws from a generator of the GPU.
    "batch statistics and average": (2, {"model": f"{NETS}:Normed", "ema__decay": 0.9, "ema__every": 3}),
    "from pinned memory": (2, {"data__resident": "never"}),
    "float16": (2, {"precision": "float16"}),
    "exact": (2, {"sync__name": "exact", "model": f"{NETS}:Normed"}),
    "exact, one graph": (1, {"sync__name": "exact", "nonfinite": "ignore", "model": f"{NETS}:Normed"}),
    "float16, one graph": (2, {"precision": "float16", "nonfinite": "ignore"}),
}
"""Ranks and settings of a run of 8 steps, of which 3 warm up, and each kind of step comes as a recording."""


def graphs(gang: Gang, rank: int = 0) -> list[int]:
    """Returns the number of nodes of each captured graph."""
    matches = [re.fullmatch(r"CAPTURE ends nodes=(\d+) error=0", line) for line in gang.ranks[rank].lines("CAPTURE")]
    return [int(match[1]) for match in matches if match]


PARTS = 8
"""Parts of a batch under `exact`; each is a launch."""
FIRST, *OTHERS = CASES


@pytest.mark.parametrize("name", [FIRST, *OTHERS])
def test_a_recorded_run_ends_in_the_bits_of_the_eager_one(tmp_path: Path, data_root: Path, name: str) -> None:
    ranks, changes = CASES[name]
    options: dict[str, object] = {"ranks": ranks}
    _, eager = trained(tmp_path / "eager", data_root, options=options, **changes)
    gang, recorded = trained(tmp_path / "recorded", data_root, options=options, **changes, capture="auto")
    assert differing(recorded, eager) == []
    for rank in gang.ranks:
        assert "runs eagerly" not in rank.output
        sizes = graphs(gang, rank.number)
        each = 1 if changes.get("nonfinite") == "ignore" else 2
        exact = changes.get("sync__name") == "exact"
        assert len(sizes) == each + exact and min(sizes) > 5
        assert rank.counts["step"].get(LOOK_FOR_NAN, 0) == (0 if each == 1 else STEPS), "the host looks at the gradient"
        launches = rank.lines("LAUNCH")
        eager_steps = 4 if exact else 3  # a step behind a save proves its function
        assert len(launches) >= (STEPS - eager_steps) * (each + PARTS // ranks * exact)
        assert rank.counts["step"].get(APPLIES, 0) == eager_steps * exact
        assert {int(line.split("nodes=")[1].split()[0]) for line in launches} <= set(sizes)


def _waits(graphs: int, looks_for_nan: bool) -> dict[str, int]:
    """Returns the waits and the copies of the run's 8 steps in 2 epochs: 3 warm up, and 5 are replayed."""
    waits = {
        "cudaDeviceSynchronize by run/recording.py:graph_of": 2 * graphs,  # before each recording, ours and torch's own
        "copy cpu->cuda pageable blocking by data/batches.py:fill": 2,  # the keys, once an epoch
        "cudaStreamSynchronize by data/batches.py:fill": 2,
        "cudaStreamSynchronize by data/batches.py:recorded": 1,  # the keys' place, once
        RESIDENT: 8,
        "copy cpu->cuda pageable by optim/base.py:publish_rates": 8,
    }
    looks = {LOOK_FOR_NAN: 8}
    return waits | (looks if looks_for_nan else {})


def _without_readings(rank: Rank) -> dict[str, int]:
    """Returns the waits of the rank's steps, without the reads of the losses on a separate stream."""
    return {what: times for what, times in rank.counts["step"].items() if what not in READING}


def test_a_recorded_step_launches_its_graphs_and_little_else(tmp_path: Path, data_root: Path) -> None:
    """Between two launches the host copies the samples' numbers and the rates, and waits once, for the look for NaN."""
    gang, _ = trained(tmp_path, data_root, capture="auto", evaluate__every=100)
    for rank in gang.ranks:
        assert _without_readings(rank) == _waits(graphs=2, looks_for_nan=True)
        places = [number for number, line in enumerate(rank.log) if line.startswith("LAUNCH")]
        between = rank.log[places[0] : places[-1]]
        work = [line for line in between if line.startswith("WORK")]
        assert len(work) / (len(places) - 1) < 12, work


def test_nothing_waits_in_a_recorded_step_of_one_graph(tmp_path: Path, data_root: Path) -> None:
    """But in the first of an epoch, for the keys."""
    gang, _ = trained(tmp_path, data_root, capture="auto", nonfinite="ignore", options={"STANDIN_LATE": "newest"})
    for rank in gang.ranks:
        assert _without_readings(rank) == _waits(graphs=1, looks_for_nan=False)


def test_if_one_rank_cannot_record_all_continue_eagerly_and_report_it(tmp_path: Path, data_root: Path) -> None:
    """Rank 1 looks at its activations, which makes the host wait: CUDA refuses, and torch leaves the capture cleanly."""
    peeking = f"{NETS}:Peeking"
    _, eager = trained(tmp_path / "eager", data_root, model=peeking)
    folder = tmp_path / "recorded"
    gang, recorded = trained(folder, data_root, model=peeking, capture="auto", options={"refused": [1]})
    assert differing(recorded, eager) == []
    assert "the step cannot be recorded (rank 1: " in gang.ranks[0].output
    assert [rank.lines("LAUNCH") for rank in gang.ranks] == [[], []]


def test_a_recorded_step_separates_its_compute_time_from_the_wait_for_others(tmp_path: Path, data_root: Path) -> None:
    """Rank 1 comes 0.4 s late to each of its recorded steps: rank 0 waits for it, inside the graph."""
    changes = {"model": f"{NETS}:Tardy", "log__every": 1, "capture": "auto"}
    trained(tmp_path, data_root, **changes)
    replayed = [event for event in events(tmp_path / "run", "step") if event["step"] > 5]
    assert len(replayed) == 3
    wait, compute, whole = (
        sum(event[name] for event in replayed) for name in ("sync_wait", "grad_ready", "step_duration")
    )
    assert whole > wait > 0.4 and wait > compute > 0, replayed
