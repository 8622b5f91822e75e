"""How a network computes: its types, and its compilation."""

from __future__ import annotations

import contextlib
import shutil
from typing import Any, cast

import torch
from torch import nn

from ..contract import UserError


def real_type(precision: str) -> torch.dtype:
    """The type of weights, images and losses; the half formats are autocast's business."""
    return torch.float64 if precision == "float64" else torch.float32


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The context of a forward pass."""
    if precision in ("bfloat16", "float16"):
        return torch.autocast(device.type, getattr(torch, precision))
    return contextlib.nullcontext()


def float32_on_gpus(tf32: bool) -> None:
    """How a GPU multiplies and convolves in float32. torch's own defaults take TF32 for convolutions."""
    precision = "tf32" if tf32 else "ieee"
    torch.backends.cuda.matmul.fp32_precision = precision
    torch.backends.cudnn.conv.fp32_precision = precision  # type: ignore[attr-defined]


def compiled(network: nn.Module, device: torch.device) -> nn.Module:
    """`torch.compile` of the network. Raises `UserError` where its compiler is missing."""
    if device.type == "cpu":
        if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
            raise UserError("compile=true needs a C++ compiler on the CPU: install g++, or set compile=false")
    else:
        try:
            import triton  # noqa: F401
        except ImportError:
            raise UserError("compile=true needs Triton on a GPU: install it, or set compile=false") from None
        if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
            raise UserError("compile=true needs a C compiler for Triton: install gcc, or set compile=false")
    return cast(nn.Module, torch.compile(network))
