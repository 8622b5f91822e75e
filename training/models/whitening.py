"""Patch whitening: the frozen first layer of the speed recipes."""

from __future__ import annotations

import torch
import torch.nn.functional as F


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
