"""torchvision's ResNet-18, with a stem for 32×32 images or the stock one."""

from __future__ import annotations

from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet

from lockstep.training.models import small_maps


class ResNet18(ResNet):
    """Images [b, 3, h, w] → logits [b, outputs].

    Args:
        num_classes: classes of the data.
        stem: `small` is one 3×3 convolution of stride 1; `stock` is torchvision's 7×7 of stride 2 with a max pool,
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
        small_maps.convert(self)  # with the stock stem, the last two stages see 2×2 and 1×1 pixels
