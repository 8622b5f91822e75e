"""Muon against its published, plain form."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

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


@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (6, 6)])
def test_batched_and_padded_newton_schulz_is_the_plain_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(3, *shape, dtype=torch.float64)
    expected = torch.stack([plain_newton_schulz(matrix) for matrix in matrices])
    torch.testing.assert_close(orthogonalise(matrices), expected)
    padded = F.pad(matrices, (0, 32 - shape[1], 0, 24 - shape[0]))
    actual = orthogonalise(padded)
    torch.testing.assert_close(actual[:, : shape[0], : shape[1]], expected)
    assert not actual[:, shape[0] :].any() and not actual[:, :, shape[1] :].any()
    values = torch.linalg.svdvals(actual)
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
        for mine, reference in zip(ours, theirs):
            mine.grad = torch.randn(mine.shape, dtype=torch.float64)
            reference.grad = mine.grad.clone()
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
        for mine, reference in zip(ours, theirs):
            torch.testing.assert_close(mine, reference)
