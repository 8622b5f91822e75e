"""Everything between a config and the first step: run directory, data, model, replicas, and the state to go on from.

Each part that can fail on one rank alone runs in `failing_together`, so that either all ranks go on or all stop with one sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lockstep.training import models, optim, sync
from lockstep.training.checkpoint import generators, weights
from lockstep.training.checkpoint.state import Cursor, TrainState, scatter
from lockstep.training.config import Config
from lockstep.training.contract import VERSION, UserError
from lockstep.training.data.augment import augment, check_settings, draw_keys, normalise
from lockstep.training.data.loader import Loader
from lockstep.training.data.shards import Manifest, Samples
from lockstep.training.data.shards import prepare as prepare_shards
from lockstep.training.data.shards import verify as verify_shards
from lockstep.training.models.arithmetic import compiled, real_type
from lockstep.training.observe import trackers
from lockstep.training.observe.clock import step_clock
from lockstep.training.observe.console import Console
from lockstep.training.optim.ema import Ema
from lockstep.training.optim.loss_scaler import LossScaler
from lockstep.training.parallel.exchange import (
    MOST_NAMED,
    broadcast_tree,
    failing_together,
    gather_trees,
    named,
    same_on_all,
    waiting_for_all,
)
from lockstep.training.parallel.world import World
from lockstep.training.run.context import Opened, RunContext, opened
from lockstep.training.run.resume import load, misfits_explained, newest_here, newest_of_all


@dataclass(slots=True, kw_only=True)
class Prepared(RunContext):
    """An attempt at a recipe's run."""

    config: Config
    manifest: Manifest
    loader: Loader
    network: nn.Module
    """The model as the sync strategy wrapped it, to be called in a step."""
    global_batch: int

    @property
    def steps_planned(self) -> int:
        return self.config.epochs * self.loader.steps_per_epoch

    @property
    def steps_done(self) -> int:
        return self.state.cursor.epoch * self.loader.steps_per_epoch + self.state.cursor.step

    @property
    def samples_done(self) -> int:
        """Samples trained so far, all ranks together."""
        cursor, loader = self.state.cursor, self.loader
        an_epoch = loader.steps_per_epoch * self.global_batch
        if self.config.uneven != "pad":
            an_epoch = min(an_epoch, loader.total)
        return cursor.epoch * an_epoch + min(cursor.step * self.global_batch, an_epoch)

    @property
    def complete(self) -> bool:
        return self.state.cursor.epoch >= self.config.epochs

    @property
    def data(self) -> dict[str, str]:
        return {"name": self.manifest.source, "checksum": self.manifest.checksum}


def prepare(config: Config, world: World, run_dir: Path, fresh: bool | str) -> Prepared:
    """Collective. Raises `UserError` on all ranks where any of them cannot go on."""
    with opened(config, world, run_dir, fresh) as place:
        return _prepare(config, world, place)


def _prepare(config: Config, world: World, place: Opened) -> Prepared:
    run, exporter = place.run, place.exporter
    with failing_together(world):
        own_checkpoint = newest_here(run, world, exporter.metrics)
    with waiting_for_all(world, "prepare the data", config.data.prepare_timeout, config.collective_timeout):
        manifest = Manifest.read(prepare_shards(config.data))
    with failing_together(world):
        check_settings(config, manifest.shape)
    identity = (
        (run.attempt, run.saved and run.saved["global_batch_size"], run.saved and run.saved["data"]) if run else None
    )
    attempt, saved_batch, saved_data = broadcast_tree(identity, world)
    _same_data(manifest, saved_data, world)
    own_files = config.data.shuffle == "shard"  # of the training split, which its rank verifies alone
    with failing_together(world):
        if config.data.verify:
            verify_shards(manifest, ("test",) if own_files else ("train", "test"), world.local_rank, world.local_size)
    with failing_together(world):
        model = _build_model(config, world, manifest)
        global_batch = saved_batch or config.global_batch_size or (config.batch_size or 0) * world.size
        loader = Loader(config, world, manifest, global_batch, models.batch_multiple(model), not own_files)
    source = newest_of_all(own_checkpoint, world)
    if config.init == "seed" and source is None:
        _check_same(model, world)  # as they were drawn: a file is read, and whitening done, on rank 0 alone
    with failing_together(world):
        _initial_weights(model, config, world, loader, resumed=source is not None)
        gathered = load(own_checkpoint) if own_checkpoint is not None and world.rank == source else None
    state, network = _replicate(model, config, world, loader, global_batch)
    state.history["attempts"] = attempt
    if source is not None:
        with failing_together(world), misfits_explained():
            scatter(gathered, state, source, resizable=config.data.shuffle != "shard")
    console = Console(config.log, world, config.epochs, loader.steps_per_epoch, config.log.score_every > 0)
    prepared = Prepared(
        config=config, world=world, run=run, attempt=attempt, state=state, console=console, exporter=exporter,
        manifest=manifest, loader=loader, network=network, global_batch=global_batch,
    )  # fmt: skip
    prepared.metrics.describe(
        recipe=config.recipe, sync=config.sync.name, world_size=world.size, version=VERSION, attempt=attempt,
        step=prepared.steps_done, planned=prepared.steps_planned, preemptions=state.history.get("preemptions", 0),
    )  # fmt: skip
    with failing_together(world):
        if run is not None:
            run.describe(config, world, global_batch, prepared.data, place.threads)
            if world.leader and not prepared.complete:
                trackers.attach(config, run, prepared.steps_done)
    if run is not None:
        if not prepared.complete:
            run.status(None, "running", prepared.steps_done)
        run.listeners.append(console.on_event)
    if slices := loader.describe_slices():
        prepared.event("slices", slices=slices)
        for part in slices:
            console.line(
                "rank {rank} keeps {samples} samples of its own: {batches} batches of {batch_size} an epoch, "
                "{left_out} left out".format(**part)
            )
    if config.log.score_every:
        console.line(
            f"model={config.model} global_batch_size={global_batch} optim={config.optim.name} lr={config.optim.lr:g} "
            f"sync={config.sync.name} uneven={config.uneven}, {loader.steps_per_epoch} steps an epoch"
        )
    console.line(f"{world.size} rank{'s' if world.size > 1 else ''} on {world.device.type}, {place.threads}")
    if (unequal := loader.describe_unequal_work()) is not None:
        console.line(unequal)
    if source is not None and not prepared.complete:
        prepared.event("resumed", step=prepared.steps_done, epoch=state.cursor.epoch, batch=state.cursor.step)
        console.line(
            f"Resuming at step {prepared.steps_done} (epoch {state.cursor.epoch + 1}, batch {state.cursor.step})"
        )
    return prepared


def _same_data(manifest: Manifest, saved: dict[str, str] | None, world: World) -> None:
    """Every rank has the data that the run began with. Collective."""
    if not same_on_all(manifest.checksum, world):
        checksums = gather_trees(manifest.checksum, world)
        raise UserError(broadcast_tree(None if checksums is None else _different_data(checksums), world))
    if saved and saved.get("checksum") != manifest.checksum:
        raise UserError(
            f"{manifest.directory} holds other data than this run began with (sha256 {manifest.checksum[:12]}…, "
            f"the run's {str(saved.get('checksum'))[:12]}…): restore it, or choose another --run-dir"
        )


def _different_data(checksums: list[str]) -> str:
    """Which ranks see which data, in the order of the lowest of them."""
    ranks: dict[str, list[int]] = {}
    for rank, checksum in enumerate(checksums):
        ranks.setdefault(checksum, []).append(rank)
    groups = [f"rank {named(group)}: {checksum[:12]}…" for checksum, group in ranks.items()]
    more = f" and {len(groups) - MOST_NAMED} more" if len(groups) > MOST_NAMED else ""
    return f"the ranks see different data: {', '.join(groups[:MOST_NAMED])}{more}"


def _build_model(config: Config, world: World, manifest: Manifest) -> nn.Module:
    # With `broadcast`, only rank 0's draw counts; the others draw differently, so that a missing broadcast shows.
    seed = config.seed if config.init == "seed" or world.leader else config.seed + world.rank
    generators.seed(seed)
    model = models.build(config.model, config.model_options, len(manifest.classes), manifest.shape)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"model {config.model} has no parameter that requires a gradient: there is nothing to train")
    if not models.ours(config.model):
        _check_outputs(model, config.model, manifest)
    generators.seed(config.seed + world.rank)  # what dropout draws differs by rank
    model.to(device=world.device, dtype=real_type(config.precision))
    return model.to(memory_format=torch.channels_last) if config.channels_last else model


@torch.no_grad()
def _check_outputs(model: nn.Module, name: str, manifest: Manifest) -> None:
    """One score a class, for two samples: else the first step would fail with a message of the loss function."""
    shape = manifest.shape
    count = 2 * models.batch_multiple(model)
    samples = torch.zeros(count, shape[2], *shape[:2]) if len(shape) == 3 else torch.zeros(count, *shape)
    was_training, expected = model.training, f"[n, {len(manifest.classes)}] (n samples, one score a class)"
    try:
        output = model.eval()(samples)
    except Exception:  # noqa: BLE001 - the first step fails in the same way, with the place in the user's own code
        return
    finally:
        model.train(was_training)
    scores = isinstance(output, torch.Tensor) and output.ndim == 2 and len(output) == count
    if not scores or output.shape[1] < len(manifest.classes):  # more than needed do no harm
        description = (
            f"of shape {list(output.shape)}" if isinstance(output, torch.Tensor) else f"a {type(output).__name__}"
        )
        raise UserError(f"model {name} gives {description} for {count} samples, expected {expected}")


def _initial_weights(model: nn.Module, config: Config, world: World, loader: Loader, resumed: bool) -> None:
    """Whitening and the like happen once, on rank 0; `init_from` is read there too. All ranks then get its weights."""
    if resumed:
        return
    if world.leader and config.init_from is not None:
        weights.load_into(model, Path(config.init_from))
    elif world.leader and callable(whiten := getattr(model, "prepare", None)):
        images = _first_images(loader.samples, 10_000).to(world.device)
        whiten(normalise(images, config.data, real_type(config.precision), False))


def _first_images(samples: Samples, count: int) -> torch.Tensor:
    return samples.take(torch.arange(samples.low, min(samples.low + count, samples.high)))[0]


def _check_same(model: nn.Module, world: World) -> None:
    """`init: seed` promises that every rank drew the same weights; frozen ones come from rank 0."""
    drawn = [p.detach().double().sum().item() for p in model.parameters() if p.requires_grad]
    if not same_on_all(drawn, world):
        other = broadcast_tree(drawn, world) != drawn
        raise RuntimeError(
            f"init=seed gave rank {world.rank} different weights from rank 0: use init=broadcast"
            if other
            else "init=seed gave a rank different weights from rank 0: use init=broadcast"
        )


def _replicate(
    model: nn.Module, config: Config, world: World, loader: Loader, global_batch: int
) -> tuple[TrainState, nn.Module]:
    with failing_together(world):
        strategy = sync.build(config.sync)
        strategy.check(config, world)
    network = strategy.wrap(model, world, _example(config, loader))
    if config.compile:
        with failing_together(world):
            network = compiled(network, world.device)
    optimizer = strategy.make_optimizer(_optimizer_of(config, global_batch, model))
    ema = Ema(model, config.ema.decay, config.ema.every, strategy.duplicate()) if config.ema.decay else None
    losses = torch.zeros(2, dtype=torch.float64, device=world.device)
    scaler = LossScaler(world.device) if config.precision == "float16" else None
    state = TrainState(world, model, optimizer, strategy, ema, Cursor(), step_clock(world.device), losses, {}, scaler)
    model.train()
    return state, network


def _optimizer_of(config: Config, global_batch: int, model: nn.Module) -> Callable[..., torch.optim.Optimizer]:
    return lambda parameters: optim.build(parameters, config, global_batch, model)


def _example(config: Config, loader: Loader) -> torch.Tensor:
    """A few samples as the network will see them."""
    first = loader.samples.low
    images = _first_images(loader.samples, max(loader.multiple, 2)).to(loader.world.device)
    rows = torch.arange(len(images), device=images.device)
    dtype = real_type(config.precision)
    return augment(images, rows, first + rows, config.data, draw_keys(config.seed, 0), dtype, config.channels_last)
