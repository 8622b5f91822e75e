"""The job that all contestants of `survivors.py` train: its samples, its network, and what each process tells. Imports nothing of ours."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

STEPS = int(os.environ.get("SURVIVORS_STEPS", "110"))
RANKS = 4
BATCH = 64
CHECKPOINT_STEPS = 5
SEED = 1
_FEATURES, _WIDTH, _CLASSES = 64, 384, 10


class Samples(Dataset[Any]):
    """One epoch of `STEPS` global batches: (input, class, number of the sample)."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(SEED)
        self.x = torch.randn(STEPS * BATCH, _FEATURES, generator=generator)
        self.y = torch.randint(0, _CLASSES, (STEPS * BATCH,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.x[index] + 0.1 * torch.randn(_FEATURES), self.y[index], index


def network() -> nn.Module:
    torch.manual_seed(SEED)
    first = nn.Linear(_FEATURES, _WIDTH), nn.BatchNorm1d(_WIDTH), nn.ReLU(), nn.Dropout(0.2)
    return nn.Sequential(*first, nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _CLASSES))


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


class Told:
    """Lines of this process, each written at once: a kill loses none that was said."""

    def __init__(self, package: str = "torch") -> None:
        path = os.path.join(os.environ["SURVIVORS_TOLD"], f"{os.getpid()}.jsonl")
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        self._ready: object = None
        with open("/proc/self/stat") as file:
            born = int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        self.say("begun", rank=int(os.environ["RANK"]), born=born, version=f"{package} {version(package)}")

    def say(self, what: str, **values: Any) -> None:
        os.write(self._file, (json.dumps({"t": time.monotonic(), "what": what, **values}) + "\n").encode())

    def ready(self, attempt: int = 0) -> None:
        """The first batch of an attempt is there."""
        if self._ready != attempt:
            self._ready = attempt
            self.say("ready")

    def end(self, model: nn.Module) -> None:
        digest = hashlib.sha256()
        for parameter in model.parameters():  # not the batch statistics, which are each rank's own under DDP
            digest.update(parameter.detach().numpy().tobytes())
        self.say("weights", sha256=digest.hexdigest())
