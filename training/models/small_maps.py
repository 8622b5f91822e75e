"""Convolutions whose output map has few pixels, as matrix products.

On a map that is smaller than the kernel most taps meet nothing but padding: of a 3×3 kernel over a 1×1 map one tap of
nine counts. A library multiplies the zeros, and lays out all of the weight for it, forward and back. Here each output
pixel is one product of the pixels under it and the taps over them, so only what counts is multiplied.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

MOST_PIXELS = 4
"""Up to this many output pixels, the products are the faster form on a CPU (`benchmarks/README.md`)."""


class SmallMapConv2d(nn.Conv2d):
    """`nn.Conv2d` in all but the form of its arithmetic: equal to it within rounding, and itself for larger maps.

    On a GPU it is `nn.Conv2d`: nothing has been measured there.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images [b, in, h, w] → [b, out, h', w']."""
        rows, columns = (_windows(self, x.shape, axis) for axis in (0, 1))
        small = 0 < len(rows) * len(columns) <= MOST_PIXELS and all(first < end for first, end, _ in rows + columns)
        if x.device.type != "cpu" or not small:
            return super().forward(x)
        height, width = self.kernel_size
        # Channels last, so that in both the pixels of a window and the channels of each are one row in the same order.
        x, taps = x.permute(0, 2, 3, 1), self.weight.permute(0, 2, 3, 1)
        pixels = []
        for top, bottom, row in rows:
            for left, right, column in columns:
                window = x[:, top:bottom, left:right].flatten(1)
                # A pad of less than nothing cuts, and its backward pass fills the weight's gradient once, not once an axis.
                cut = (0, 0, -column, column + right - left - width, -row, row + bottom - top - height)
                pixels.append(F.linear(window, F.pad(taps, cut).flatten(1), self.bias))
        size = (len(rows), len(columns))
        if self.weight.is_contiguous():  # the layers behind it keep to the layout that they get
            return torch.stack(pixels, -1).unflatten(-1, size)
        return torch.stack(pixels, 1).unflatten(1, size).permute(0, 3, 1, 2)


def _windows(conv: nn.Conv2d, shape: torch.Size, axis: int) -> list[tuple[int, int, int]]:
    """Of each output pixel along `axis`: the input's first pixel and the one after the last, and the first tap."""
    size, kernel, stride, padding = shape[2 + axis], conv.kernel_size[axis], conv.stride[axis], conv.padding[axis]
    assert isinstance(padding, int), "string paddings are not converted"
    starts = [pixel * stride - padding for pixel in range((size + 2 * padding - kernel) // stride + 1)]
    return [(max(start, 0), min(start + kernel, size), max(-start, 0)) for start in starts]


def convert(network: nn.Module) -> None:
    """Replaces the convolutions of `network` that can have the other form. Names and parameters stay.

    Those of 1×1 stay as well: they have no tap over padding.
    """
    for name, conv in list(network.named_modules()):
        if type(conv) is not nn.Conv2d or conv.groups != 1 or conv.dilation != (1, 1):
            continue
        if conv.padding_mode != "zeros" or isinstance(conv.padding, str) or conv.kernel_size == (1, 1):
            continue
        windows: dict[str, Any] = {"kernel_size": conv.kernel_size, "stride": conv.stride, "padding": conv.padding}
        other = SmallMapConv2d(
            conv.in_channels, conv.out_channels, bias=conv.bias is not None, device="meta", **windows
        )
        other.weight, other.bias = conv.weight, conv.bias
        network.set_submodule(name, other)
