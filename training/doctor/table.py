"""The rows of `lockstep doctor gpu`, in their order: what each one checks, where, for how long at most, and what to do if it fails."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from lockstep.training.parallel.world import World

REHEARSAL = "Rehearsal"
"""The name of the GPUs of tests/gpu_rehearsal. They are a stand-in: what runs on them does not show how fast a GPU is."""
Result = Literal["ok", "failed", "not tried"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a row."""

    result: Result
    detail: str = ""
    rates: dict[str, float] = field(default_factory=dict)
    """What was measured: name with its unit → value. Left out of a rehearsal's table and file."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Plain values for the file, and for rows behind this one."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Place:
    """What a check that runs inside a rank is given."""

    world: World
    earlier: dict[str, Outcome]
    """The rows before it, by name."""
    folder: str
    """A folder that all ranks see, for this row alone."""

    @property
    def rehearsal(self) -> bool:
        return is_rehearsal(torch.cuda.get_device_name())


def is_rehearsal(name: str) -> bool:
    return name == REHEARSAL


@dataclass(frozen=True, slots=True)
class Check:
    """One row.

    Args:
        where: `alone` in one process that sees all GPUs, `ranks` in one rank a GPU; both are called with a `Place`. `runs`
            is called with an `outside.Program`, and starts whole trainings.
        function: `module:function` below `lockstep.training.doctor`; gives back an `Outcome`.
        argument: handed to the function behind its first one, if there is one.
        bound: seconds.
        gpus: how many it takes at least.
    """

    name: str
    where: Literal["alone", "ranks", "runs"]
    function: str
    advice: str
    bound: float = 60.0
    gpus: int = 1
    argument: str = ""


STRATEGIES = ("flat", "hooks", "allreduce", "ddp", "horovod", "zero1", "powersgd", "bf16_compress", "fsdp")
PRECISIONS = ("tf32", "bfloat16", "float16")
VISIBLE = "visible"
PEERS = "peer access"

_OF_A_STRATEGY = (
    "take sync.name=flat meanwhile. If all strategies fail, see the row of the all-reduce first; if this one alone does, it is "
    "an error of ours or of this torch: report it with the file of this table"
)
_OF_A_PRECISION = (
    "train in float32 meanwhile. Drivers and torch builds older than the GPU are the usual cause: install the torch build for "
    "this GPU, and look at `nvidia-smi` for memory errors (ECC)"
)

ROWS = (
    Check(
        VISIBLE, "alone", "devices:visible",
        "install a torch build for this GPU and driver (`nvidia-smi` names both), and look at CUDA_VISIBLE_DEVICES",
    ),
    Check(
        PEERS, "alone", "devices:peers",
        "copies between GPUs arrive changed, or not at all: switch off the IOMMU or PCIe's ACS in the BIOS, or set NCCL_P2P_DISABLE=1",
        gpus=2,
    ),
    Check(
        "NCCL all-reduce", "ranks", "links:all_reduce",
        "see which transport NCCL takes with NCCL_DEBUG=INFO; `nvidia-smi topo -m` shows what links the GPUs. In containers give "
        "/dev/shm more memory; NCCL_P2P_DISABLE=1 is slow and tells whether direct copies are at fault",
        gpus=2,
    ),
    *(
        Check(f"strategy {name}", "ranks", "strategies:contract", _OF_A_STRATEGY, gpus=2, argument=name)
        for name in STRATEGIES
    ),
    Check(
        "recorded = eager", "ranks", "steps:recorded",
        "train with capture=never (the default) and report it with the file of this table",
    ),
    *(Check(f"precision {name}", "ranks", "steps:precision", _OF_A_PRECISION, argument=name) for name in PRECISIONS),
    Check(
        "kill and resume", "runs", "endings:kill_and_resume",
        "save nothing of value there yet: check whether the run directory's disk is full or slow, and report it with this table's file",
        bound=180,
    ),
    Check(
        "a hang is named", "runs", "endings:hang",
        "runs still end by collective_timeout, without the rank's name: unset TORCH_NCCL_ASYNC_ERROR_HANDLING and "
        "TORCH_NCCL_BLOCKING_WAIT if they are set, and see that torch is 2.15 or newer",
        bound=120, gpus=2,
    ),
    Check(
        "speedrun", "runs", "speedrun:train",
        "see the rows above first. If they are ok, compare with float32: lockstep run speedrun --ranks 1 --set device=cuda",
        bound=180,
    ),
)  # fmt: skip
"""In the order in which they run. Neighbours with the same `where` share their processes."""
