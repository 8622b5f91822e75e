"""1 rank against 2 and 3 at the same global batch: the same samples, the same parameters."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.training import config
from lockstep.training.parallel.world import World
from lockstep.training.run import prepare
from lockstep.training.run.recipe import make_trainer
from tests.ranks import on_ranks

STRATEGIES = ["ddp", "flat"]  # test_sync_contract.py holds them all
VARIANTS: dict[str, list[str]] = {
    "plain": [],
    "unequal parts": ["global_batch_size=25", "uneven=weight"],
    "summed loss, clipped": ["loss.reduction=sum", "optim.clip=3", "lr=0.002"],
    "micro-batches": ["accumulate=3"],
    "nesterov": ["optim.name=nesterov", "optim.bias_lr_factor=4", "weight_decay=0.01"],
    "several buckets": ["sync.bucket_mb=0.001"],
    "not resident": ["data.resident=never"],
    "channels_last": ["channels_last=true"],
}


def _twenty_steps(world: World, base: list[str], run: str) -> dict[str, Any]:
    """The parameters after 20 steps of every strategy and variant, and the ids of every global batch."""
    found: dict[str, Any] = {}
    for strategy in STRATEGIES:
        for name, changes in VARIANTS.items():
            changed = {item.partition("=")[0] for item in changes}
            kept = [item for item in base if item.partition("=")[0] not in changed]
            loaded = config.load("smoke", [*kept, f"sync.name={strategy}", *changes])
            directory = Path(run) / f"{world.size}-{strategy}-{name.replace(' ', '-')}"
            p = prepare.prepare(loaded, world, directory, fresh=False)
            trainer, ids = make_trainer(p), []
            for number in range(20):
                epoch, step = divmod(number, p.loader.steps_per_epoch)
                batch = p.loader.resident_batch(epoch, step) if p.loader.resident else p.loader.host_batch(epoch, step)
                ids.append(p.loader.ids(epoch, step)[0])
                p.state.cursor.epoch, p.state.cursor.step = epoch, step
                trainer.step(batch)
            weights = torch.cat([parameter.detach().reshape(-1) for parameter in p.state.model.parameters()])
            found[f"{strategy}, {name}"] = (weights, ids, p.state.sync.bytes_sent)
            if p.run:
                p.run.close()
    return found


@pytest.fixture(scope="module")
def by_size(tmp_path_factory: pytest.TempPathFactory, data_root: Path) -> dict[int, list[dict[str, Any]]]:
    base = [
        f"data.root={data_root}", "data.source=synthetic", "data.options={n: 192, n_test: 50, size: 8, noise: 1.5}",
        "data.num_shards=3", "augment.crop=1", "augment.flip=random", "model=tests.nets:SmallConv", "model_options={}",
        "global_batch_size=24", "uneven=drop", "precision=float64", "ema.decay=0",
        "loss.reduction=mean", "optim.name=sgd", "lr=0.05", "bias_lr_factor=1", "weight_decay=0", "schedule=[]",
    ]  # fmt: skip
    run = str(tmp_path_factory.mktemp("runs"))
    return {size: on_ranks(_twenty_steps, size, base, run, timeout=240) for size in (1, 2, 3)}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", [f"{strategy}, {name}" for strategy in STRATEGIES for name in VARIANTS])
def test_parameters_and_samples_do_not_depend_on_the_world_size(by_size: Any, case: str, size: int) -> None:
    expected, ids, _ = by_size[1][0][case]
    for rank in by_size[size]:
        assert (rank[case][0] - expected).abs().max() < 1e-10
        assert torch.equal(rank[case][0], by_size[size][0][case][0])  # the replicas themselves, to the bit
    for step, whole in enumerate(ids):
        assert torch.equal(torch.cat([rank[case][1][step] for rank in by_size[size]]), whole)


def test_the_variants_are_not_all_the_same_run(by_size: Any) -> None:
    weights = [by_size[1][0][f"flat, {name}"][0] for name in ("plain", "summed loss, clipped", "nesterov")]
    assert all((a - b).abs().max() > 1e-4 for a, b in itertools.pairwise(weights))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_layout_changes_no_number(by_size: Any, strategy: str) -> None:
    for size in (1, 2, 3):
        plain, other = (by_size[size][0][f"{strategy}, {name}"][0] for name in ("plain", "channels_last"))
        assert (plain - other).abs().max() < 1e-10


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bytes_sent_are_the_gradient_once_a_step(by_size: Any, strategy: str) -> None:
    weights, _, sent = by_size[2][0][f"{strategy}, plain"]
    assert sent == 20 * weights.numel() * 8
    assert by_size[1][0][f"{strategy}, plain"][2] == 0


def _initial(world: World, base: list[str], run: str) -> dict[str, dict[str, torch.Tensor]]:
    weights = {}
    for init in ("broadcast", "seed"):
        loaded = config.load("smoke", [*base, f"init={init}"])
        p = prepare.prepare(loaded, world, Path(run) / f"{init}{world.size}", fresh=False)
        weights[init] = {name: tensor.clone() for name, tensor in p.state.model.state_dict().items()}
        if p.run:
            p.run.close()
    return weights


def test_both_ways_to_begin_give_the_same_weights_and_whitening_on_every_rank(data_root: Path, tmp_path: Path) -> None:
    found = on_ranks(_initial, 2, [f"data.root={data_root}"], str(tmp_path))
    first = found[0]["broadcast"]
    assert float(first["whitening.weight"].abs().sum()) > 0
    for rank in found:
        for weights in rank.values():
            assert all(torch.equal(weights[name], tensor) for name, tensor in first.items())


def _scores(world: World, root: str, run: str) -> list[tuple[int, int, float]]:
    from lockstep.training.evaluate.evaluator import Evaluator

    scores = []
    for n_test, batch in ((50, 7), (2, 512), (101, 16)):
        assignments = [
            f"data.root={root}", "data.source=synthetic", f"data.options={{n: 64, n_test: {n_test}, size: 8}}",
            "model=tests.nets:SmallConv", "model_options={}", f"evaluate.batch_size={batch}", "precision=float64",
        ]  # fmt: skip
        p = prepare.prepare(config.load("smoke", assignments), world, Path(run) / f"{world.size}-{n_test}", fresh=False)
        score = Evaluator(p.config, world, p.manifest).score(p.state.model, {})
        assert score is not None
        scores.append((score.correct, score.count, score.loss))
        if p.run:
            p.run.close()
    return scores


def test_each_test_image_is_counted_once_at_every_world_size(data_root: Path, tmp_path: Path) -> None:
    found = {size: on_ranks(_scores, size, str(data_root), str(tmp_path)) for size in (1, 2, 3)}
    assert [count for _, count, _ in found[1][0]] == [50, 2, 101]
    for size in (2, 3):
        for rank in found[size]:
            for (correct, count, loss), (correct1, count1, loss1) in zip(rank, found[1][0]):
                assert (correct, count) == (correct1, count1) and abs(loss - loss1) < 1e-12


def _agreeing(world: World) -> tuple[str, str]:
    from lockstep.training.contract import UserError
    from lockstep.training.parallel.agreement import raise_together
    from lockstep.training.parallel.exchange import all_gather_trees, broadcast_tree, gather_trees

    assert all_gather_trees({"r": torch.arange(world.rank)}, world)[1]["r"].tolist() == [0]
    assert broadcast_tree({"from": world.rank}, world, source=1) == {"from": 1}
    gathered = gather_trees([world.rank] * (world.rank + 1), world)
    assert gathered == ([[0], [1, 1]] if world.leader else None)
    raise_together(None, world)
    messages = []
    for error in (UserError("no data") if world.rank == 1 else None, ValueError("a bug") if world.leader else None):
        try:
            raise_together(error, world)
        except (UserError, RuntimeError) as caught:
            messages.append(f"{type(caught).__name__}: {caught}")
    return messages[0], messages[1]


def test_an_error_on_one_rank_stops_all_with_its_name() -> None:
    assert on_ranks(_agreeing, 2) == [("UserError: rank 1: no data", "RuntimeError: rank 0: a bug")] * 2


def _halves(world: World, base: list[str], run: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for precision in ("float32", "bfloat16", "float16"):
        loaded = config.load("smoke", [*base, f"precision={precision}"])
        p = prepare.prepare(loaded, world, Path(run) / precision, fresh=False)

        def weights(model: torch.nn.Module = p.state.model) -> torch.Tensor:
            return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])

        begun, trainer = weights(), make_trainer(p)
        for number in range(20):
            p.state.cursor.epoch, p.state.cursor.step = divmod(number, p.loader.steps_per_epoch)
            trainer.step(p.loader.resident_batch(p.state.cursor.epoch, p.state.cursor.step))
        found[precision] = (
            begun,
            weights(),
            {t.dtype for t in [*p.state.model.parameters(), p.state.model.head.weight.grad]},
        )
        if p.run:
            p.run.close()
    return found


def test_half_precision_goes_the_way_of_single_precision(data_root: Path, tmp_path: Path) -> None:
    """Weights, gradients and their sums stay float32; convolutions and products are rounded."""
    base = [
        f"data.root={data_root}", "data.source=synthetic", "data.options={n: 192, n_test: 50, size: 8, noise: 1.5}",
        "data.num_shards=3", "model=tests.nets:SmallConv", "model_options={}", "global_batch_size=24", "uneven=drop",
        "ema.decay=0", "loss.reduction=mean", "optim.name=sgd", "lr=0.05", "bias_lr_factor=1", "weight_decay=0", "schedule=[]",
    ]  # fmt: skip
    for rank in on_ranks(_halves, 2, base, str(tmp_path)):
        begun, exact, _ = rank["float32"]
        for precision, bound in (("bfloat16", 0.1), ("float16", 0.02)):
            same, rounded, types = rank[precision]
            assert torch.equal(begun, same) and types == {torch.float32}
            off = float((rounded - exact).norm() / (exact - begun).norm())
            assert 0 < off < bound, (precision, off)
