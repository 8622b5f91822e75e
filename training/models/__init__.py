"""Networks by name. A model is one file with one class, and one row in `MODELS`.

A model may have:
    batch_multiple (int): a rank's part of a batch comes in blocks of this many samples; 1 where absent.
    fsdp_blocks (tuple of str): what `examples/strategies/fsdp.py` gathers by itself, as in its option `blocks`; its own rule where absent.
    misfit (str): the end of the error about a weight file that does not fit: what to set instead.
    prepare(images): called once on rank 0 with normalised training images [n, c, h, w], before the weights are sent.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

from torch import nn

from ..config import settings
from ..config.settings import check_options, imported
from ..contract import UserError

MODELS = {
    "bag_of_tricks": "lockstep.training.models.bag_of_tricks:BagOfTricks",
    "fashion_cnn": "lockstep.training.models.fashion_cnn:FashionCNN",
    "mlp": "lockstep.training.models.mlp:MLP",
    "resnet9": "lockstep.training.models.resnet9:ResNet9",
    "speedrun": "lockstep.training.models.speedrun:Speedrun",
    "resnet18": "lockstep.training.models.resnet18:ResNet18",
}


def ours(name: str) -> bool:
    """Whether building this model imports nothing beyond this package."""
    return name in MODELS or name in MODELS.values()


def build(name: str, options: dict[str, Any], num_classes: int, shape: tuple[int, ...] = ()) -> nn.Module:
    """A model of ours by name, or a user's own by `package.module:Class`: a subclass of `nn.Module`, nothing else is called.

    A class whose constructor has a parameter `num_classes`, `in_channels` or `in_features` is given the data's own, unless
    `options` has it.

    Args:
        shape: of a sample, (h, w, c) or (features,); where it is empty the class's defaults hold.

    Raises:
        UserError: there is no such model, or its constructor has no such option.
    """
    target = MODELS.get(name, name)
    if ":" not in target:
        raise UserError(
            f"unknown model {name!r}{settings.nearest(name, MODELS)} (your own class is written package.module:Class)"
        )
    factory = imported(target, "model")
    if not (isinstance(factory, type) and issubclass(factory, nn.Module)):
        type_name = "class" if isinstance(factory, type) else type(factory).__name__
        raise UserError(f"model {target!r} is a {type_name}, expected a torch.nn.Module class")
    check_options(options, factory, f"model {name}")
    parameters = inspect.signature(factory).parameters
    known = {"num_classes": num_classes}
    known |= {"in_channels": shape[-1], "in_features": math.prod(shape)} if shape else {}
    options = {**{key: value for key, value in known.items() if key in parameters}, **options}
    try:
        return factory(**options)
    except (TypeError, ValueError) as error:
        raise UserError(f"model {name} does not accept its options {options}: {error}") from None


def batch_multiple(model: nn.Module) -> int:
    return int(getattr(model, "batch_multiple", 1))
