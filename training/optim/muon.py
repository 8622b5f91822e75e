"""Muon for convolution filters, Nesterov SGD for everything else, in one optimizer.

A filter's gradient, as a matrix [out, in·kh·kw], is replaced by its nearest (semi-)orthogonal matrix. After Nesterov's
momentum, a few Newton–Schulz steps bring all singular values near 1. Each filter is scaled to norm √out before its step.

Source: K. Jordan et al., "Muon: an optimizer for hidden layers" (2024), and KellerJordan/cifar10-airbench
(`airbench94_muon.py`); matrices orthogonalised in batches as in ljbuturovic/cifar10-speedrun (2025).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .base import RatedOptimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic a·X + b·XXᵀX + c·(XXᵀ)²X: steep at zero, and it maps [0, 1] near 1 without converging to it."""


def orthogonalise(matrices: torch.Tensor, steps: int = 3, eps: float = 1e-7) -> torch.Tensor:
    """Newton–Schulz iteration on a batch of matrices [k, rows, columns]: UΣVᵀ → ≈ UVᵀ, singular values in ≈ 0.5 … 1.5.

    Rows and columns of zeros stay zero and change nothing else, so matrices may be padded to one shape.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + eps)
    for _ in range(steps):
        gram = x @ (x.mT if x.is_cuda else x.mT.contiguous())  # a CPU's batched product of a transposed view is slow
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(RatedOptimizer):
    """Muon on parameters of four dimensions, Nesterov SGD (torch's form) on the others.

    Args:
        steps: Newton–Schulz steps.
    """

    def __init__(
        self, params: Any, lr: float, momentum: float = 0.6, weight_decay: float = 0.0, steps: int = 3
    ) -> None:  # fmt: skip
        self.steps = steps
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def update(self, params: list[torch.Tensor], group: dict[str, Any], rate: float | torch.Tensor) -> None:
        filters, rest = [p for p in params if p.ndim == 4], [p for p in params if p.ndim != 4]
        if filters:
            self._filters(filters, group, rate)
        if rest:
            self._others(rest, group, rate)

    def _momentum(self, params: list[torch.Tensor], grads: list[torch.Tensor], momentum: float) -> Any:
        """g + m·v with v ← m·v + g."""
        velocities = self.velocities(params)
        torch._foreach_mul_(velocities, momentum)
        torch._foreach_add_(velocities, grads)
        return torch._foreach_add(grads, velocities, alpha=momentum)

    def _filters(self, params: list[torch.Tensor], group: dict[str, Any], rate: float | torch.Tensor) -> None:
        ahead = self._momentum(params, [p.grad for p in params], group["momentum"])  # type: ignore[misc]
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - rate * group["weight_decay"])
        norms = torch._foreach_norm(params)
        torch._foreach_mul_(params, [len(p) ** 0.5 / norm for p, norm in zip(params, norms)])
        updates = _orthogonal(ahead, self.steps)
        torch._foreach_mul_(updates, -rate)
        torch._foreach_add_(params, updates)

    def _others(self, params: list[torch.Tensor], group: dict[str, Any], rate: float | torch.Tensor) -> None:
        grads: Any = [p.grad for p in params]
        if group["weight_decay"]:
            grads = torch._foreach_add(grads, params, alpha=group["weight_decay"])
        ahead = self._momentum(params, grads, group["momentum"])
        torch._foreach_mul_(ahead, -rate)
        torch._foreach_add_(params, ahead)


def _orthogonal(tensors: list[torch.Tensor], steps: int) -> list[torch.Tensor]:
    """Each tensor [out, …] orthogonalised as a matrix [out, rest], in as few batches as pay on its device.

    A GPU pads all of them to one shape: launches cost more than zeros. A CPU batches only equal shapes. A GPU works in
    bfloat16 (as published); a CPU, whose bfloat16 is slow, in float32.
    """
    matrices = [tensor.flatten(1) for tensor in tensors]
    gpu = matrices[0].is_cuda
    rows, columns = max(m.shape[0] for m in matrices), max(m.shape[1] for m in matrices)
    batches: dict[tuple[int, int], list[int]] = {}
    for index, matrix in enumerate(matrices):
        batches.setdefault((rows, columns) if gpu else (matrix.shape[0], matrix.shape[1]), []).append(index)
    results = list(tensors)
    for (height, width), members in batches.items():
        padded = [
            nn.functional.pad(matrices[i], (0, width - matrices[i].shape[1], 0, height - matrices[i].shape[0]))
            for i in members
        ]
        batch = torch.stack(padded)
        whitened = orthogonalise(batch.bfloat16() if gpu else batch, steps).to(batch.dtype)
        for row, index in enumerate(members):
            piece = whitened[row, : matrices[index].shape[0], : matrices[index].shape[1]]
            results[index] = piece.reshape(tensors[index].shape)
    return results
