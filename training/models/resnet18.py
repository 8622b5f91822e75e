"""torchvision's ResNet-18, with a stem for 32×32 images or the stock one."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.training.contract import UserError
from lockstep.training.models import small_maps


class ResNet18(nn.Module):
    """Images [b, 3, h, w] → logits [b, outputs].

    Args:
        num_classes: classes of the data.
        stem: `small` is one 3×3 convolution of stride 1; `stock` is torchvision's 7×7 of stride 2 with a max pool,
            which leaves 8×8 of a 32×32 image before the first block.
        outputs: width of the last layer; 0: `num_classes`. The tutorial keeps torchvision's 1000.
    """

    def __init__(self, num_classes: int = 10, stem: str = "small", outputs: int = 0) -> None:
        super().__init__()
        try:
            from torchvision.models import resnet18
        except (ImportError, RuntimeError) as error:  # a build for another torch raises RuntimeError
            raise UserError(f"resnet18 needs a torchvision that fits torch {torch.__version__}: {error}") from None
        if stem not in ("small", "stock"):
            raise ValueError(f"stem must be small | stock, got {stem!r}")
        if outputs and outputs < num_classes:
            raise ValueError(f"outputs={outputs} is less than the {num_classes} classes of the data")
        self.network = resnet18(num_classes=outputs or num_classes)
        if stem == "small":
            self.misfit = ": torchvision's own checkpoints fit with model_options.stem=stock and outputs=1000"
            self.network.conv1 = nn.Conv2d(3, 64, 3, stride=1, padding=1, bias=False)
            nn.init.kaiming_normal_(self.network.conv1.weight, mode="fan_out", nonlinearity="relu")
            self.network.maxpool = nn.Identity()
        small_maps.convert(self.network)  # with the stock stem, the last two stages see 2×2 and 1×1 pixels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)
