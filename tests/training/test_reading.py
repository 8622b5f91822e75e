"""`train_loss` has one meaning: the mean over the samples of all ranks, in every event and metric."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.training.observe.reading import Reading
from lockstep.training.parallel.world import World
from tests.events import events
from tests.ranks import on_ranks
from tests.runs import Job


def _readings(world: World) -> list[list[dict[str, object]]]:
    """In all of it rank 1 of two has twice the loss and three times the samples of rank 0."""
    loss, count = (1.0 + world.rank), (1.0 + 2 * world.rank)
    losses = torch.tensor([6 * loss, 3 * count], dtype=torch.float64)  # resumed in the middle of an epoch
    reading = Reading(losses, world)
    losses += torch.tensor([8 * loss, 2 * count])
    reading.take(losses, torch.tensor(3.0), step=5)
    losses += torch.tensor([1 * loss, 1 * count])  # after the reading was asked for
    found = [list(reading.ready(wait=True))]
    losses.zero_()
    reading.new_epoch()
    losses += torch.tensor([10 * loss, 4 * count])
    reading.take(losses, None, step=6)
    reading.take(losses, None, step=7)  # no rank had a sample since
    return [*found, list(reading.ready(wait=True)), list(reading.ready())]


@pytest.mark.parametrize("size", [1, 2])
def test_a_reading_is_the_mean_over_all_ranks_since_the_last_one(size: int) -> None:
    by_all = 1.0 if size == 1 else (1 + 2) / (1 + 3)  # loss a sample, as a multiple of rank 0's
    for first, second, third in on_ranks(_readings, size):
        assert first == [{"step": 5, "train_loss": 4.0 * by_all, "grad_norm": 3.0}]
        assert second[0] == {"step": 6, "train_loss": 2.5 * by_all, "grad_norm": None}
        assert second[1]["train_loss"] is None and third == []


def test_the_events_of_steps_and_of_epochs_say_the_same(data_root: Path, tmp_path: Path) -> None:
    job = Job(tmp_path / "run", data_root, 3, **{"log.every": 1, "model": "tests.nets:SmallConv"})
    assert job.go().code == 0
    steps, epochs = events(job.run_dir, "step"), events(job.run_dir, "epoch")
    assert [event["step"] for event in steps] == list(range(1, 25))  # the last ones, too
    for number, epoch in enumerate(epochs):
        own = [event["train_loss"] for event in steps[8 * number : 8 * number + 8]]
        assert sum(own) / 8 == pytest.approx(epoch["train_loss"], rel=1e-12)
