from __future__ import annotations

import random

import pytest
import torch

from lockstep.training.checkpoint.kept import Kept
from lockstep.training.checkpoint.state import checked


def test_a_loss_that_is_no_number_is_no_damage() -> None:
    """A run with `nonfinite: ignore`, or whose evaluation alone overflows, goes on."""
    rank = {
        "rng": {"python": random.getstate(), "torch": torch.get_rng_state()}, "buffers": {}, "average_buffers": {},
        "losses": torch.zeros(2, dtype=torch.float64), "sync": {}, "kept": Kept().rank_state(),
    }  # fmt: skip
    shared = {
        "model": {"w": torch.ones(2)}, "average": {}, "aliases": {}, "cursor": [0, 1], "trained_seconds": 1.0,
        "optimizer": {"state": {}, "own": {}, "param_groups": []},
        "kept": Kept().shared_state(), "history": {"train_loss": float("nan"), "test_loss": float("inf"), "accuracy": None},
    }  # fmt: skip
    assert checked({"shared": shared, "ranks": [rank]})["ranks"] == [rank]
    for history in ({"train_loss": "x"}, {"class_accuracy": torch.zeros(2)}, {"class_accuracy": ["cat"]}):
        with pytest.raises(ValueError, match="history"):
            checked({"shared": {**shared, "history": history}, "ranks": [rank]})
