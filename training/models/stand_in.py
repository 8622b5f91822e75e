"""A rank without samples still runs the network, so that it joins the collectives of backward: a stand-in batch times zero."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def without_batch_statistics(model: nn.Module) -> Iterator[None]:
    """The modules that train are in evaluation mode inside, so that the stand-in moves no running statistics.

    Modules that are in evaluation mode already (a batch norm that is frozen) are left so.
    """
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True
