"""What every model of `models.MODELS` does alike. A new row is tested by being there."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.training import models

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
def test_a_batch_gives_a_logit_a_class_and_every_parameter_a_gradient(name: str) -> None:
    """A parameter without a gradient would make `sync.name=ddp` refuse the model."""
    model, x, y = made(name)
    logits = model(x)
    assert logits.shape == (BATCH, CLASSES) and bool(logits.isfinite().all())
    F.cross_entropy(logits, y).backward()
    trained = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and {key for key, parameter in trained.items() if parameter.grad is None} == set()


@pytest.mark.parametrize("name", models.MODELS)
def test_the_seed_decides_the_weights(name: str) -> None:
    """Ranks begin alike, and so does a run that is started again."""
    first, second, other = (made(name, seed)[0].state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", models.MODELS)
def test_in_evaluation_a_sample_does_not_depend_on_its_neighbours(name: str) -> None:
    model, x, _ = made(name)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(x)[:5], model(x[:5]), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", models.MODELS)
def test_saved_weights_load_into_a_new_one(name: str) -> None:
    model, other = made(name)[0], made(name, seed=1)[0]
    other.load_state_dict(model.state_dict())
    x = made(name)[1]
    assert torch.equal(model.eval()(x), other.eval()(x))


def test_a_batch_multiple_is_a_whole_number_from_1() -> None:
    assert all(models.batch_multiple(made(name)[0]) >= 1 for name in models.MODELS)
