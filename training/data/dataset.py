"""The built-in sources as a torch `Dataset`, for scripts of one's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.data import Dataset

from lockstep.training.data import sources


class SourceDataset(Dataset[tuple[Any, int]]):
    """(sample, label) of a source by its name: `SourceDataset("cifar10", "train", "data", download=True)`.

    A sample is a float32 image [c, h, w] in 0 … 1, or a float32 feature vector [f], after `transform`. `classes` are the
    names of the labels. Where several processes of a node begin at once, one of them downloads.

    Args:
        source: a value of `data.source`, e.g. `digits`, `cifar10`, `images` or `package.module:function`, which is called.
        root: folder of the data, of the sources that need one.
        options: of the source, e.g. `{"n": 100}`.
        transform: is called with each sample.

    Raises:
        UserError: there is no such source, or its data is missing or damaged.
    """

    def __init__(
        self, source: str, split: Literal["train", "test"] = "train", root: Path | str = "data", download: bool = False,
        options: dict[str, Any] | None = None, transform: Callable[[torch.Tensor], Any] | None = None,
    ) -> None:  # fmt: skip
        raw = sources.load_once(source, Path(root), download, options or {})
        samples, labels = raw.train if split == "train" else raw.test
        self.samples, self.labels = torch.as_tensor(samples), torch.as_tensor(labels)
        self.classes, self.transform = raw.classes, transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        sample = self.samples[index]
        if sample.ndim == 3:
            sample = sample.permute(2, 0, 1).float() / 255
        return (self.transform(sample) if self.transform else sample), int(self.labels[index])
