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

from lockstep.training import config
from lockstep.training import cudagraph as capture
from lockstep.training.cudagraph import CapturedTrainer
from lockstep.training.observe.clock import StepClock
from lockstep.training.parallel.world import World
from lockstep.training.run import prepare
from lockstep.training.run.prepare import Prepared
from lockstep.training.run.recipe import make_trainer
from lockstep.training.trainer import NonFinite
from tests.ranks import on_ranks
from tests.recorder import OperatorRecorder

BASE = [
    "data.source=synthetic", "data.options={n: 97, n_test: 10, size: 8}", "data.num_shards=3", "augment.crop=1",
    "augment.flip=random", "cutout=3", "brightness=0.1", "contrast=0.1", "model_options={}", "global_batch_size=24",
    "uneven=weight", "ema.decay=0", "optim.clip=50", "sync.name=flat", "sync.bucket_mb=0.001",
]  # fmt: skip
CASES = {
    "nesterov": ["model=tests.nets:SmallConv"],
    "muon": [
        "model=tests.nets:SmallConv",
        "optim.name=muon",
        "lr=0.01",
        "optim.groups={head: {lr: 0.02, momentum: 0.5}}",
    ],
    "muon that scales every third step": [
        "model=tests.nets:SmallConv",
        "optim.name=muon",
        "lr=0.01",
        "optim.normalise_every=3",
        "data.options={n: 241, n_test: 10, size: 8}",  # no eager step between the recordings of its two kinds
    ],
    "micro-batches": ["model=tests.nets:SmallConv", "accumulate=2"],
    "not looking": ["model=tests.nets:SmallConv", "nonfinite=ignore"],
    "not resident": ["model=tests.nets:SmallConv", "data.resident=never"],
    "float16": ["model=tests.nets:SmallConv", "precision=float16"],
    "batch statistics": ["model=tests.nets:NormedConv", "precision=float64"],
}


class Marks(StepClock):
    """Which points of the steps were marked."""

    def __init__(self) -> None:
        super().__init__()
        self.points: list[str] = []

    def grad_ready(self, at: Any = None) -> None:
        self.points.append("grad_ready")

    def synced(self) -> None:
        self.points.append("synced")


def _captured(p: Prepared, say: Any, record: Any) -> CapturedTrainer:
    steps = p.loader.steps_per_epoch
    return CapturedTrainer(
        p.config, p.state, p.network, say, record, batch_multiple=p.loader.multiple, steps_per_epoch=steps
    )


def _both_ways(world: World, root: str, run: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, changes in CASES.items():
        for recorded in (False, True):
            loaded = config.load("smoke", [*BASE, *changes, f"data.root={root}"])
            p = prepare.prepare(
                loaded, world, Path(run) / f"{world.size}-{name}-{recorded}".replace(" ", "-"), fresh=False
            )
            trainer, record, said = make_trainer(p), OperatorRecorder(), []
            clock = p.state.clock = Marks()
            if recorded:
                trainer = _captured(p, said.append, record)
            for number in range(25):  # the last one of each epoch has one sample
                epoch, at = divmod(number, p.loader.steps_per_epoch)
                batch = p.loader.resident_batch(epoch, at) if p.loader.resident else p.loader.host_batch(epoch, at)
                p.state.cursor.epoch, p.state.cursor.step = epoch, at
                trainer.step(batch)
            state = [*p.state.model.parameters(), *p.state.model.buffers(), p.state.losses]
            found[f"{name}, {recorded}"] = (
                [tensor.detach().clone() for tensor in state], record.replays, p.state.sync.bytes_sent, said, clock.points,
                25 - 25 // p.loader.steps_per_epoch,
            )  # fmt: skip
            if p.run:
                p.run.close()
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_a_replayed_step_computes_what_an_eager_one_does(tmp_path: Path, data_root: Path, size: int) -> None:
    for rank in on_ranks(_both_ways, size, str(data_root), str(tmp_path)):
        for name in CASES:
            eager, none, sent, _, marked, full = rank[f"{name}, False"]
            replayed, replays, also_sent, said, also_marked, _ = rank[f"{name}, True"]
            # Of the full steps the first 3 run eagerly; gradients and update are recorded apart where NaN is looked for.
            again = len(marked) // 2 - 25  # where float16 overflowed
            assert none == 0 and (again > 0) == (name == "float16")
            assert 0 <= replays - (full - capture.WARM_UP) * (1 if name == "not looking" else 2) <= again, name
            assert sent == also_sent and said == []
            assert marked == also_marked == ["grad_ready", "synced"] * (25 + again), name
            for a, b in zip(eager, replayed):
                torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-6, msg=name)  # rates are float32 on the device


def _failing(world: World, root: str, run: str) -> Any:
    loaded = config.load("smoke", [*BASE, *CASES["nesterov"], f"data.root={root}"])
    p = prepare.prepare(loaded, world, Path(run), fresh=False)
    said: list[str] = []

    def record(body: Any) -> Any:
        p.state.optimizer.steps_taken += 1  # type: ignore[attr-defined] # as the body does, which runs while it is recorded
        p.state.sync.bytes_sent += 7
        if world.rank == 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return body

    trainer = _captured(p, said.append, record)
    for number in range(8):
        epoch, at = divmod(number, p.loader.steps_per_epoch)
        p.state.cursor.epoch, p.state.cursor.step = epoch, at
        trainer.step(p.loader.resident_batch(epoch, at))
    assert p.state.optimizer.steps_taken == 0 and p.state.sync.bytes_sent % 4 == 0  # type: ignore[attr-defined]
    with torch.no_grad():
        next(iter(p.state.model.parameters()))[:] = float("nan")
    try:
        trainer.step(p.loader.resident_batch(0, 0))
    except NonFinite:
        said.append("nonfinite")
    if p.run:
        p.run.close()
    return said


def test_where_one_rank_cannot_record_all_go_on_eagerly_and_say_so_once(tmp_path: Path, data_root: Path) -> None:
    sentence = (
        "the step cannot be recorded (rank 1: RuntimeError: operation not permitted when stream is capturing); "
        "it runs eagerly"
    )
    assert on_ranks(_failing, 2, str(data_root), str(tmp_path / "run")) == [[sentence, "nonfinite"]] * 2


def _poisoned(world: World, root: str, run: str) -> Any:
    loaded = config.load("smoke", [*BASE, *CASES["batch statistics"], f"data.root={root}"])
    p = prepare.prepare(loaded, world, Path(run), fresh=False)
    trainer = _captured(p, print, OperatorRecorder())
    for number in range(5):
        p.state.cursor.epoch = number
        trainer.step(p.loader.resident_batch(number, 0))
    with torch.no_grad():
        p.state.model.head.weight[0] = torch.finfo(torch.float64).max  # type: ignore[union-attr, index]
    before = [t.detach().clone() for t in [*p.state.model.parameters(), *p.state.model.buffers(), p.state.losses]]
    try:
        p.state.cursor.epoch = 6
        trainer.step(p.loader.resident_batch(6, 0))
        refused = False
    except NonFinite:
        refused = True
    after = [*p.state.model.parameters(), *p.state.model.buffers(), p.state.losses]
    same = all(torch.equal(a, b) for a, b in zip(before, after))
    if p.run:
        p.run.close()
    return refused, same


def test_a_replay_with_an_infinite_gradient_changes_nothing(tmp_path: Path, data_root: Path) -> None:
    assert on_ranks(_poisoned, 2, str(data_root), str(tmp_path / "run")) == [(True, True)] * 2


def test_a_run_says_why_its_steps_are_eager(tmp_path: Path, data_root: Path) -> None:
    (line,) = on_ranks(_told, 1, str(data_root), str(tmp_path / "run"))
    assert line == "there is no GPU"


def _told(world: World, root: str, run: str) -> Any:
    loaded = config.load("smoke", [*BASE, *CASES["nesterov"], f"data.root={root}", "capture=auto"])
    p = prepare.prepare(loaded, world, Path(run), fresh=False)
    reason = capture.obstacle(loaded, p.state)
    assert not isinstance(make_trainer(p), CapturedTrainer)
    if p.run:
        p.run.close()
    return reason
