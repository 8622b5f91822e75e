"""1 rank against 2 and 3 at the same global batch: the same samples, the same parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.training.parallel.world import World
from tests.product import RunBegun
from tests.ranks import on_ranks
from tests.runs import small

pytestmark = pytest.mark.promise("same-weights")

STRATEGIES = ["ddp", "flat"]  # test_sync_contract.py holds them all
UNEQUAL = ["global_batch_size=25", "uneven=weight", "lr=0.002"]
VARIANTS: dict[str, list[str]] = {
    "plain": [],
    "unequal parts": UNEQUAL,
    "unequal parts in micro-batches": [*UNEQUAL, "micro_batch_size=3"],
    "summed and clipped in micro-batches": [*UNEQUAL, "loss.reduction=sum", "optim.clip=3", "micro_batch_size=5"],
    "nesterov": ["optim.name=nesterov", "optim.bias_lr_factor=4", "weight_decay=0.01"],
    "several buckets, not resident": ["sync.bucket_mb=0.001", "data.resident=never"],
}


def _twenty_steps(world: World, data_root: str, folder: str) -> dict[str, Any]:
    """The parameters after 20 steps of every strategy and variant, and the ids of every global batch."""
    results: dict[str, Any] = {}
    for strategy in STRATEGIES:
        for name, changes in VARIANTS.items():
            values = dict(change.split("=", 1) for change in (f"sync.name={strategy}", "ema.decay=0", *changes))
            words = small(data_root, **values)
            with RunBegun(world, Path(folder) / f"{world.size}-{strategy}-{name.replace(' ', '-')}", *words) as run:
                ids = [run.step(number) for number in range(20)]
                results[f"{strategy}, {name}"] = (run.weights(), ids)
    return results


@pytest.fixture(scope="module")
def by_size(tmp_path_factory: pytest.TempPathFactory, data_root: Path) -> dict[int, list[dict[str, Any]]]:
    folder = str(tmp_path_factory.mktemp("runs"))
    return {size: on_ranks(_twenty_steps, size, str(data_root), folder, timeout=240) for size in (1, 2, 3)}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_and_samples_do_not_depend_on_the_world_size(by_size: Any, strategy: str, name: str) -> None:
    case = f"{strategy}, {name}"
    expected, ids = by_size[1][0][case]
    for size in (2, 3):
        for number, rank in enumerate(by_size[size]):
            place = f"sync.name={strategy}, rank {number} of {size}"
            off = float((rank[case][0] - expected).abs().max())
            assert off < 1e-10, f"{place}: {name}: off by {off:.3g}"
            assert torch.equal(rank[case][0], by_size[size][0][case][0]), f"{place} is not rank 0, to the bit"
        for step, whole in enumerate(ids):
            assert torch.equal(torch.cat([rank[case][1][step] for rank in by_size[size]]), whole), (size, step)


def test_micro_batches_train_what_the_whole_batch_trains(by_size: Any) -> None:
    """A factor that all world sizes share would show nowhere else. 25 samples divide into neither two nor three equal pieces."""
    whole, pieces = (by_size[1][0][f"flat, {case}"][0] for case in ("unequal parts", "unequal parts in micro-batches"))
    assert (whole - pieces).abs().max() < 1e-12
    assert (whole - by_size[1][0]["flat, plain"][0]).abs().max() > 1e-4, "it is another run"
