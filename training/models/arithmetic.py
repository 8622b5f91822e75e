"""How a network computes: its types, and its compilation."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from ..contract import UserError


def real_type(precision: str) -> torch.dtype:
    """The type of weights, images and losses; the half formats are autocast's business."""
    return torch.float64 if precision == "float64" else torch.float32


def form_on(device: torch.device) -> dict[str, Callable[[], Any]]:
    """What `auto` stands for on this device, by the setting's name."""
    return {"precision": lambda: fast_type(device), "channels_last": lambda: device.type == "cuda"}


def fast_type(device: torch.device) -> str:
    """The precision that `auto` stands for: the fast one that has float32's range, where the device computes in it."""
    has_one = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if has_one else "float32"


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


def no_compiler(device: torch.device) -> str:
    """What `torch.compile` lacks here, and what to do; empty where it lacks nothing."""
    if device.type == "cpu":
        has_one = any(shutil.which(name) for name in ("c++", "g++", "clang++"))
        return "" if has_one else "a C++ compiler on the CPU: install g++"
    if importlib.util.find_spec("triton") is None:
        return "Triton on a GPU: install it"
    return "" if any(shutil.which(name) for name in ("cc", "gcc", "clang")) else "a C compiler for Triton: install gcc"


def compiled(network: nn.Module, device: torch.device, kernels: Path) -> nn.Module:
    """`torch.compile` of the network. Raises `UserError` where its compiler is missing.

    Args:
        kernels: a folder for what is compiled for a GPU, unless the environment names another. The compiler tries some kernels out and
            takes the fastest, so that a resumed run has the same ones only where they are kept.
    """
    if lacking := no_compiler(device):
        raise UserError(f"compile=true needs {lacking}, or set compile=false")
    if device.type == "cuda":
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(kernels))
    return cast(nn.Module, torch.compile(network))


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The modules that train are in evaluation mode inside. A module that is in evaluation mode already, such as a frozen batch norm,
    stays so after it."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:  # not by `eval()`, which a model may replace
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


@torch.no_grad()
def arithmetic_of(model: nn.Module, example: torch.Tensor) -> float:
    """Floating-point operations of a sample's forward pass in matrix products and convolutions."""
    from torch.utils.flop_counter import FlopCounterMode

    with evaluating(model), FlopCounterMode(display=False) as counter:
        model(example)
    return counter.get_total_flops() / len(example)
