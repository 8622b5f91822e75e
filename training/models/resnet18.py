"""torchvision's ResNet-18, with a stem for 32×32 images or the stock one.

Its convolutions whose output map has few pixels are computed as matrix products.
On a map that is smaller than the kernel most taps meet nothing but padding. Of a 3×3 kernel over a 1×1 map one tap of
nine counts. A library multiplies the zeros, and lays out all of the weight for it, forward and back. Here each output
pixel is one product of the pixels under it and the taps over them, so no zero is multiplied.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet


class ResNet18(ResNet):
    """Images [b, 3, h, w] → logits [b, outputs].

    Args:
        num_classes: classes of the data.
        stem: `small` is one 3×3 convolution of stride 1. `stock` is torchvision's 7×7 of stride 2 with a max pool,
            which leaves 8×8 of a 32×32 image before the first block.
        outputs: width of the last layer; 0: `num_classes`. The tutorial keeps torchvision's 1000.
    """

    def __init__(self, num_classes: int = 10, stem: str = "small", outputs: int = 0) -> None:
        if stem not in ("small", "stock"):
            raise ValueError(f"stem must be small | stock, got {stem!r}")
        if outputs and outputs < num_classes:
            raise ValueError(f"outputs={outputs} is less than the {num_classes} classes of the data")
        super().__init__(BasicBlock, [2, 2, 2, 2], num_classes=outputs or num_classes)
        if stem == "small":
            self.misfit = ": torchvision's own checkpoints fit with model_options.stem=stock and outputs=1000"
            self.conv1 = nn.Conv2d(3, 64, 3, stride=1, padding=1, bias=False)
            nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
            self.maxpool = nn.Identity()
        convert(self)  # with the stock stem, the last two stages see 2×2 and 1×1 pixels


MOST_PIXELS = 4
"""Up to this many output pixels, the products are the faster form on a CPU."""


class SmallMapConv2d(nn.Conv2d):
    """`nn.Conv2d` in all but the form of its arithmetic: equal to it within rounding, and itself for larger maps.

    On a GPU it is `nn.Conv2d`: nothing has been measured there.

    Raises:
        ValueError: groups, dilation, or a padding other than a number of zeros.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if not _fits(self):
            raise ValueError(
                "SmallMapConv2d supports groups=1, dilation=1 and zero padding given as a number: use nn.Conv2d for others"
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images [b, in, h, w] → [b, out, h', w']."""
        paddings: Any = self.padding  # numbers: `_fits`
        (h, w), (height, width) = x.shape[-2:], self.kernel_size
        rows = _starts(h, height, self.stride[0], paddings[0])
        columns = _starts(w, width, self.stride[1], paddings[1])
        small = 0 < len(rows) * len(columns) <= MOST_PIXELS
        # With a padding as large as the kernel, some pixels see nothing of the map.
        if x.device.type != "cpu" or x.dim() != 4 or not small or paddings[0] >= height or paddings[1] >= width:
            return super().forward(x)
        # Channels last, so that in both the pixels of a window and the channels of each are one row in the same order.
        x, taps = x.permute(0, 2, 3, 1), self.weight.permute(0, 2, 3, 1)
        pixels = []
        for top in rows:
            for left in columns:
                window = x[:, max(top, 0) : top + height, max(left, 0) : left + width].flatten(1)
                # A pad of less than nothing cuts, and its backward pass fills the weight's gradient once, not once an axis.
                cut = (0, 0, min(left, 0), min(w - left - width, 0), min(top, 0), min(h - top - height, 0))
                pixels.append(F.linear(window, F.pad(taps, cut).flatten(1), self.bias))
        size = (len(rows), len(columns))
        if self.weight.is_contiguous():  # the layers behind it keep to the layout that they get
            return torch.stack(pixels, -1).unflatten(-1, size)
        return torch.stack(pixels, 1).unflatten(1, size).permute(0, 3, 1, 2)


def _starts(size: int, kernel: int, stride: int, padding: int) -> range:
    """Where the window of each output pixel starts along one axis, in pixels of the input."""
    return range(-padding, size + padding - kernel + 1, stride)


def _fits(conv: nn.Conv2d) -> bool:
    zeros = conv.padding_mode == "zeros" and not isinstance(conv.padding, str)
    return zeros and conv.groups == 1 and conv.dilation == (1, 1)


def convert(network: nn.Module) -> None:
    """Replaces the convolutions of `network` that can have the other form. Names and parameters stay.

    Those of 1×1 stay as well: they have no tap over padding.
    """
    for name, conv in list(network.named_modules()):
        if type(conv) is not nn.Conv2d or conv.kernel_size == (1, 1) or not _fits(conv):
            continue
        windows: dict[str, Any] = {"kernel_size": conv.kernel_size, "stride": conv.stride, "padding": conv.padding}
        other = SmallMapConv2d(
            conv.in_channels, conv.out_channels, bias=conv.bias is not None, device="meta", **windows
        )
        other.weight, other.bias = conv.weight, conv.bias
        network.set_submodule(name, other)
