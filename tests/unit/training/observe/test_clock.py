"""Where a step's seconds go, by a clock that the test turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.training.observe.clock import StepClock


class Turned:
    """`turned.at(3, "begin")`: that call at that second."""

    def __init__(self, device: str = "cpu", now: list[float] | None = None) -> None:
        self.now = [0.0] if now is None else now
        self.clock = StepClock(torch.device(device), lambda: self.now[0])

    def at(self, seconds: float, call: str, *words: float) -> Any:
        self.now[0] = seconds
        return getattr(self.clock, call)(*words)


def test_what_a_script_does_between_two_steps_is_its_own_time_in_the_next() -> None:
    turned = Turned()
    for seconds, call in ((0, "begin"), (1, "data_ready"), (2, "grad_ready"), (2, "synced")):
        turned.at(seconds, call)
    assert turned.at(3, "end")["step_duration"] == 3.0 == turned.clock.trained
    for seconds, call in (
        (7, "between"),  # four seconds of the script's
        (20, "begin"),  # the boundary before it, where a checkpoint is saved, is nobody's step
        (21, "data_ready"), (23, "between"),  # a batch whose gradients are added to the next one's
        (24, "begin"), (25, "data_ready"), (28, "grad_ready"), (30, "synced"),
    ):  # fmt: skip
        turned.at(seconds, call)
    assert turned.at(31, "end") == {"data_wait": 1.0, "grad_ready": 10.0, "sync_wait": 2.0, "step_duration": 14.0}
    assert turned.clock.trained == 17.0
    turned.at(31, "begin")
    assert turned.at(32, "end")["step_duration"] == 1.0


class _Event:
    """A stand-in for a CUDA event: its time is that of the last `record`."""

    def __init__(self, now: list[float]) -> None:
        self._now, self.at = now, -1.0

    def record(self) -> None:
        self.at = self._now[0]

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 1e3 * float(other.at - self.at)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_several_updates_of_one_batch_count_its_time_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: _Event(now))
    turned = Turned(device, now)
    told: list[dict[str, float]] = []
    for batch in (0.0, 10.0, 20.0):
        turned.at(batch, "begin")
        turned.at(batch + 1, "data_ready")
        for began in (batch + 1, batch + 4):
            for later, call in ((1, "grad_ready"), (2, "synced"), (3, "end")):
                turned.at(began + later, call)
            told += turned.clock.measured()
        turned.at(batch + 8, "between")
    for number, found in enumerate(told):
        first, before = 1 - number % 2, float(number in (2, 4))  # a second of the script's, after the update before
        expected = {"data_wait": first, "grad_ready": 1 + before, "sync_wait": 1, "step_duration": 3 + first + before}
        assert found == expected, number
    assert len(told) == 6 and turned.clock.trained == 3 * 7 + 2
