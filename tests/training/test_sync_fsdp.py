"""`Fsdp` holds one full block at a time in a step, one full tensor at a time in a save. Also: which parts are blocks."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.training.parallel.world import World
from tests import product
from tests.product import UserError
from tests.ranks import on_ranks

pytestmark = pytest.mark.promise("strategies")

WIDTHS = (8, 24, 16, 8)


class Net(nn.Module):
    """Blocks of 216, 400 and 136 elements, and 72 that belong to none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(WIDTHS))
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


LARGEST, HEAD = 400, 72


class Loop(product.StrategyLoop):
    def __init__(self, world: World, model: nn.Module) -> None:
        def optimizer(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

        strategy = product.strategy(product.FSDP)
        super().__init__(strategy, model, world, torch.zeros(2, 8), optimizer)

    def step(self, passes: int) -> None:
        self.sync.zero_grad()
        for number in range(passes):
            with self.sync.accumulate() if number < passes - 1 else contextlib.nullcontext():
                self.network(torch.ones(2, 8)).square().sum().backward()
        self.sync.synchronize()
        self.optimizer.step()


def _net() -> Net:
    torch.manual_seed(1)
    return Net()


def _held(world: World, file: str) -> dict[str, list[int]]:
    """Counts full elements while each layer runs, forward and backward, and live full tensors at each gather of a save."""
    model = _net()
    loop = Loop(world, model)
    counts: dict[str, list[int]] = {"step": [], "save": [], "between": []}

    def look(*_: Any) -> None:
        counts["step"].append(product.gathered(loop.network))

    for layer in (*model.layers, model.head):
        layer.register_forward_pre_hook(look)
        layer.register_full_backward_pre_hook(look)
        for parameter in layer.parameters():
            parameter.register_hook(look)
    for passes in (1, 3):
        loop.step(passes + world.rank)  # ranks differ in it
        counts["between"].append(product.gathered(loop.network))
    whole = DTensor.full_tensor
    live: list[weakref.ref[torch.Tensor]] = []

    def watched(self: DTensor, **how: Any) -> torch.Tensor:
        full = whole(self, **how)
        live.append(weakref.ref(full))
        counts["save"].append(sum(tensor() is not None for tensor in live))
        return full

    DTensor.full_tensor = watched  # type: ignore[method-assign]
    try:
        loop.save(Path(file))
    finally:
        DTensor.full_tensor = whole  # type: ignore[method-assign]
    return counts


def test_a_rank_holds_one_block_while_a_layer_runs_and_one_tensor_in_a_save(tmp_path: Path) -> None:
    tensors = 3 * 8  # the model, its average and the momentum
    for rank, counts in enumerate(on_ranks(_held, 2, str(tmp_path / "saved"))):
        assert LARGEST <= max(counts["step"]) <= LARGEST + HEAD, counts["step"]
        assert len(counts["step"]) >= 2 * 4 * 4 and min(counts["step"]) > 0
        assert counts["between"] == [0, 0]
        assert counts["save"] == (list(range(1, tensors + 1)) if rank == 0 else [1] * tensors), counts["save"]


def _apart(world: World) -> list[str]:
    """Each rank leaves out another block of the same size. Then the model is called without its network."""
    errors = []
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    loop = Loop(world, model)
    model.forward = lambda x: model[2](model[world.rank](x))  # type: ignore[method-assign]
    for action in (lambda: loop.step(1), lambda: model[2](torch.ones(2, 8))):
        try:
            action()
        except UserError as error:
            errors.append(str(error))
    return errors


def test_ranks_that_run_different_blocks_are_refused_before_a_weight_is_moved() -> None:
    for different, past in on_ranks(_apart, 2):
        assert different.startswith(f"sync.name={product.FSDP}") and "ranks have run different ones" in different
        assert past.startswith("Fsdp") and "call the network" in past


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(torch.zeros(8, 8))
        self.layers.append(nn.Linear(8, 8))
        self.layers[3].weight = self.head.weight


@pytest.mark.parametrize(
    ("model", "wanted", "blocks"),
    [
        (Net, None, ["layers.0", "layers.1", "layers.2"]),
        (Net, ["head", "layers.?"], ["layers.0", "layers.1", "layers.2", "head"]),
        (Net, ["Linear"], ["layers.0", "layers.1", "layers.2", "head"]),
        (Net, [], []),
        (Tied, None, ["layers.0", "layers.1", "layers.2"]),
    ],
)
def test_blocks_are_chosen_by_a_rule_or_by_names(model: Any, wanted: list[str] | None, blocks: list[str]) -> None:
    assert product.fsdp_blocks(model(), wanted) == blocks


def test_a_block_that_cannot_be_is_refused_by_name() -> None:
    for model, wanted, name in ((Net, "layer.*", "'layer.*'"), (Net, "Tanh", "'Tanh'"), (Tied, "head", "head.weight")):
        with pytest.raises(UserError, match=r"sync\.options\.blocks: ") as error:
            product.fsdp_blocks(model(), [wanted])
        assert name in str(error.value)
