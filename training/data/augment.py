"""Augmentation on the device, keyed by (seed, epoch, sample id): no generator, nothing to save, any world size.

Images stay uint8 [n, h, w, c] until here. Feature vectors are only normalised. Crop, reflection and flip are one gather:
the row and column of every output pixel are computed and looked up, so no padded copy is made.

The keys of an epoch are whole numbers from the host, or a tensor on the device for a recorded step, which reads them at each replay.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeAlias

import torch

from ..config import Augment, Config, Data
from ..contract import UserError
from .order import Salt, key, mix

Keys: TypeAlias = Sequence[int] | torch.Tensor


def check_settings(config: Config, shape: tuple[int, ...]) -> None:
    """Raises `UserError` if the settings do not fit samples of this shape, (h, w, c) or (features,)."""
    data, allowed = config.data, (1, shape[-1])
    for name, values in (("mean", data.mean), ("std", data.std)):
        if len(values) not in allowed:
            shape_text = (
                f"images have {shape[-1]} channels" if len(shape) == 3 else f"samples have {shape[-1]} features"
            )
            raise UserError(
                f"data.{name} has {len(values)} numbers, but the {shape_text}: give one for each, or one for all"
            )
    moves = data.augment.crop or data.augment.flip != "none" or config.evaluate.tta != "none"
    if moves and len(shape) != 3:
        raise UserError(
            f"{data.source} has feature vectors, which cannot be cropped or flipped: set crop=0 flip=none tta=none"
        )


def draw_keys(seed: int, epoch: int) -> list[int]:
    """Returns the keys of all draws of one epoch: shift (y, x), flip, first flip, epoch."""
    unchanging = (key(seed, salt) for salt in (Salt.SHIFT_X, Salt.FLIP, Salt.FIRST_FLIP))
    return [key(seed, epoch, Salt.SHIFT), *unchanging, epoch]


def draws(keys: Keys, ids: torch.Tensor, crop: int, flip: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (dy, dx, flipped) of each sample: shifts in −crop … crop (int64) and a bool, each of shape [len(ids)]."""
    noise = mix(ids & 0xFFFFFFFF ^ keys[0])
    span = 2 * crop + 1
    dy, dx = noise % span - crop, mix(noise ^ keys[1]) % span - crop
    if flip == "random":
        flipped = (mix(noise ^ keys[2]) & 1).bool()
    elif flip == "alternating":  # Keller Jordan, "94% on CIFAR-10 in 3.29 seconds": once at random, then in turn
        flipped = ((mix(ids & 0xFFFFFFFF ^ keys[3]) + keys[4]) & 1).bool()
    else:
        flipped = torch.zeros_like(ids, dtype=torch.bool)
    return dy, dx, flipped


def normalise(pixels: torch.Tensor, data: Data, dtype: torch.dtype, channels_last: bool) -> torch.Tensor:
    """Normalises by the config's mean and std. uint8 images [b, h, w, c] → [b, c, h, w] of `dtype`; vectors [b, f] → [b, f]."""
    unit = 1 if pixels.ndim == 2 else 255
    mean, scale = _constants(tuple(data.mean), tuple(data.std), unit, dtype, pixels.device)
    if pixels.ndim == 2:
        return (pixels.to(dtype) - mean) * scale
    images = pixels.permute(0, 3, 1, 2).to(dtype)
    if not channels_last:
        images = images.contiguous()
    return images.sub_(mean.view(1, -1, 1, 1)).mul_(scale.view(1, -1, 1, 1))


@functools.lru_cache(maxsize=8)  # a copy from the host in every step would cost a launch, and cannot be recorded
def _constants(
    mean: tuple[float, ...], std: tuple[float, ...], unit: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (mean, 1 / std) for values in 0…unit, each [c]."""
    return (
        torch.tensor(mean, dtype=dtype, device=device) * unit,
        1 / (torch.tensor(std, dtype=dtype, device=device) * unit),
    )


def augment(
    images: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, data: Data, keys: Keys,
    dtype: torch.dtype = torch.float32, channels_last: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Returns the augmented, normalised batch [b, c, h, w], or [b, f] of feature vectors.

    Args:
        images: uint8 [m, h, w, c] (or float32 [m, f]) on the device, of which the batch is `images[rows]`.
        rows: int64 [b], the rows of the samples in `images`.
        ids: int64 [b], the samples' global ids, which key the draws.
        keys: `draw_keys` of the epoch, or the same as int64 on the device.
    """
    settings = data.augment
    moved = settings.crop or settings.flip != "none"
    pixels = _gather(images, rows, ids, settings, keys) if moved else images[rows]
    return normalise(pixels, data, dtype, channels_last)


def _gather(images: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, settings: Augment, keys: Keys) -> torch.Tensor:
    height, width = images.shape[1:3]
    dy, dx, flipped = draws(keys, ids, settings.crop, settings.flip)
    x = torch.arange(width, device=images.device)
    y = torch.arange(height, device=images.device)[None, :] + dy[:, None]
    x = torch.where(flipped[:, None], width - 1 - x, x)[None, :].reshape(len(ids), width) + dx[:, None]
    pixels = images[rows[:, None, None], _reflect(y, height)[:, :, None], _reflect(x, width)[:, None, :]]
    if settings.padding == "zero":
        inside = ((y >= 0) & (y < height))[:, :, None] & ((x >= 0) & (x < width))[:, None, :]
        pixels *= inside[..., None]
    return pixels


def _reflect(index: torch.Tensor, size: int) -> torch.Tensor:
    """Mirrors indices at 0 and size − 1, the edge itself not repeated (as `F.pad(mode="reflect")`)."""
    return (size - 1 - (size - 1 - index.abs()).abs()).clamp_(0, size - 1)
