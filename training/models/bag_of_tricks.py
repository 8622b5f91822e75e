"""The ResNet "bag of tricks" for CIFAR-10: 94 % in ten epochs, 6.57 M trained parameters in 17 tensors.

Architecture and constants from D. Page, "How to train your ResNet" (davidcpage/cifar10-fast, 2018) and T. Germer's
rewrite of it (99991/cifar10-fast-simple, 2021): a frozen whitening convolution, ghost batch norm with frozen weights,
CELU, and logits scaled by 1/8.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

GHOST = 32
"""Samples that one ghost batch norm group normalises: 512 in 16 groups, as published."""


def whitening_filters(images: torch.Tensor, size: int = 3, eps: float = 1e-2) -> torch.Tensor:
    """Patch whitening as convolution weights [c·size², c, size, size], from images [n, c, h, w].

    Eigenvectors of the uncentred covariance of all patches, by falling eigenvalue, each divided by √(λ + eps). The sign
    of each is chosen so that its largest entry is positive: an eigenvector's own sign is arbitrary.
    """
    channels = images.shape[1]
    covariance = torch.zeros(channels * size**2, channels * size**2, dtype=torch.float64, device=images.device)
    count = 0
    for chunk in images.split(500):
        patches = F.unfold(chunk, size).transpose(1, 2).flatten(0, 1)
        covariance += (patches.T @ patches).double()
        count += len(patches)
    values, vectors = torch.linalg.eigh(covariance / (count - 1))
    filters = vectors.T.flip(0)
    largest = filters.gather(1, filters.abs().argmax(1, keepdim=True))
    filters = filters * largest.sign() / (values.flip(0).clamp_min(0) + eps).sqrt()[:, None]
    return filters.reshape(-1, channels, size, size).to(images.dtype)


class GhostBatchNorm(nn.Module):
    """Batch norm over groups of `ghost` samples (Hoffer et al., "Train longer, generalize better", 2017).

    Sample i belongs to group i mod (batch / ghost): `BagOfTricks.forward` deals contiguous blocks out in that order. So
    a view turns groups into channels, and one call of torch's kernel normalises all of them. The weight is frozen
    at 1, the bias is trained.
    """

    running_mean: torch.Tensor
    running_var: torch.Tensor

    def __init__(self, channels: int, ghost: int = GHOST, momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__()
        self.ghost, self.momentum, self.eps = ghost, momentum, eps
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, None, self.bias, False, 0.0, self.eps)
        x = x.contiguous()  # the view below needs NCHW order
        n, channels, height, width = x.shape
        groups = max(n // self.ghost, 1)
        mean = torch.zeros(groups * channels, dtype=self.running_mean.dtype, device=x.device)
        variance = torch.zeros_like(mean)
        # Momentum 1 makes the kernel write this batch's statistics into `mean` and `variance`. A GPU's kernel has no
        # backward pass for a bias without a weight.
        y = F.batch_norm(
            x.view(n // groups, groups * channels, height, width), mean, variance,
            torch.ones_like(mean), self.bias.repeat(groups), True, 1.0, self.eps,
        )  # fmt: skip
        with torch.no_grad():
            self.running_mean.lerp_(mean.view(groups, channels).mean(0), self.momentum)
            self.running_var.lerp_(variance.view(groups, channels).mean(0), self.momentum)
        return y.view(n, channels, height, width)


class ConvNormAct(nn.Module):
    """Convolution → (2×2 max pool) → ghost batch norm → CELU."""

    def __init__(self, fan_in: int, fan_out: int, kernel: int = 3, pool: bool = False, alpha: float = 0.3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(fan_in, fan_out, kernel, padding=kernel // 2, bias=False)
        self.pool = pool
        self.norm = GhostBatchNorm(fan_out)
        self.alpha = alpha

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        if self.pool:
            x = F.max_pool2d(x, 2)
        return F.celu(self.norm(x), self.alpha, inplace=True)


class BagOfTricks(nn.Module):
    """Images [b, 3, 32, 32] → logits [b, num_classes].

    Args:
        width: factor on every number of channels.
    """

    batch_multiple = GHOST
    fsdp_blocks = ()  # a part with a short last block of samples goes through the layers twice, and others once

    def __init__(self, num_classes: int = 10, width: float = 1.0) -> None:
        super().__init__()
        if not 1 / 16 <= width <= 16:
            raise ValueError(f"width must be in [1/16, 16], got {width}")
        c1, c2, c3, c4 = (max(int(channels * width), 1) for channels in (64, 128, 256, 512))
        self.whitening = nn.Conv2d(3, 27, 3, padding=1, bias=False)
        self.whitening.weight.requires_grad_(False)
        self.stem = ConvNormAct(27, c1, kernel=1)
        self.stage1 = ConvNormAct(c1, c2, pool=True)
        self.residual1 = nn.Sequential(ConvNormAct(c2, c2), ConvNormAct(c2, c2))
        self.stage2 = ConvNormAct(c2, c3, pool=True)
        self.stage3 = ConvNormAct(c3, c4, pool=True)
        self.residual3 = nn.Sequential(ConvNormAct(c4, c4), ConvNormAct(c4, c4))
        self.head = nn.Linear(c4, num_classes, bias=False)

    @torch.no_grad()
    def prepare(self, images: torch.Tensor) -> None:
        """Sets the whitening filters from normalised images [n, 3, h, w]; the first 10,000 are used."""
        self.whitening.weight.copy_(whitening_filters(images[:10_000]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return self._network(x)
        n = len(x)
        full = n // GHOST * GHOST
        if full == 0 or full == n:
            return self._dealt(x)
        return torch.cat([self._dealt(x[:full]), self._dealt(x[full:])])  # the last block of an epoch may be short

    def _dealt(self, x: torch.Tensor) -> torch.Tensor:
        """Deals contiguous blocks of `GHOST` samples out to the groups of `GhostBatchNorm`, and collects the logits."""
        groups = max(len(x) // GHOST, 1)
        size = len(x) // groups
        x = x.unflatten(0, (groups, size)).transpose(0, 1).flatten(0, 1)
        return self._network(x).unflatten(0, (size, groups)).transpose(0, 1).flatten(0, 1)

    def _network(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(self.whitening(x))
        x = self.stage1(x)
        x = x + self.residual1(x)
        x = self.stage3(self.stage2(x))
        x = x + self.residual3(x)
        x = F.max_pool2d(x, x.shape[-2:]).flatten(1)  # adaptive pooling has no deterministic backward on CUDA
        return self.head(x) * 0.125
