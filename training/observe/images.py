"""Images that a script logs, as PNG files of bounded size."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch

from .. import files

SIDE = 512
"""Pixels of the longer side, at most: 1 MB, where every pixel is noise."""
_PIXELS = 1 << 26
_FILE_BYTES = 64 << 20
_CHANNELS = (1, 3, 4)
_EXPECTED = "expected a tensor or array [H, W], [C, H, W] or [H, W, C] with C 1, 3 or 4, a PIL image, or the path of an image file"


def png(image: Any) -> bytes:
    """The image as a PNG file of at most `SIDE` pixels a side.

    Args:
        image: a tensor or an array, of floats from 0 to 1, bytes or booleans; a PIL image; or the path of an image file.

    Raises:
        TypeError, ValueError: one line that says what was found. So does a file that is missing or holds no image.
    """
    if isinstance(image, (str, Path)):
        picture = _read(Path(image))
    elif isinstance(image, PIL.Image.Image):
        picture = image
    elif isinstance(image, (torch.Tensor, np.ndarray)):
        picture = PIL.Image.fromarray(_pixels(image))
    else:
        raise TypeError(f"{_EXPECTED}; got {type(image).__name__}")
    if picture.width * picture.height > _PIXELS or not picture.width * picture.height:
        raise ValueError(f"expected 1 to {_PIXELS} pixels, got {picture.width} × {picture.height}")
    if picture.mode.startswith(("I", "F")):  # Pillow would cut the values off at 255
        raise ValueError(
            f"expected 8 bits a channel, got a picture of mode {picture.mode}: scale it to 0 … 255, mode L"
        )
    has_alpha = picture.mode in ("LA", "PA", "RGBA", "RGBa", "La") or "transparency" in picture.info
    picture = picture.convert("L" if picture.mode in ("1", "L") else "RGBA" if has_alpha else "RGB")
    picture.thumbnail((SIDE, SIDE))
    data = io.BytesIO()
    picture.save(data, "PNG")
    return data.getvalue()


def _read(path: Path) -> PIL.Image.Image:
    try:
        picture = PIL.Image.open(io.BytesIO(files.read(path, _FILE_BYTES)))
        if picture.width * picture.height <= _PIXELS:
            picture.load()
    except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        raise ValueError(f"{path} cannot be read as an image: {getattr(error, 'strerror', None) or error}") from None
    return picture


def _pixels(image: torch.Tensor | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """uint8, [H, W] or [H, W, C]; of a large one every n-th pixel."""
    kind, shape = image.dtype, list(image.shape)
    try:
        last = isinstance(image, np.ndarray) and shape[2:] and shape[2] in _CHANNELS  # as arrays mostly have them
        tensor = image.detach() if isinstance(image, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(image))
        if tensor.ndim == 3 and tensor.shape[0] in _CHANNELS and not last:
            tensor = tensor.permute(1, 2, 0)
        if tensor.ndim not in (2, 3) or not tensor.numel() or (tensor.ndim == 3 and tensor.shape[2] not in _CHANNELS):
            raise ValueError(f"{_EXPECTED}; got shape {shape}")
        every = max(1, max(tensor.shape[:2]) // (2 * SIDE))
        tensor = tensor[::every, ::every].cpu()
        if tensor.is_floating_point():
            tensor = tensor.float().nan_to_num(0.0).clamp(0, 1).mul(255).round().to(torch.uint8)
        elif tensor.dtype == torch.bool:
            tensor = tensor.to(torch.uint8) * 255
        elif tensor.dtype != torch.uint8:
            raise TypeError(f"expected floats from 0 to 1, bytes (uint8) or booleans; got {kind}")
        pixels = tensor.contiguous().numpy()
    except (RuntimeError, NotImplementedError) as error:  # sparse, quantized, without storage
        raise TypeError(f"{_EXPECTED}; got one of {kind} that has no pixels: {str(error).splitlines()[0]}") from None
    return pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels
