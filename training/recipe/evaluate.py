"""Exact evaluation: every test image is counted once, at every world size, without padding. And `training evaluate`: the score
of a run's newest checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from .. import config as configuration
from .. import models
from ..checkpoint import weights
from ..config import Config, settings
from ..contract import UserError
from ..data import sources
from ..data.augment import check_settings, draw_keys, normalise
from ..data.batches import Stored
from ..data.shard_writer import verified
from ..data.shards import Manifest, Samples
from ..models.arithmetic import autocast, real_type
from ..observe.rundir import read_run
from ..parallel.exchange import failing_together
from ..parallel.world import World
from ..run.evaluation import summed


@dataclass(frozen=True, slots=True)
class Score:
    correct: int
    count: int
    loss: float
    """Mean cross entropy, without smoothing."""
    classes: list[tuple[int, int]]
    """(correct, count) of each class."""

    @property
    def accuracy(self) -> float:
        return self.correct / self.count

    def by_class(self, names: list[str]) -> dict[str, float | None]:
        """The accuracy of each class; None for a class that the test split does not have."""
        return {name: correct / count if count else None for name, (correct, count) in zip(names, self.classes)}


class Evaluator:
    """Scores weights on the test split, whose files the ranks of a node have verified."""

    def __init__(self, config: Config, world: World, manifest: Manifest) -> None:
        self.config, self.world, self.classes = config, world, manifest.classes
        self._samples = manifest.count("test")
        self._count = math.ceil(self._samples / config.evaluate.batch_size)
        self._stored = Stored(Samples.open(manifest, "test"), world, config.seed)

    def _batches(self, numbers: list[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        size, keys = self.config.evaluate.batch_size, draw_keys(self.config.seed, 0)
        for number in numbers:
            batch = self._stored.batch(torch.arange(number * size, min((number + 1) * size, self._samples)), keys)
            batch = batch.to(self.world.device)
            yield batch.images[batch.rows], batch.labels

    def score(self, model: nn.Module, boundary: Callable[[], object] = lambda: None) -> Score:
        """The score over the whole test split, the same on every rank. Collective.

        Args:
            model: in evaluation mode.
            boundary: called after each batch, on every rank the same number of times.
        """

        config, dtype = self.config, real_type(self.config.precision)

        def logits(view: torch.Tensor) -> torch.Tensor:
            with autocast(config.precision, self.world.device):
                output: torch.Tensor = model(view)
            return output.to(dtype)

        def sums(images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            x = normalise(images, config.data, dtype, config.channels_last is True)
            output = augmented(logits, x, config.evaluate.tta)
            hits = (output.argmax(1) == labels).double()
            none = torch.zeros(len(self.classes), dtype=torch.float64, device=output.device)
            return {
                "loss": F.cross_entropy(output, labels, reduction="sum"),
                "correct": none.index_add(0, labels, hits),
                "count": none.index_add(0, labels, torch.ones_like(hits)),
            }

        totals = summed(sums, self._count, self._batches, self.world, self.config.seed, boundary)
        rights, counts = totals["correct"].long(), totals["count"].long()
        classes = list(zip(rights.tolist(), counts.tolist()))
        return Score(int(rights.sum()), int(counts.sum()), float(totals["loss"] / counts.sum()), classes)


def augmented(logits: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, tta: str) -> torch.Tensor:
    """Logits [b, classes] of images [b, c, h, w], averaged over the views of `tta`.

    Views and weights of `flip_shift` from KellerJordan/cifar10-airbench.
    """
    if tta == "none":
        return logits(x)

    def mirrored(view: torch.Tensor) -> torch.Tensor:
        return (logits(view) + logits(view.flip(-1))) / 2

    if tta == "flip":
        return mirrored(x)
    height, width = x.shape[-2:]
    padded = F.pad(x, (1, 1, 1, 1), mode="reflect")
    moved = mirrored(padded[..., :height, :width]) + mirrored(padded[..., 2:, 2:])
    return mirrored(x) / 2 + moved / 4


def config_of(run_dir: Path, assignments: list[str], trust_model: bool = False) -> tuple[Config, str | None]:
    """Returns the run's config with these changes, and the checksum of its data.

    Raises:
        UserError: there is no such run; or it names a user's model or data function, which runs code, without
            `trust_model`.
    """
    run = read_run(run_dir)
    if not isinstance(run["config"], Config):
        raise UserError(
            f"{run_dir} holds a run of {run['config'].script}, not of a recipe: evaluating it needs its own script"
        )
    values = settings.override(configuration.to_dict(run["config"]), Config, assignments)
    config = settings.build(Config, values, f"{run_dir} with --set")
    model, source = config.model, config.data.source
    if not trust_model and not models.ours(model):
        raise UserError(
            f"{run_dir} names the model {model}, and importing it runs code: add --trust-model if you trust the author of the run"
        )
    if not trust_model and not sources.ours(source) and config.data.shards is None:
        raise UserError(
            f"{run_dir} names the source {source}, and reading it runs code: add --trust-model if you trust the author of the run, or "
            "name its shards with --set data.shards=DIR"
        )
    return config, run["data"].get("checksum")


def score_run(run_dir: Path, config: Config, checksum: str | None, world: World) -> Score:
    """Scores the run's newest checkpoint on the test split. Collective. Raises `UserError`."""
    with failing_together(world):
        tensors = weights.from_run(run_dir)[0]
    manifest = verified(config.data, world, ["test"])
    with failing_together(world):
        check_settings(config, manifest.shape)
        if checksum is not None and checksum != manifest.checksum:
            raise UserError(f"{manifest.place} holds other data than {run_dir} was trained on: restore it")
        model = models.build(config.model, config.model_options, len(manifest.classes), manifest.shape)
        weights.assign(model, tensors, run_dir)
        model.to(device=world.device, dtype=real_type(config.precision))
        evaluator = Evaluator(config, world, manifest)
    return evaluator.score(model.eval())
