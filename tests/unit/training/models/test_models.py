"""What every model of `models.MODELS` does alike, and the published ones have. A new row is tested by being there."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.training import models
from tests.product import UserError

pytestmark = pytest.mark.promise("published-methods")
OPTIONS = {"bag_of_tricks": {"width": 0.125}, "speedrun": {"width": 0.125}}
"""Smaller than the published ones, for time."""
SHAPES: dict[str, tuple[int, ...]] = {"mlp": (24,), "fashion_cnn": (28, 28, 1)}
"""Of a sample, where it is no colour image of 32 × 32."""
CLASSES, BATCH = 7, 8


def made(name: str, seed: int = 0) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The model, a batch as the network gets it, and its labels."""
    shape = SHAPES.get(name, (32, 32, 3))
    draw = torch.Generator().manual_seed(1)
    batch = (BATCH, shape[-1], *shape[:-1]) if len(shape) == 3 else (BATCH, *shape)
    x, y = torch.randn(batch, generator=draw), torch.randint(CLASSES, (BATCH,), generator=draw)
    torch.manual_seed(seed)
    model = models.build(name, OPTIONS.get(name, {}), CLASSES, shape)
    if hasattr(model, "prepare"):
        model.prepare(x)
    return model, x, y


@pytest.mark.parametrize("name", models.MODELS)
def test_a_model_keeps_the_contract(name: str) -> None:
    model, x, y = made(name)
    logits = model(x)
    assert logits.shape == (BATCH, CLASSES) and bool(logits.isfinite().all()) and models.batch_multiple(model) >= 1
    F.cross_entropy(logits, y).backward()
    trained = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and [key for key, parameter in trained.items() if parameter.grad is None] == [], (
        "ddp would refuse it"
    )
    model.eval()
    with torch.no_grad():  # a sample does not depend on its neighbours
        torch.testing.assert_close(model(x)[:5], model(x[:5]), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", models.MODELS)
def test_the_seed_decides_the_weights_which_load_into_a_new_one(name: str) -> None:
    """Ranks begin alike, and so does a run that is started again."""
    (first, x, _), (second, *_), (third, *_) = (made(name, seed) for seed in (0, 0, 1))
    first_weights, second_weights, third_weights = (model.state_dict() for model in (first, second, third))
    assert all(torch.equal(first_weights[key], second_weights[key]) for key in first_weights) and any(
        not torch.equal(first_weights[key], third_weights[key]) for key in first_weights
    )
    third.load_state_dict(first_weights)
    assert torch.equal(first.eval()(x), third.eval()(x))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("bag_of_tricks", 6_570_880), ("resnet18", 11_173_962), ("resnet9", 6_575_370), ("speedrun", 1_971_352)],
)
def test_the_published_number_of_parameters(name: str, parameters: int) -> None:
    model = models.build(name, {}, 10)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == parameters


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("resnet81", {}, "resnet18"), ("resnet18", {"stems": 1}, "'stem'"), ("resnet18", {"stem": "tiny"}, "stem"),
        ("resnet18", {"outputs": 3}, "10 classes"), ("bag_of_tricks", {"width": "x"}, "bag_of_tricks"),
        ("mlp", {"hidden": [0]}, "mlp"), ("fashion_cnn", {"size": 7}, "fashion_cnn"), ("fashion_cnn", {"dropout": 1}, "fashion_cnn"),
        ("no.such.module:Net", {}, "no.such.module"), ("tests.nets:NoSuch", {}, "NoSuch"), ("tests.nets:Options", {}, "torch.nn.Module"),
    ],
)  # fmt: skip
def test_a_wrong_model_is_named(name: str, options: dict[str, object], named: str) -> None:
    with pytest.raises(UserError, match=named):
        models.build(name, options, 10)


def test_the_exercise_s_network() -> None:
    mlp = models.build("mlp", {}, 32)
    weights = list(mlp.parameters())
    assert [tuple(p.shape) for p in weights] == [(256, 1024), (128, 256), (64, 128), (32, 64)]  # four layers, no bias
    for weight in weights:  # kaiming-uniform: bounded by √2 · √(3 / fan in), and reaching for it
        bound = float(torch.tensor(math.sqrt(6 / weight.shape[1]), dtype=weight.dtype))  # drawn in this precision
        assert 0.95 * bound < float(weight.detach().abs().max()) <= bound
    x = expected = torch.randn(3, 1024)
    for weight in weights[:-1]:
        expected = torch.tanh(expected @ weight.T)
    torch.testing.assert_close(mlp(x), expected @ weights[-1].T)
