"""Whole training steps of a recipe: recorded against eager, and each precision against float32."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from lockstep.training import config
from lockstep.training.doctor.table import Outcome, Place
from lockstep.training.recipe.loop import Recipe
from lockstep.training.session import Session

STEPS = 8
RECIPE = [
    "data.source=synthetic", "data.num_shards=2", "epochs=1", "schedule=[]",
    "optim.lr=5.0e-4", "ema.decay=0", "device=cuda", "log.report=false", "metrics.enabled=false", "checkpoint.on_signal=false",
    "uneven=drop",
]  # fmt: skip
"""`smoke`, the bag of tricks at a quarter of its width, on images that need no file."""
SAME = 1e-3
"""Largest distance of a recorded run's way from the eager one's, relative to it (L2). A step that was left out, or took the data of
another, is off by a tenth at least."""
SMALL = "model=lockstep.training.doctor.nets:Small"
"""For the precisions: the bag of tricks, untrained, makes ten times as much of every rounding."""
APART = {"tf32": 0.01, "bfloat16": 0.05, "float16": 0.02}
"""Largest distance of a precision's way from float32's, relative to it."""


def recorded(place: Place) -> Outcome:
    """Collective."""
    eager, _ = _weights(place, "eager")
    actual, refused = _weights(place, "recorded", "capture=auto")
    if refused:
        return Outcome("failed", refused)
    away = _distance(place, actual, eager)
    how = "the same bits" if away == 0 else f"{away:.1e} apart, at most {SAME:g}"
    return Outcome("ok" if away <= SAME else "failed", f"{how}, after {STEPS} steps", facts={"distance": away})


def precision(place: Place, name: str) -> Outcome:
    """Collective."""
    change = "tf32=true" if name == "tf32" else f"precision={name}"
    exact, actual = (
        _weights(place, folder_name, SMALL, *changed, steps=1)[0]
        for folder_name, *changed in (["float32"], [name, change])
    )
    away = _distance(place, actual, exact)
    bound = APART[name]
    how = f"the gradient is {away:.1e} from float32's, at most {bound:g}"
    return Outcome("ok" if away <= bound else "failed", how, facts={"distance": away})


def _weights(place: Place, folder_name: str, *changes: str, steps: int = STEPS) -> tuple[torch.Tensor, str]:
    """(what `steps` steps add to the weights, float64 [parameters]; why they were not recorded, or ""). Collective."""
    world, folder = place.world, Path(place.folder)
    batch = 32 * world.size  # a block of the ghost batch norm on each rank
    root = Path(place.folder).parent / "data"  # one copy of the shards for all rows
    overrides = [
        *RECIPE,
        f"data.root={root}",
        f"global_batch_size={batch}",
        f"data.options={{n: {batch * STEPS}, n_test: 16, size: 32}}",
    ]
    overrides += changes
    settings = config.load("smoke", overrides)
    with Session.of_recipe(folder / folder_name, settings, handle_signals=False, world=world) as run:
        recipe = Recipe(run, settings)
        begun = _flat(recipe.model)
        for _ in run.epochs(1):
            for number, batch in enumerate(run.batches(recipe.batches), 1):
                recipe.step(batch)
                if number == steps:
                    torch.cuda.synchronize()
                    recorder = run._started().step.recorder
                    return _flat(recipe.model) - begun, "" if recorder is None else recorder.failure
    raise AssertionError("fewer batches than steps")


def _flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().double().reshape(-1) for parameter in model.parameters()])


def _distance(place: Place, actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to `expected`; infinite where it is not finite. The largest of all ranks. Collective."""
    away = ((actual - expected).norm() / expected.norm()).nan_to_num(nan=float("inf"))
    if place.world.size > 1:
        dist.all_reduce(away, dist.ReduceOp.MAX)
    return float(away)
