"""One whole training step of the published CIFAR-10 codes on a CPU, each taken from a checkout that is given by path.

Their code is imported, not copied. On a CPU they run in float32 (half precision is many times slower there); images lie
in memory already, so their loaders are not timed: only the crop of one batch, with their own function.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F


def bag_of_tricks(checkout: str, batch: int, threads: int) -> Callable[[], None]:
    """99991/cifar10-fast-simple: crop, flip, forward, backward, update, and the average every fifth step."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    sys.path.insert(0, checkout)
    model, train = imported(checkout, "model"), imported(checkout, "train")
    images, labels = torch.randn(4096, 3, 40, 40), torch.randint(0, 10, (4096,))
    net = model.Model(model.patch_whitening(images[:100, :, 4:-4, 4:-4]), c_in=3, c_out=10, scale_out=0.125)
    average = model.Model(torch.zeros(27, 3, 3, 3), c_in=3, c_out=10, scale_out=0.125)
    trained = [(w, torch.zeros_like(w)) for w in net.parameters() if w.requires_grad]
    weights = [pair for pair in trained if pair[0].ndim > 1]
    biases = [pair for pair in trained if pair[0].ndim <= 1]
    count = [0]

    def step() -> None:
        chosen = torch.randperm(len(images))[:batch]
        inputs = train.random_crop(images[chosen], crop_size=(32, 32))
        inputs[: batch // 2] = torch.flip(inputs[: batch // 2], [-1])
        net.zero_grad()
        net.train(True)
        model.label_smoothing_loss(net(inputs), labels[chosen], alpha=0.2).sum().backward()
        train.update_nesterov(weights, 1e-5, 0.256, 0.9)
        train.update_nesterov(biases, 64e-5, 0.004, 0.9)
        if count[0] % 5 == 0:
            train.update_ema(net, average, 0.99**5)
        count[0] += 1

    return step


def airbench(checkout: str, batch: int, threads: int) -> Callable[[], None]:
    """KellerJordan/cifar10-airbench, `airbench94_muon.py`: crop, forward, backward, SGD and Muon, in channels_last."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    sys.argv[0] = os.path.join(checkout, "airbench94_muon.py")  # it reads its own source
    code = imported(checkout, "airbench94_muon")
    images, labels = torch.randn(4000, 3, 36, 36), torch.randint(0, 10, (4000,))
    images = images.to(memory_format=torch.channels_last)
    net = code.CifarNet().float().to(memory_format=torch.channels_last)
    net.reset()
    net.init_whiten(images[:500, :, 2:-2, 2:-2].contiguous())
    filters = [p for p in net.parameters() if p.ndim == 4 and p.requires_grad]
    norms = [p for name, p in net.named_parameters() if "norm" in name and p.requires_grad]
    sgd = torch.optim.SGD(
        [{"params": [net.whiten.bias]}, {"params": norms}, {"params": [net.head.weight]}],
        lr=1e-5, weight_decay=0.075, momentum=0.85, nesterov=True, fused=True,
    )  # fmt: skip
    muon = code.Muon(filters, lr=1e-3, momentum=0.6, nesterov=True)

    def step() -> None:
        chosen = torch.randperm(len(images))[:batch]
        inputs = code.batch_crop(images[chosen], 32)
        net.train()
        F.cross_entropy(net(inputs), labels[chosen], label_smoothing=0.2, reduction="sum").backward()
        with torch.no_grad():
            sgd.step()
            muon.step()
        net.zero_grad(set_to_none=True)

    return step


def imported(checkout: str, name: str) -> Any:
    path = Path(checkout) / f"{name}.py"
    if not path.exists():
        raise FileNotFoundError(f"{path}: give the folder of a checkout that holds it")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
