"""The factor of float16's loss: its bounds, and what a checkpoint may say of it."""

from __future__ import annotations

import torch

from lockstep.training.optim.loss_scaler import GROWTH_STEPS, HIGHEST, INITIAL, LOWEST, LossScaler, is_state


def test_the_factor_is_halved_at_an_overflow_and_doubled_after_many_steps_without() -> None:
    scaler = LossScaler(torch.device("cpu"))
    assert is_state(scaler.state_dict())
    assert scaler.halve() and scaler.value == INITIAL / 2 == 1 / float(scaler.inverse)
    assert [scaler.grow_if_due() for _ in range(GROWTH_STEPS)] == [False] * (GROWTH_STEPS - 1) + [True]
    assert scaler.value == INITIAL == float(scaler.factor)
    scaler.set(LOWEST)
    assert not scaler.halve() and scaler.value == LOWEST
    scaler.set(HIGHEST)
    assert not any(scaler.grow_if_due() for _ in range(2 * GROWTH_STEPS)) and scaler.value == HIGHEST


def test_a_state_from_a_file_is_looked_at() -> None:
    for wrong in (None, {}, {"factor": 3.0, "steps": 0}, {"factor": 1024.0, "steps": -1}, {"factor": 2.0**60, "steps": 0},
                  {"factor": float("nan"), "steps": 0}, {"factor": 1024.0, "steps": 0, "more": 1}):  # fmt: skip
        assert not is_state(wrong), wrong
