"""A recorded step against the eager one, as far as a machine without a GPU can show it.

The recorder is replaced by one that records operators on fixed memory (`tests.recorder`): what is shown is that a replay
reads nothing but the tensors that were filled for it, and computes what an eager step computes. CUDA graphs themselves
need a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.training.parallel.world import World
from lockstep.training.run import recording
from tests.product import RunBegun
from tests.ranks import on_ranks
from tests.recorder import OperatorRecorder

pytestmark = pytest.mark.promise("recorded-steps")

BASE = [
    "data.source=synthetic", "data.options={n: 97, n_test: 10, size: 8}", "data.num_shards=3", "augment.crop=1",
    "augment.flip=random", "model=tests.nets:SmallConv", "model_options={}",
    "global_batch_size=24", "uneven=weight", "ema.decay=0", "optim.clip=50", "sync.name=flat", "sync.bucket_mb=0.001",
]  # fmt: skip
CASES = {
    "nesterov": [],
    "muon": ["optim.name=muon", "lr=0.01", "optim.groups={head: {lr: 0.02, momentum: 0.5}}"],
    "micro-batches": ["micro_batch_size=6"],
    "not looking": ["nonfinite=ignore"],
    "not resident": ["data.resident=never"],
    "float16": ["precision=float16"],
    "batch statistics": ["model=tests.nets:NormedConv", "precision=float64"],
}  # fmt: skip
Found = tuple[list[torch.Tensor], int, list[str]]


def _begun(world: World, root: str, folder: Path, name: str) -> RunBegun:
    return RunBegun(world, folder, *BASE, *CASES[name], f"data.root={root}")


def _recorded(run: RunBegun, say: Any, record: Any) -> None:
    run.loop.step.recorder = recording.Recorder(run.recipe.optimizer, run.state.sync, run.state.world, say, record)


def _state(run: RunBegun) -> list[torch.Tensor]:
    tensors = [*run.model.parameters(), *run.model.buffers(), run.state.losses]
    return [tensor.detach().clone() for tensor in tensors]


def _both_ways(world: World, root: str, folder: str) -> dict[str, tuple[Found, Found, int]]:
    found = {}
    for name in CASES:
        both: list[Found] = []
        for recorded in (False, True):
            path = Path(folder) / f"{world.size}-{name}-{recorded}".replace(" ", "-")
            with _begun(world, root, path, name) as run:
                points, record = [], OperatorRecorder()
                clock: Any = run.state.clock
                clock.grad_ready = lambda *_, points=points: points.append("grad_ready")
                clock.synced = lambda points=points: points.append("synced")
                if recorded:
                    _recorded(run, points.append, record)
                for number in range(25):  # the last one of each epoch has one sample
                    run.step(number)
                both.append((_state(run), record.replays, points))
                full = 25 - 25 // run.division.steps
        found[name] = both[0], both[1], full
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_a_replayed_step_computes_what_an_eager_one_does(tmp_path: Path, data_root: Path, size: int) -> None:
    for number, rank in enumerate(on_ranks(_both_ways, size, str(data_root), str(tmp_path))):
        for name, ((eager, _, marked), (replayed, replays, also_marked), full) in rank.items():
            place = f"{name}, rank {number} of {size}"
            # Of the full steps the first 3 run eagerly; gradients and update are recorded apart where NaN is looked for.
            again = len(marked) // 2 - 25  # where float16 overflowed
            assert (again > 0) == (name == "float16"), place
            parts = 1 if name == "not looking" else 2
            assert 0 <= replays - (full - recording.WARM_UP) * parts <= again, place
            assert marked == also_marked == ["grad_ready", "synced"] * (25 + again), place
            for a, b in zip(eager, replayed, strict=True):  # rates are float32 on the device
                torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-6, msg=place)


def _failing(world: World, root: str, folder: str) -> list[str]:
    said: list[str] = []
    with _begun(world, root, Path(folder), "nesterov") as run:

        def record(body: Any) -> Any:
            run.state.sync.bytes_sent += 7
            if world.rank == 1:
                raise RuntimeError("operation not permitted when stream is capturing")
            return body

        _recorded(run, said.append, record)
        for number in range(8):
            run.step(number)
        assert run.state.sync.bytes_sent % 4 == 0
    return said


def test_where_one_rank_cannot_record_all_go_on_eagerly_and_say_so_once(tmp_path: Path, data_root: Path) -> None:
    for said in on_ranks(_failing, 2, str(data_root), str(tmp_path / "run")):
        assert len(said) == 1 and "rank 1: RuntimeError: operation not permitted" in said[0] and "eagerly" in said[0]


def _poisoned(world: World, root: str, folder: str) -> tuple[str, bool]:
    with _begun(world, root, Path(folder), "batch statistics") as run:
        _recorded(run, print, OperatorRecorder())
        for epoch in range(5):
            run.step(epoch * run.division.steps)
        with torch.no_grad():
            run.model.head.weight[0] = torch.finfo(torch.float64).max
        before, ended = _state(run), ""
        try:
            run.step(6 * run.division.steps)
        except BaseException as error:
            ended = type(error).__name__
        return ended, all(map(torch.equal, before, _state(run)))


def test_a_replay_with_an_infinite_gradient_changes_nothing(tmp_path: Path, data_root: Path) -> None:
    assert on_ranks(_poisoned, 2, str(data_root), str(tmp_path / "run")) == [("Ended", True)] * 2
