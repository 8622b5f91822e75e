"""Exact evaluation: every test image is counted once, at every world size, without padding."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from lockstep.training.config import Config
from lockstep.training.data.augment import normalise
from lockstep.training.data.batches import fits
from lockstep.training.data.order import bounds
from lockstep.training.data.shards import Manifest, Samples
from lockstep.training.models.arithmetic import autocast, real_type
from lockstep.training.parallel.exchange import reduced
from lockstep.training.parallel.world import World


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
    """Scores weights on the test split. A rank opens only the files of its contiguous part, and keeps them."""

    def __init__(self, config: Config, world: World, manifest: Manifest, verified: bool = False) -> None:
        """`verified`: the ranks of the node have verified the files of the test split already."""
        self.config, self.world, self.classes = config, world, manifest.classes
        count = manifest.count("test")
        low, high = bounds(count, world.rank, world.size)
        self.rounds = math.ceil(math.ceil(count / world.size) / config.evaluate.batch_size)
        """Batches of the longest part. Every rank makes this many rounds, so that collectives match."""
        self.samples = Samples.open(manifest, "test", low, high, config.data.verify and not verified)
        self.images, self.labels = torch.empty(0), torch.empty(0)
        if high > low:
            self.images, self.labels = self.samples.all()
            if fits(self.samples, world):
                self.images, self.labels = self.images.to(world.device), self.labels.to(world.device)

    @torch.no_grad()
    def score(self, model: nn.Module, boundary: Callable[[], object] = lambda: None) -> Score:
        """The score over the whole test split, the same on every rank. Collective.

        Args:
            model: in evaluation mode.
            boundary: called before each batch, on every rank the same number of times.
        """
        size, device = self.config.evaluate.batch_size, self.world.device
        loss = torch.zeros(1, dtype=torch.float64, device=device)
        correct, count = (torch.zeros(len(self.classes), dtype=torch.float64, device=device) for _ in range(2))
        for number in range(self.rounds):
            boundary()
            images = self.images[number * size : (number + 1) * size].to(device)
            labels = self.labels[number * size : (number + 1) * size].to(device)
            if not len(labels):
                continue
            logits = self._logits(model, images)
            hits = (logits.argmax(1) == labels).double()
            correct.index_add_(0, labels, hits)
            count.index_add_(0, labels, torch.ones_like(hits))
            loss += F.cross_entropy(logits, labels, reduction="sum")
        totals = reduced(torch.cat([loss, correct, count]).cpu(), self.world)
        rights, counts = totals[1:].view(2, -1).long()
        classes = list(zip(rights.tolist(), counts.tolist()))
        return Score(int(rights.sum()), int(counts.sum()), float(totals[0] / counts.sum()), classes)

    def _logits(self, model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        config = self.config
        x = normalise(images, config.data, real_type(config.precision), config.channels_last)

        def logits(view: torch.Tensor) -> torch.Tensor:
            with autocast(config.precision, self.world.device):
                output: torch.Tensor = model(view)
            return output.to(real_type(config.precision))

        return augmented(logits, x, config.evaluate.tta)


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
