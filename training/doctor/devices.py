"""What the driver and torch say of the GPUs, and whether copies between them arrive."""

from __future__ import annotations

import time
from typing import Any

import torch

from lockstep.training.doctor.table import Outcome, Place

_MEGABYTES, _SMALL = 256, 1
_TIMES = 5


def visible(place: Place) -> Outcome:  # noqa: ARG001 - every check is called with it
    """Every visible GPU has kernels in this torch and computes a matrix product."""
    built = torch.cuda.get_arch_list()
    all_properties = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    gpus: list[dict[str, Any]] = [
        {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "bytes": properties.total_memory,
        }
        for properties in all_properties
    ]
    facts = {
        "gpus": gpus, "torch": str(torch.__version__), "cuda": torch.version.cuda, "nccl": torch.cuda.nccl.version(),
        "cudnn": torch.backends.cudnn.version(),
    }  # fmt: skip
    for number, properties in enumerate(all_properties):
        if not any(_runs(arch, properties.major, properties.minor) for arch in built):
            has = ", ".join(built)
            sm = f"sm_{properties.major}{properties.minor}"
            return Outcome("failed", f"GPU {number} ({properties.name}) is {sm}, and this torch has {has}", facts=facts)
        ones = torch.ones(128, 128, device=f"cuda:{number}")
        if not torch.equal((ones @ ones).cpu(), torch.full((128, 128), 128.0)):
            return Outcome("failed", f"GPU {number} ({properties.name}) multiplies wrongly", facts=facts)
    names: dict[str, int] = {}
    for gpu in gpus:
        names[gpu["name"]] = names.get(gpu["name"], 0) + 1
    counts = ", ".join(f"{count} × {name}" for name, count in names.items())
    memory = min(gpu["bytes"] for gpu in gpus) / 1e9
    return Outcome("ok", f"{counts}, {memory:.0f} GB, torch {torch.__version__}", facts=facts)


def _runs(arch: str, major: int, minor: int) -> bool:
    """Whether kernels built for `sm_90`, or code of `compute_90` that the driver translates, run on a GPU."""
    prefix, _, digits = arch.partition("_")
    number = int("".join(letter for letter in digits if letter.isdigit()) or 0)
    if prefix == "compute":
        return (major, minor) >= divmod(number, 10)
    return divmod(number, 10)[0] == major and number % 10 <= minor


def peers(place: Place) -> Outcome:
    """A copy from each GPU to each other one arrives unchanged; the fastest and the slowest pair."""
    count = torch.cuda.device_count()
    direct = 0
    speeds = []
    elements = (_SMALL if place.rehearsal else _MEGABYTES) * 250_000
    for source in range(count):
        pattern = torch.arange(elements, dtype=torch.int32, device=f"cuda:{source}")
        for target in range(count):
            if target == source:
                continue
            direct += torch.cuda.can_device_access_peer(source, target)
            arrived = torch.empty(elements, dtype=torch.int32, device=f"cuda:{target}")
            arrived.copy_(pattern)  # opens the path
            _wait(source, target)
            began = time.perf_counter()
            for _ in range(_TIMES):
                arrived.copy_(pattern, non_blocking=True)
            _wait(source, target)
            speeds.append(_TIMES * arrived.numel() * 4 / (time.perf_counter() - began) / 1e9)
            if not torch.equal(arrived.cpu(), pattern.cpu()):
                return Outcome("failed", f"a copy from GPU {source} to GPU {target} arrives changed")
    pairs = count * (count - 1)
    how = (
        "all pairs copy directly"
        if direct == pairs
        else f"{direct} of {pairs} pairs copy directly, the others through the host"
    )
    return Outcome("ok", how, rates={"slowest pair, GB/s": min(speeds), "fastest pair, GB/s": max(speeds)})


def _wait(*numbers: int) -> None:
    for number in numbers:
        torch.cuda.synchronize(number)
