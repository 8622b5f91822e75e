"""The whole training step of a recipe, ready to be timed: augmentation, forward, backward, update and average."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lockstep.training import config, optim, sync
from lockstep.training.checkpoint.state import Cursor, TrainState
from lockstep.training.cudagraph import CapturedTrainer, obstacle
from lockstep.training.data.loader import Batch
from lockstep.training.models import batch_multiple, build
from lockstep.training.models.arithmetic import real_type
from lockstep.training.observe.clock import Times, step_clock
from lockstep.training.optim.ema import Ema
from lockstep.training.parallel.world import World
from lockstep.training.trainer import Trainer

FLOP_PER_IMAGE = {"bag_of_tricks": 2.274e9, "resnet18": 3 * 1.11e9, "speedrun": 0.708e9}
"""Forward + backward: the multiply-adds of the convolutions and the linear layer, times two, times three."""


def our_step(
    recipe: str, batch: int, world: World, strategy: str, compiled: bool = False, extra: list[str] | None = None
) -> Callable[[], Times]:
    """The recipe's own step, from uint8 images on the device to averaged weights; gives back the phases' seconds.

    Args:
        batch: images of this rank.
        extra: settings; with `capture=auto` the step is recorded, and has to run on `capture_stream`. Raises
            `RuntimeError`, here or in the step that was to be recorded, where it cannot be.
    """
    torch.manual_seed(0)
    settings = config.load(recipe, [f"global_batch_size={batch * world.size}", f"sync.name={strategy}", *(extra or [])])
    device = world.device
    model = build(settings.model, settings.model_options, 10).to(device, real_type(settings.precision))
    model = model.to(memory_format=torch.channels_last) if settings.channels_last else model
    synchroniser = sync.build(settings.sync)
    network = synchroniser.wrap(model, world, torch.randn(batch, 3, 32, 32, device=device))
    network = torch.compile(network) if compiled else network
    optimizer = synchroniser.make_optimizer(
        lambda parameters: optim.build(parameters, settings, batch * world.size, model)
    )
    ema = Ema(model, settings.ema.decay, settings.ema.every) if settings.ema.decay else None
    losses = torch.zeros(2, dtype=torch.float64, device=device)
    state = TrainState(world, model.train(), optimizer, synchroniser, ema, Cursor(), step_clock(device), losses, {})
    steps = {"batch_multiple": batch_multiple(model), "steps_per_epoch": 1000}
    trainer = Trainer(settings, state, network, **steps)
    if settings.capture == "auto":
        if reason := obstacle(settings, state):
            raise RuntimeError(reason)
        trainer = CapturedTrainer(settings, state, network, _refuse, None, **steps)
    images = torch.randint(0, 256, (max(4096, batch + 1), 32, 32, 3), dtype=torch.uint8).to(device)
    rows = torch.arange(batch, device=device)
    part = Batch(images, rows, rows, torch.randint(0, 10, (batch,)).to(device), batch * world.size)

    def run() -> Times:
        state.clock.begin()
        state.clock.data_ready()
        trainer.step(part)
        trainer.update_average()
        state.cursor.step = (state.cursor.step + 1) % 1000
        return state.clock.end()

    run.losses = losses  # type: ignore[attr-defined]
    return run


def _refuse(why: str) -> None:
    """Eager times are not to be published as recorded ones."""
    raise RuntimeError(why)
