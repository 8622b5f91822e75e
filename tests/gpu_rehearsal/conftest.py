from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
import torch

from tests.gpu_rehearsal.rehearsal import trained

OnCpu: TypeAlias = Callable[..., "dict[str, torch.Tensor]"]
"""`on_cpu(sync__name="ddp")`: the final tensors of the same run on the CPU of a machine without a GPU; computed once a session."""


@pytest.fixture(scope="session")
def on_cpu(tmp_path_factory: pytest.TempPathFactory, data_root: Path) -> OnCpu:
    states: dict[str, dict[str, torch.Tensor]] = {}

    def state(ranks: int = 2, steps: int = 8, **changes: object) -> dict[str, torch.Tensor]:
        key = json.dumps([ranks, steps, changes], default=str, sort_keys=True)
        if key not in states:
            folder = tmp_path_factory.mktemp("cpu")
            options: dict[str, object] = {"devices": 0, "ranks": ranks}
            states[key] = trained(folder, data_root, steps=steps, options=options, **{**changes, "device": "cpu"})[1]
        return states[key]

    return state
