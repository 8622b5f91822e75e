from __future__ import annotations

from typing import Any

import torch

from lockstep.training.run import run
from tests import product


def test_settings_of_torchs_arithmetic_are_those_of_the_run() -> None:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    fast, exact = "tf32", "ieee"
    flags: list[tuple[Any, str]] = [
        (matmul, "fp32_precision"), (cudnn.conv, "fp32_precision"), (cudnn, "benchmark"), (cudnn, "deterministic"),
    ]  # fmt: skip
    before = [getattr(owner, name) for owner, name in flags]
    changed_settings = ["tf32=true", "cudnn_benchmark=true"]
    try:
        for words, expected in ((changed_settings, [fast, fast, True, False]), ([], [exact, exact, False, True])):
            run._arithmetic(product.recipe("smoke", *words))
            assert [getattr(owner, name) for owner, name in flags] == expected
        for deterministic in (True, False):
            run._arithmetic(product.recipe("smoke", f"deterministic={deterministic}"))
            assert torch.are_deterministic_algorithms_enabled() is deterministic
    finally:
        torch.use_deterministic_algorithms(False)
        for (owner, name), value in zip(flags, before):
            setattr(owner, name, value)
