"""What a recipe's loop runs on: its data, its model, and the weights that it begins with.

Each part that can fail on one rank alone runs in `failing_together`, so that either all ranks go on or all stop with one sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import generators, models, sync
from ..checkpoint import weights
from ..config import Config
from ..contract import MOST_NAMED, UserError, named
from ..data.augment import augment, check_settings, draw_keys, normalise
from ..data.batches import Batches, Division, Stored
from ..data.order import Parts
from ..data.shard_writer import prepare as prepare_shards
from ..data.shards import Manifest, Samples
from ..models.arithmetic import arithmetic_of, evaluating, form_on, no_compiler, real_type
from ..parallel.exchange import (
    broadcast_tree,
    failing_together,
    gather_trees,
    same_on_all,
    waiting_for_all,
)
from ..parallel.world import World
from ..session import Session

RATE, COMPILED_SAVES, COMPILING = 1e14, 0.2, 40.0
"""Operations a second of a training step in half precision, the share of its time that a compiled network saves, and the seconds that it
takes to compile one: of speedrun and bag_of_tricks on an H100, rounded so that short trainings are not compiled."""


@dataclass(frozen=True, slots=True)
class Prepared:
    manifest: Manifest
    global_batch: int
    """Samples a step, all ranks together."""
    model: nn.Module
    """With the weights that the run begins with."""
    batches: Batches

    @property
    def samples(self) -> Samples:
        """The training samples."""
        assert isinstance(self.batches.source, Stored)
        return self.batches.source.samples


def in_form(run: Session, config: Config, begun: Mapping[str, Any]) -> Config:
    """The config with what `auto` stands for on this device, but of `compile`. Collective.

    Args:
        begun: what the run has decided at its first start (`Run.form`).
    """
    return _decided(run, config, begun, **form_on(run.device))


def with_compiler(run: Session, config: Config, prepared: Prepared, begun: Mapping[str, Any]) -> Config:
    """The config with what `compile: auto` stands for. Collective.

    Args:
        begun: as of `in_form`.
    """

    def repays() -> bool:
        world, division = run.world, prepared.batches.division
        compiles = sync.build(config.sync).compiles and not config.exact
        if world.device.type != "cuda" or not compiles or no_compiler(world.device):
            return False
        samples = config.epochs * division.steps * prepared.global_batch / world.size
        operations = 3 * arithmetic_of(prepared.model, example(run, config, prepared)) * samples
        return operations / RATE * COMPILED_SAVES > COMPILING

    return _decided(run, config, begun, compile=repays)


def _decided(run: Session, config: Config, begun: Mapping[str, Any], **choices: Callable[[], Any]) -> Config:
    """The config where those of these settings that are `auto` have what the run began with, else the choice of rank 0. Collective."""
    wanted = [name for name in choices if getattr(config, name) == "auto"]
    if not wanted:
        return config
    with failing_together(run.world):
        chosen = {name: begun[name] if name in begun else choices[name]() for name in wanted}
    return config.model_copy(update=broadcast_tree(chosen, run.world))


def prepare(run: Session, config: Config) -> Prepared:
    """The shards, made where there are none, the same on every rank and of this run; the batches; the model. Collective.

    Raises:
        UserError: on all ranks, where any of them cannot go on.
    """
    world = run.world
    with waiting_for_all(world, "prepare the data", config.data.prepare_timeout, config.collective_timeout):
        manifest = prepare_shards(config.data)
        files = [*manifest.splits["train"], *manifest.splits["test"]]  # which the ranks of a node share
        mine = files[world.local_rank :: world.local_size]
        # A hash leaves Python's lock. The files of a bucket come one after another.
        from_bucket = "://" in (config.data.shards or "")
        with ThreadPoolExecutor(1 if from_bucket else torch.get_num_threads()) as pool:
            for _ in pool.map(lambda shard: manifest.file(shard, config.data.verify), mine):
                pass
    with failing_together(world):
        check_settings(config, manifest.shape)
    _check_same_data(manifest, run.facts.get("data"), world)
    size = run.facts.get("global_batch_size") or config.global_batch_size or (config.batch_size or 0) * world.size
    run.facts.update(global_batch_size=size, data={"name": manifest.source, "checksum": manifest.checksum})
    with failing_together(world):
        strategy = sync.build(config.sync)
        if config.compile is True and not strategy.compiles:
            raise strategy.refuse("does not take compile=true", "set compile=false, or use sync.name=flat")
        model = _build(config, world, manifest)
        batches = _batches(config, world, manifest, size, models.batch_multiple(model), strategy.batch_parts)
    prepared = Prepared(manifest, size, model, batches)
    with failing_together(world):
        if not run.resumed and run.leader:
            _initial_weights(config, prepared)
    return prepared


def _check_same_data(manifest: Manifest, saved: dict[str, str] | None, world: World) -> None:
    """Every rank has the data that the run began with. Collective."""
    if not same_on_all(manifest.checksum, world):
        checksums = gather_trees(manifest.checksum, world)
        raise UserError(broadcast_tree(None if checksums is None else _different_data(checksums), world))
    if saved and saved.get("checksum") != manifest.checksum:
        raise UserError(
            f"{manifest.place} holds other data than this run began with (sha256 {manifest.checksum[:12]}…, "
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


def _batches(
    config: Config, world: World, manifest: Manifest, global_batch: int, multiple: int, parts: Parts | None = None
) -> Batches:
    settings, count = config.data, manifest.count("train")
    division = Division(
        count, global_batch, world, config.seed, uneven=config.uneven, shuffle=settings.shuffle != "none",
        multiple=multiple, parts=parts,
    )  # fmt: skip
    samples = Samples.open(manifest, "train", 0, count)
    return Batches(Stored(samples, world, config.seed, settings.resident, settings.prefetch), division)


def _build(config: Config, world: World, manifest: Manifest) -> nn.Module:
    # Rank 0's draw counts; the others differ, so that a missing broadcast shows.
    generators.seed(config.seed + world.rank)
    model = models.build(config.model, config.model_options, len(manifest.classes), manifest.shape)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"model {config.model} has no parameter that requires a gradient: there is nothing to train")
    if not model.training:
        model.train()
    if not models.ours(config.model):
        _check_outputs(model, config.model, manifest)
    model.to(device=world.device, dtype=real_type(config.precision))
    return model.to(memory_format=torch.channels_last) if config.channels_last is True else model


@torch.no_grad()
def _check_outputs(model: nn.Module, name: str, manifest: Manifest) -> None:
    """One score a class, for two samples: else the first step would fail with a message of the loss function."""
    shape = manifest.shape
    count = 2 * models.batch_multiple(model)
    samples = torch.zeros(count, shape[2], *shape[:2]) if len(shape) == 3 else torch.zeros(count, *shape)
    expected = f"[n, {len(manifest.classes)}] (n samples, one score a class)"
    try:
        with evaluating(model):
            output = model(samples)
    except Exception:  # noqa: BLE001 - the first step fails in the same way, with the place in the user's own code
        return
    scores = isinstance(output, torch.Tensor) and output.ndim == 2 and len(output) == count
    if not scores or output.shape[1] < len(manifest.classes):  # more than needed do no harm
        description = (
            f"of shape {list(output.shape)}" if isinstance(output, torch.Tensor) else f"a {type(output).__name__}"
        )
        raise UserError(f"model {name} gives {description} for {count} samples, expected {expected}")


def _initial_weights(config: Config, prepared: Prepared) -> None:
    """Whitening and the like happen once, on rank 0; `init_from` is read there too. All ranks then get its weights."""
    model = prepared.model
    if config.init_from is not None:
        path = Path(config.init_from)
        weights.assign(model, weights.read(path), path)
    elif callable(whiten := getattr(model, "prepare", None)):
        images = _first_images(prepared, 10_000).to(next(model.parameters()).device)
        whiten(normalise(images, config.data, real_type(config.precision), False))


def _first_images(prepared: Prepared, count: int) -> torch.Tensor:
    """Of the training images, uint8 [n, h, w, c], or the vectors."""
    return prepared.samples.take(torch.arange(min(count, len(prepared.samples))))[0]


def example(run: Session, config: Config, prepared: Prepared) -> torch.Tensor:
    """A few samples as the network will see them."""
    images = _first_images(prepared, max(prepared.batches.division.multiple, 2)).to(run.device)
    rows = torch.arange(len(images), device=images.device)
    dtype = real_type(config.precision)
    return augment(images, rows, rows, config.data, draw_keys(config.seed, 0), dtype, config.channels_last is True)


def describe(run: Session, config: Config, prepared: Prepared) -> None:
    """Lines about how the batches are divided."""
    division = prepared.batches.division
    if config.log.score_every:
        run.print(
            f"model={config.model} global_batch_size={prepared.global_batch} optim={config.optim.name} lr={config.optim.lr:g} "
            f"sync={config.sync.name} uneven={config.uneven}, {division.steps} steps an epoch"
        )
    run.summary.update(global_batch_size=prepared.global_batch, data=run.facts["data"])
