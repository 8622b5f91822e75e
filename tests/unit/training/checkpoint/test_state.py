from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.training.checkpoint import state as states
from lockstep.training.checkpoint.state import UserState
from lockstep.training.parallel.world import World
from tests import product


def test_a_generator_of_another_kind_is_named() -> None:
    """A GPU's generator has 16 bytes, and torch raises `RuntimeError` for them."""
    device = torch.device("cpu")
    for state in (torch.zeros(16, dtype=torch.uint8), random.getstate(), {"bit_generator": "PCG64"}):
        kept = UserState()
        kept.add({"noise": torch.Generator()})
        with pytest.raises(ValueError, match="noise is a generator of another kind"):
            kept.restore({**kept.capture(device), "own": {"noise": state}}, device)


def test_a_value_that_no_checkpoint_can_hold_is_named_at_the_save() -> None:
    kept = UserState()
    kept.values["b"] = [1, object()]
    with pytest.raises(TypeError, match=r"run\.values\['b'\]\[1\] is a object"):
        kept.rank_state()


WRONG: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "torch's generator": lambda _, rank: rank["rng"].update(torch=torch.zeros(16, dtype=torch.uint8)),
    "count of preemptions": lambda shared, _: shared["history"].update(preemptions="x"),
    "count of epoch is 1000": lambda shared, _: shared.update(cursor=[10**30, 0]),
    "learning rate None": lambda shared, _: shared["optimizer"]["param_groups"][0].update(lr=None),
    r"shape \[5\], not \[2\]": lambda _, rank: rank.update(losses=torch.zeros(5)),
    "count of steps is -1": lambda shared, _: shared["kept"].update(steps=-1),
    "groups is 3": lambda shared, _: shared["kept"].update(groups=3),
}
"""What the error names → how a checkpoint that verifies is changed."""


@pytest.mark.promise("hostile-files")
def test_a_checkpoint_of_a_wrong_form_is_refused_before_the_first_step() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Linear(2, 2)
        sync, world = product.strategy("flat"), World()
        sync.wrap(model, world, None)
        optimizer = sync.make_optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        losses = torch.zeros(2, dtype=torch.float64)
        state = states.TrainState(
            world, model, {"optimizer": optimizer}, sync, None, states.Cursor(), product.step_clock(), losses, {}
        )
        gathered = states.gather(state)
        assert gathered is not None and states.scatter(copy.deepcopy(gathered), state) == []
        for named, change in WRONG.items():
            wrong = copy.deepcopy(gathered)
            change(wrong["shared"], wrong["ranks"][0])
            with pytest.raises((ValueError, TypeError), match=named):
                states.scatter(wrong, state)
    finally:
        dist.destroy_process_group()
