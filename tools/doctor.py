"""lockstep doctor gpu: one table of checks of this machine's GPUs, with advice for each row that failed.

Each row runs in separate processes and has two minutes: a row that fails or hangs does not affect the other rows.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lockstep.training import sync
from lockstep.training.__main__ import leave
from lockstep.training.config import Sync
from lockstep.training.contract import EXIT_DONE, EXIT_FAILED, EXIT_TIMED_OUT, UserError, printable
from lockstep.training.models.arithmetic import autocast, float32_on_gpus
from lockstep.training.parallel.world import World, detect, joined, set_threads

SECONDS = 120
"""Time limit of a row in seconds, with the start of its processes. Collectives have a shorter timeout."""
STRATEGIES = list(sync.STRATEGIES)
ELEMENTS, STEPS = 32_000_000, 6
EXACT, LOSSY = 1e-3, {"bf16_compress": 0.02}
"""Largest distance of the weights' way from that of one process, relative to it (L2). Kernels choose the order of their
sums by the size of a batch. A gradient that was not summed, or divided wrongly, is off by a tenth at least."""
PRECISIONS = {"tf32": 0.005, "bfloat16": 0.02, "float16": 0.005}
"""Largest distance of a precision's gradient from float32's, relative to it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a row. `rates`: name with its unit → value. `facts`: plain values for the file."""

    result: str  # ok, failed, not tried
    detail: str = ""
    rates: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Probe:
    """A row of the table. `gpus`: smallest number of GPUs. `shares`: two ranks may share one GPU. `needs`: the row without which this
    row is not tried."""

    name: str
    check: Callable[[World], Outcome]
    advice: str
    gpus: int = 1
    alone: bool = False
    shares: bool = False
    needs: str = "visible"


def visible(world: World) -> Outcome:  # noqa: ARG001 - every check is called with it
    """Checks that every visible GPU multiplies two matrices right."""
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    driver = Path("/proc/driver/nvidia/version")
    facts = {
        "gpus": [{"name": gpu.name, "capability": f"{gpu.major}.{gpu.minor}", "bytes": gpu.total_memory} for gpu in gpus],
        "torch": str(torch.__version__), "built for": torch.cuda.get_arch_list(), "cuda": torch.version.cuda,
        "nccl": torch.cuda.nccl.version(), "cudnn": torch.backends.cudnn.version(),
        "driver": driver.read_text().partition("\n")[0] if driver.exists() else "",
    }  # fmt: skip
    for number, gpu in enumerate(gpus):
        ones = torch.ones(128, 128, device=f"cuda:{number}")
        if not torch.equal((ones @ ones).cpu(), torch.full((128, 128), 128.0)):
            return Outcome("failed", f"GPU {number} ({gpu.name}) multiplies wrongly", facts=facts)
    counts = ", ".join(f"{count} × {name}" for name, count in Counter(gpu.name for gpu in gpus).items())
    memory = min(gpu.total_memory for gpu in gpus) / 1e9
    return Outcome("ok", f"{counts}, {memory:.0f} GB, torch {torch.__version__}", facts=facts)


def peers(world: World) -> Outcome:  # noqa: ARG001
    """Checks that a copy from each GPU to each other GPU arrives unchanged. Measures the rates of the slowest and the fastest pair."""
    numbers = range(torch.cuda.device_count())
    pairs = [(source, target) for source in numbers for target in numbers if source != target]
    speeds = []
    for source, target in pairs:
        pattern = torch.arange(ELEMENTS, dtype=torch.int32, device=f"cuda:{source}")
        arrived = torch.empty_like(pattern, device=f"cuda:{target}")
        seconds = _seconds(partial(arrived.copy_, pattern, non_blocking=True), source)  # this GPU does the work
        speeds.append(ELEMENTS * 4 / seconds / 1e9)
        if not torch.equal(arrived.cpu(), pattern.cpu()):
            return Outcome("failed", f"a copy from GPU {source} to GPU {target} arrives changed")
    direct = sum(torch.cuda.can_device_access_peer(*pair) for pair in pairs)
    detail = f"{direct} of {len(pairs)} pairs copy directly, the others through the host"
    return Outcome("ok", detail, {"slowest pair, GB/s": min(speeds), "fastest pair, GB/s": max(speeds)})


def all_reduce(world: World) -> Outcome:
    """Checks sums of whole numbers, for which every order of summation gives the same bits. Measures the rate. Collective."""
    values = torch.arange(100_003, device=world.device, dtype=torch.float32) % 1000
    expected = values * world.size + sum(range(world.size))
    values += world.rank
    dist.all_reduce(values)
    if wrong := int((values != expected).sum()):
        return Outcome("failed", f"{wrong} of {len(values)} sums over {world.size} GPUs are wrong")
    data = torch.ones(ELEMENTS, device=world.device)
    seconds = _seconds(partial(dist.all_reduce, data), world.device)
    sent = ELEMENTS * 4 * 2 * (world.size - 1) / world.size  # over each link of a ring
    rates = {"over the slowest link, GB/s": sent / seconds / 1e9}
    return Outcome("ok", f"sums over {world.size} GPUs are right", rates)


def _seconds(work: Callable[[], object], device: int | torch.device, times: int = 10) -> float:
    """Returns the seconds of some work on a GPU, after a warm-up."""
    work()
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / times


def strategy(name: str, world: World) -> Outcome:
    """Checks that some steps with a gradient-sync strategy end where one process with the whole batch ends. Collective."""
    start = _small(world)
    draw = torch.Generator().manual_seed(1)
    images = torch.randn(STEPS, 8 * world.size, 3, 16, 16, generator=draw).to(world.device)
    labels = torch.randint(10, (STEPS, 8 * world.size), generator=draw).to(world.device)
    alone = copy.deepcopy(start)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    for x, y in zip(images, labels):
        optimizer.zero_grad()
        F.cross_entropy(alone(x), y).backward()
        optimizer.step()
    model = copy.deepcopy(start)
    synchroniser = sync.build(Sync(name=name, bucket_mb=0.005))
    network = synchroniser.wrap(model, world, images[0, :2])
    optimizer = synchroniser.make_optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
    for x, y in zip(images[:, world.rank :: world.size], labels[:, world.rank :: world.size]):
        synchroniser.zero_grad()
        loss = F.cross_entropy(network(x), y, reduction="sum") / labels.shape[1]
        (loss * synchroniser.loss_factor).backward()
        synchroniser.synchronize()
        optimizer.step()
    begun, expected, actual = (_flat(one.parameters()) for one in (start, alone, synchroniser.full_module(model)))
    where = f"{world.size} GPUs" if world.nccl else f"one GPU that {world.size} ranks share over gloo"
    after = f"from one process after {STEPS} steps on {where}"
    return _compared(actual - begun, expected - begun, LOSSY.get(name, EXACT), after)


def precision(name: str, world: World) -> Outcome:
    """Checks the gradient of a small network on this rank's GPU against float32's gradient."""
    model = _small(world)
    images = torch.randn(32, 3, 32, 32).to(world.device)
    labels = torch.zeros(32, dtype=torch.int64, device=world.device)  # equal: the samples' gradients do not cancel
    gradients = []
    for kind in ("float32", name):
        float32_on_gpus(tf32=kind == "tf32")
        with autocast(kind, world.device):
            loss = F.cross_entropy(model(images), labels)
        # Scaled: the smallest float16 number is 6e-8.
        gradients.append(_flat(torch.autograd.grad(1024 * loss, list(model.parameters()))))
    return _compared(gradients[1], gradients[0], PRECISIONS[name], "from float32's gradient")


def _small(world: World) -> nn.Module:
    """Returns a network [b, 3, h, w] → [b, 10] without batch statistics: the same function of a sample at every world size."""
    torch.manual_seed(0)
    convolutions = (nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU())
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)).to(world.device)


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors])


def _compared(actual: torch.Tensor, expected: torch.Tensor, bound: float, how: str) -> Outcome:
    """Returns the outcome: ok if the distance (L2, relative to `expected`) is within a bound. A NaN is not within."""
    away = float((actual - expected).norm() / expected.norm())
    detail = f"{away:.1e} {how}, at most {bound:g}"
    return Outcome("ok" if away <= bound else "failed", detail, facts={"distance": away})


_OF_A_GPU = "install a torch build for this GPU and driver (`nvidia-smi` names both), and look at CUDA_VISIBLE_DEVICES"
_OF_PEERS = "switch off the IOMMU or PCIe's ACS in the BIOS, or set NCCL_P2P_DISABLE=1"
_NCCL, _OF_NCCL = (
    "NCCL all-reduce",
    "see which transport NCCL takes with NCCL_DEBUG=INFO; `nvidia-smi topo -m` shows what links the GPUs. In containers give "
    "/dev/shm more memory; NCCL_P2P_DISABLE=1 is slow and tells whether direct copies are at fault",
)
_OF_A_STRATEGY = "take sync.name=flat meanwhile, and report what --json prints: it is an error of ours or of torch"
_OF_A_PRECISION = (
    "train in float32 meanwhile. Drivers and torch builds older than the GPU are the usual cause: install the torch build for "
    "this GPU, and look at `nvidia-smi` for memory errors (ECC)"
)
ROWS = (
    Probe("visible", visible, _OF_A_GPU, alone=True),
    Probe("peer access", peers, _OF_PEERS, gpus=2, alone=True),
    Probe(_NCCL, all_reduce, _OF_NCCL, gpus=2),
    *(
        Probe(f"strategy {name}", partial(strategy, name), _OF_A_STRATEGY, 2, shares=True, needs=_NCCL)
        for name in STRATEGIES
    ),
    *(Probe(f"precision {name}", partial(precision, name), _OF_A_PRECISION) for name in PRECISIONS),
)
"""Rows in the order in which they run. The first row always runs: it describes the GPUs."""


def main(only: Sequence[str], as_json: bool, python: Sequence[str] = (sys.executable, "-u")) -> int:
    """Prints the table. Returns 1 if a row failed.

    Args:
        only: beginnings of the rows' names; none: all rows.
        as_json: whether to print JSON, and the table to stderr.
        python: words that start the processes of a row.

    Raises:
        UserError: there is no GPU, or no such row.
    """
    for word in only:
        if not any(row.name.startswith(word) for row in ROWS):
            raise UserError(f"--only {word}: there is no such row; known: {', '.join(row.name for row in ROWS)}")
    gpus = torch.cuda.device_count()
    if gpus == 0:
        raise UserError(f"nothing to look at: torch {torch.__version__} sees no GPU (nvidia-smi, CUDA_VISIBLE_DEVICES)")
    rows = [row for row in ROWS if row is ROWS[0] or row.name.startswith(tuple(only) or "")]
    value = table(rows, gpus, python, sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(value, indent=1))
    return EXIT_FAILED if any(row["result"] == "failed" for row in value["rows"]) else EXIT_DONE


def table(rows: Sequence[Probe], gpus: int, python: Sequence[str], stream: Any) -> dict[str, Any]:
    """Runs the rows and shows each on `stream`. Returns plain values."""
    value: dict[str, Any] = {"date": date.today().isoformat(), "gpus": gpus, "rows": []}  # noqa: DTZ011 - the user's own day
    for row in rows:
        began = time.monotonic()
        if row.gpus > gpus and not row.shares:
            outcome = Outcome("not tried", "one GPU")
        elif (row.needs, "failed") in [(earlier["name"], earlier["result"]) for earlier in value["rows"]]:
            outcome = Outcome("not tried", f"see the row {row.needs!r}")
        else:
            outcome = _outcome(row.name, 1 if row.alone else max(row.gpus, gpus), python)
        plain = {"name": row.name, **asdict(outcome), "seconds": time.monotonic() - began}
        rates = [f"{name} {rate:.3g}" for name, rate in outcome.rates.items()]
        lines = [f"{row.name:22}  {outcome.result:9}  {'; '.join([outcome.detail, *rates])}"]
        if outcome.result == "failed":
            plain["advice"] = row.advice
            lines.append(f"{'':22}  → {row.advice}")
        print("\n".join(map(printable, lines)), file=stream, flush=True)
        value["rows"].append(plain)
    return value


def _outcome(name: str, ranks: int, python: Sequence[str]) -> Outcome:
    """Returns the result of a row in fresh processes, with the rank's name if only some ranks failed."""
    launch = f"-m lockstep.training launch --ranks {ranks} --time-limit {SECONDS} --grace 5 --"
    command = [*python, *launch.split(), *python, "-m", "lockstep.tools.doctor", name]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    lines = done.stdout.decode(errors="backslashreplace").strip().splitlines() or ["it wrote nothing"]
    found = dict(json.loads(line[line.index('["rank ') :]) for line in lines if '["rank ' in line)
    failed = {rank: values for rank, values in found.items() if values["result"] == "failed"}
    if not failed and len(found) < ranks:
        late = done.returncode == EXIT_TIMED_OUT
        return Outcome("failed", f"no answer within {SECONDS} s" if late else lines[-1][:300])
    rank, values = min((failed or found).items())
    outcome = Outcome(**values)
    return replace(outcome, detail=f"{rank}: {outcome.detail}") if 0 < len(failed) < ranks else outcome


def rank(name: str) -> None:
    """Runs a row in this rank, and prints the result."""
    (row,) = (row for row in ROWS if row.name == name)
    world = detect(os.environ)
    set_threads(world, 0, os.environ)
    backend = "gloo" if world.local_size > torch.cuda.device_count() else "auto"
    with joined(world, "cuda", SECONDS / 2, backend) as world:
        float32_on_gpus(tf32=False)  # as in a run of ours
        try:
            outcome = row.check(world)
        except Exception as error:
            outcome = Outcome("failed", f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}")
            raise  # this process ends, so nothing waits in NCCL for missing ranks
        finally:
            print(json.dumps([f"rank {world.rank}", asdict(outcome)]), flush=True)


if __name__ == "__main__":
    rank(sys.argv[1])
    leave(EXIT_DONE)
