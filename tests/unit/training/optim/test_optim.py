"""A recipe's optimizers are torch's, or follow their formulas, and each trained parameter is in one group."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.training import optim
from tests import product
from tests.product import UserError


def _settings(recipe: str = "smoke", **values: Any) -> Any:
    return product.recipe(recipe, *(f"optim.{name}={value}" for name, value in values.items()))


def test_nesterov_follows_its_formula_through_a_change_of_rate() -> None:
    w = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = optim.Nesterov([w], lr=0.1, momentum=0.9, weight_decay=0.01)
    expected, velocity = w.detach().clone(), torch.zeros(2, dtype=torch.float64)
    for step, lr in enumerate((0.1, 0.05, 0.2)):
        grad = torch.tensor([0.3, -0.1], dtype=torch.float64) * (step + 1)
        g = -lr * (grad + 0.01 * expected)
        velocity = 0.9 * velocity + g
        expected = expected + g + 0.9 * velocity
        w.grad = grad.clone()
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        torch.testing.assert_close(w.detach(), expected)
        assert torch.equal(w.grad, grad)


@pytest.mark.parametrize(
    ("recipe", "groups", "named"),
    [
        ("smoke", "{haed: {lr: 0.1}}", "haed.*did you mean 'head'"),
        ("bag_of_tricks", "{whitening: {lr: 1}}", "whitening: no parameter that is trained"),
        ("bag_of_tricks", "{weight: {lr: 1}, head: {lr: 2}}", "head: .* that no earlier group has"),
    ],
)
def test_a_group_that_would_be_empty_is_refused(recipe: str, groups: str, named: str) -> None:
    model = product.model("bag_of_tricks", {"width": 0.0625})
    with pytest.raises(UserError, match=f"^optim.groups.{named}"):
        optim.build(model.parameters(), _settings(recipe, groups=groups), 512, model)


def test_groups_biases_and_decay_that_follows_the_batch() -> None:
    words = {
        "lr": 1.0, "weight_decay": 0.256, "bias_lr_factor": 64, "reference_batch_size": 512, "schedule": "[[0,0],[2,1]]",
    }  # fmt: skip
    settings = _settings(name="nesterov", **words)
    optimizer = optim.build(torch.nn.Linear(3, 2).parameters(), settings, 256)
    weights, biases = optimizer.param_groups
    assert weights["weight_decay"] == 0.128 and biases["weight_decay"] == 0.128 / 64
    for when, rate in ((0.0, 0.0), (1.0, 0.5), (9.5, 1.0)):  # flat behind the last point
        optim.set_rates(optimizer, settings.optim, when)
        assert (weights["lr"], biases["lr"]) == (rate, 64 * rate)
    optim.set_rates(optimizer, _settings(lr=2.0, schedule="[]").optim, 3.0)
    assert weights["lr"] == 2.0


@pytest.mark.promise("published-methods")
def test_the_recipe_sorts_every_trained_parameter_into_its_group() -> None:
    settings = product.recipe("speedrun")
    model = product.model("speedrun")
    optimizer = optim.build(model.parameters(), settings, 1000, model)
    names = {p: name for name, p in model.named_parameters()}
    groups = {group.get("part", ""): [names[p] for p in group["params"]] for group in optimizer.param_groups}
    filters = [f"group{n}.conv{m}.weight" for n in (1, 2, 3) for m in (1, 2)]
    norms = {f"norm{m}": [f"group{n}.norm{m}.bias" for n in (1, 2, 3)] for m in (1, 2)}
    assert groups == {"": filters, "whitening": ["whitening.bias"], "head": ["head.weight"], **norms}
    whitening = next(g for g in optimizer.param_groups if g.get("part") == "whitening")
    assert whitening["weight_decay"] == pytest.approx(0.0754717 / 2)  # half the batch it was tuned at
    for step, factor, first in ((1, 1.0, 1.0), (26, 1 - 25 / 200, 1 - 25 / 75), (200, 1 / 200, 0.0)):
        optim.set_rates(optimizer, settings.optim, step / 25)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.24 * factor)
        assert whitening["lr"] == pytest.approx(0.053 * first)
