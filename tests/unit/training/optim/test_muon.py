"""Muon against its published, plain form."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lockstep.training.optim import muon
from lockstep.training.optim.muon import Muon, orthogonalise

pytestmark = pytest.mark.promise("published-methods")


def plain_newton_schulz(g: torch.Tensor) -> torch.Tensor:
    """One matrix at a time, as published."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g / (g.norm() + 1e-7)
    x = x.T if g.size(0) > g.size(1) else x
    for _ in range(3):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if g.size(0) > g.size(1) else x


def test_the_filters_of_a_gpu_go_in_one_padded_batch_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors only say that they are on a GPU: the way there is taken on the CPU."""
    torch.manual_seed(0)
    filters = [torch.randn(16, 4, 3, 3), torch.randn(24, 16, 3, 3), torch.randn(24, 24, 3, 3)]
    exact = muon._orthogonal(filters, 3)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    shapes = []
    orthogonal = muon.orthogonalise
    monkeypatch.setattr(
        muon, "orthogonalise", lambda x, steps: shapes.append((x.shape, x.dtype)) or orthogonal(x, steps)
    )
    for found, expected in zip(muon._orthogonal(filters, 3), exact, strict=True):
        assert found.shape == expected.shape and found.dtype == torch.float32
        assert 0 < float((found - expected).norm() / expected.norm()) < 0.02
    assert shapes == [((3, 24, 216), torch.bfloat16)]


@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (6, 6)])
def test_batched_and_padded_newton_schulz_is_the_plain_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(3, *shape, dtype=torch.float64)
    expected = torch.stack([plain_newton_schulz(matrix) for matrix in matrices])
    torch.testing.assert_close(orthogonalise(matrices), expected)
    padded = F.pad(matrices, (0, 32 - shape[1], 0, 24 - shape[0]))
    found = orthogonalise(padded)
    torch.testing.assert_close(found[:, : shape[0], : shape[1]], expected)
    assert not found[:, shape[0] :].any() and not found[:, :, shape[1] :].any()
    values = torch.linalg.svdvals(found)
    assert values.max() < 1.6
    if shape[0] != shape[1]:  # a square matrix may have a singular value near 0, which stays small
        assert values[:, : min(shape)].min() > 0.3


def test_muon_follows_the_published_loop_and_sgd_is_torchs() -> None:
    torch.manual_seed(1)
    shapes = [(8, 3, 3, 3), (8, 8, 3, 3), (8, 8, 3, 3), (10, 8), (8,)]
    ours = [torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    optimizer = Muon(
        [{"params": ours[:3], "momentum": 0.6}, {"params": ours[3:], "momentum": 0.85, "weight_decay": 0.01}], lr=0.24
    )
    sgd = torch.optim.SGD(theirs[3:], lr=0.24, momentum=0.85, weight_decay=0.01, nesterov=True)
    buffers = [torch.zeros_like(p) for p in theirs[:3]]
    for step in range(4):
        for mine, other in zip(ours, theirs):
            mine.grad = torch.randn(mine.shape, dtype=torch.float64)
            other.grad = mine.grad.clone()
        rate = 0.24 / (step + 1)
        for group in [*optimizer.param_groups, *sgd.param_groups]:
            group["lr"] = rate
        with torch.no_grad():
            for p, buffer in zip(theirs[:3], buffers):
                buffer.mul_(0.6).add_(p.grad)  # type: ignore[arg-type]
                ahead = p.grad + 0.6 * buffer  # type: ignore[operator]
                p.mul_(len(p) ** 0.5 / p.norm())
                p.sub_(rate * plain_newton_schulz(ahead.reshape(len(p), -1)).view_as(p))
        sgd.step()
        optimizer.step()
        for mine, other in zip(ours, theirs):
            torch.testing.assert_close(mine, other)


def test_rates_on_the_device_give_the_same_steps() -> None:
    torch.manual_seed(2)
    first = [torch.nn.Parameter(torch.randn(4, 3, 3, 3)), torch.nn.Parameter(torch.randn(4))]
    second = [torch.nn.Parameter(p.detach().clone()) for p in first]
    one, other = (Muon([{"params": p[:1], "weight_decay": 0.1}, {"params": p[1:]}], lr=0.1) for p in (first, second))
    rates = other.use_tensor(torch.device("cpu"))
    for step in range(3):
        for p in (*first, *second):
            p.grad = torch.ones_like(p) * (step + 1)
        for number, lr in enumerate((0.1 * step, 0.3)):
            one.param_groups[number]["lr"] = rates[number] = lr
        one.step()
        other.step()
        for a, b in zip(first, second):
            torch.testing.assert_close(a, b)
