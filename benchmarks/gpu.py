"""python benchmarks/gpu.py --data-root DATA [--bag CHECKOUT] [--airbench CHECKOUT] [--hiverge CHECKOUT] [--seconds 600]

What one GPU can tell in ten minutes (`make bench-gpu`):

- steps: milliseconds of a whole training step of bag_of_tricks and speedrun, eager and recorded as CUDA graphs, and both
  compiled, in turn, at the recipe's batch; at 1/2 … 1/8 of it without the compiled ones; the share of the floor, which is
  the step's arithmetic at the rate of a large half-precision matrix product measured in the same rounds; and the
  kernels that take the time of an eager step
- same numbers: how far the summed losses of 20 recorded and 20 eager steps are apart
- projection: the step on 1 … 64 GPUs by `scaling_model.py`
- trainings against the published codes, by `speedrun.py`, for the time that is left; it takes that program's options too

The file is written anew after every stage: what is done is not lost where the time ends before the work.
`--device cpu --small` runs every line of it that needs no GPU, on small batches: to see that it works, not to measure.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks import speedrun
from benchmarks.measure import RESULTS, interleaved, machine, write
from benchmarks.our_step import FLOP_PER_IMAGE, our_step
from benchmarks.scaling_model import PARAMETERS, project
from lockstep.training import config
from lockstep.training.cudagraph import capture_stream
from lockstep.training.parallel.world import World, detect, joined

BATCH = {"bag_of_tricks": 512, "speedrun": 2000}
REPEATS = 10
"""Steps between two readings of the clock."""


def repeated(step: Callable[[], Any], device: torch.device, repeats: int) -> Callable[[], None]:
    """`repeats` steps, ended by a synchronisation."""

    def run() -> None:
        for _ in range(repeats):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return run


def matmul(device: torch.device, size: int) -> Callable[[], Any]:
    kind = torch.float16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, dtype=kind, device=device) for _ in range(2))
    return lambda: torch.mm(a, b)


def forms(device: torch.device, whole: bool = True) -> dict[str, dict[str, Any]]:
    """Name → arguments of `our_step`; the compiled ones, which take long to make, for the whole batch alone."""
    if device.type == "cpu":
        return {"eager": {}}
    plain = [word for word in speedrun.ON_GPU if not word.startswith("capture")]
    found: dict[str, dict[str, Any]] = {"eager": {"extra": plain}, "recorded": {"extra": [*plain, "capture=auto"]}}
    if whole:
        found |= {f"{name}, compiled": {**settings, "compiled": True} for name, settings in found.items()}
    return found


def steps(recipe: str, world: World, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of each form at each part of the batch, and the share of the floor at the whole one."""
    device, repeats = world.device, 1 if args.small else REPEATS
    size = 512 if args.small else 8192
    whole = 64 if args.small else BATCH[recipe]
    found: dict[str, Any] = {"batch": whole, "milliseconds": {}, "share_of_floor": {}}
    for part in (1, 2) if args.small else (1, 2, 4, 8):
        batch = whole // part
        variants = {"matmul": repeated(matmul(device, size), device, repeats)}
        for name, settings in forms(device, part == 1).items():
            try:
                step = our_step(recipe, batch, world, "flat", **settings)
                for _ in range(5):  # compiles, or records
                    step()
            except Exception as error:  # noqa: BLE001 - one form that fails is a result too
                found.setdefault("failed", {})[f"{name}, batch {batch}"] = f"{type(error).__name__}: {error}"[:500]
                continue
            variants[name] = repeated(step, device, repeats)
        times = interleaved(variants, args.rounds)
        rate = 2 * size**3 * repeats / statistics.median(times["matmul"])
        found.setdefault("matmul_tflops", rate / 1e12)
        for name in variants:
            if name == "matmul":
                continue
            seconds = statistics.median(times[name]) / repeats
            found["milliseconds"].setdefault(name, {})[batch] = seconds * 1e3
            if part == 1:
                found["share_of_floor"][name] = batch * FLOP_PER_IMAGE[recipe] / rate / seconds
    return found


def kernels(recipe: str, world: World, row: dict[str, Any]) -> list[dict[str, Any]]:
    """The twelve kernels (operators, on a CPU) that take most of an eager step, with their share of its time."""
    step = our_step(recipe, row["batch"], world, "flat", **forms(world.device)["eager"])
    for _ in range(3):
        step()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if world.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        repeated(step, world.device, 3)()
    averages = list(profile.key_averages())
    field = "self_cpu_time_total"
    if world.device.type == "cuda":  # the rows of operators and annotations count their kernels' time once more
        field, gpu = "self_device_time_total", torch.autograd.DeviceType.CUDA
        averages = [row for row in averages if row.device_type == gpu and not row.is_user_annotation]
    rows = sorted(((getattr(row, field), row.key, row.count) for row in averages), reverse=True)
    total = sum(time for time, *_ in rows)
    return [{"name": key[:120], "share": time / total, "calls": count / 3} for time, key, count in rows[:12]]


def drift(recipe: str, world: World, row: dict[str, Any]) -> float | None:
    """The largest difference of the summed loss of 20 recorded and 20 eager steps, relative to it; None without a GPU."""
    if world.device.type != "cuda":
        return None
    losses = []
    for name in ("eager", "recorded"):
        torch.manual_seed(0)
        step = our_step(recipe, row["batch"], world, "flat", **forms(world.device)[name])
        for _ in range(20):
            step()
        losses.append(step.losses.clone())  # type: ignore[attr-defined]
    return float(((losses[0] - losses[1]).abs() / losses[0].abs()).max())


def projection(recipe: str, world: World, row: dict[str, Any]) -> dict[int, dict[str, float]]:  # noqa: ARG001
    """Milliseconds of a step on 1 … 64 GPUs, from the fastest form that was measured at every size of batch."""
    times = row["milliseconds"].values()
    most = max(len(one) for one in times)
    best = min((one for one in times if len(one) == most), key=lambda one: one[max(one)])
    points = [(float(batch), ms / 1e3) for batch, ms in best.items()]
    payload = PARAMETERS[recipe] * 4  # gradients have the type of the weights
    found = {}
    for gpus in (1, 2, 4, 8, 16, 32, 64):
        table = "h200" if gpus <= 8 else "h100-ib"
        found[gpus] = {name: s * 1e3 for name, s in project(points, row["batch"], payload, table, gpus).items()}
    return found


STAGES = {"kernels": kernels, "recorded_against_eager": drift, "projection_ms": projection}
"""What is asked of a recipe once its steps are timed."""


def measure(args: argparse.Namespace, save: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Everything; hands what there is to `save` after each stage."""
    deadline = time.monotonic() + args.seconds
    found: dict[str, Any] = {"machine": machine(), "gpu": gpu_name(args.device), "recipes": {}}
    recorded = config.load("speedrun", ["capture=auto"])
    # Recording happens on a stream of its own, where the sync strategy's hooks live too.
    with joined(detect({}), args.device) as world, capture_stream(recorded, world.device):
        for recipe in BATCH:
            row = found["recipes"][recipe] = steps(recipe, world, args)
            save(found)
            for name, stage in STAGES.items():
                try:
                    row[name] = stage(recipe, world, row)
                except Exception as error:  # noqa: BLE001 - the stages after it have something to tell all the same
                    row.setdefault("failed", {})[name] = f"{type(error).__name__}: {error}"[:500]
            show(recipe, row)
            save(found)
    args.seconds = max(deadline - time.monotonic(), 30)
    found["trainings"] = speedrun.measure(args)
    save(found)
    return found


def show(recipe: str, row: dict[str, Any]) -> None:
    print(f"{recipe}: matmul {row['matmul_tflops']:.3g} TFLOP/s")
    for name, times in row["milliseconds"].items():
        share = row["share_of_floor"].get(name)
        cells = "   ".join(f"{batch}: {ms:.2f} ms" for batch, ms in times.items())
        print(f"  {name:20} {cells}   share of the floor {share:.2f}" if share else f"  {name:20} {cells}")
    for name, text in row.get("failed", {}).items():
        print(f"  {name}: {text}")
    for kernel in row.get("kernels", [])[:6]:
        print(f"  {kernel['share']:6.1%}  {kernel['calls']:5.1f} calls  {kernel['name']}")


def gpu_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, add_help=False, allow_abbrev=False
    )
    parser.add_argument("-h", "--help", action="help")
    parser.add_argument("--small", action="store_true", help="small batches, to see that everything runs")
    parser.add_argument("--rounds", type=int, default=7, help="of each step form")
    parser.add_argument("--seconds", type=float, default=600, help="no further training after so long")
    parser.add_argument("--cold", type=int, default=1, help="trainings of each contestant in a process of its own")
    parser.add_argument("--out", type=Path)
    own, rest = parser.parse_known_args()
    args = speedrun.arguments(rest)
    for name, value in vars(own).items():
        setattr(args, name, value)
    if args.device == "cpu" and not args.small:
        raise SystemExit("error: no GPU here: run this where one is, or see that it works with --device cpu --small")
    if args.out is None:
        name = re.sub(r"[^a-z0-9]+", "-", gpu_name(args.device).lower()).strip("-")
        args.out = RESULTS / f"{name}-{machine()['date']}.json"
        args.png = args.png or args.out.with_suffix(".png")
    return args


def main() -> None:
    args = arguments()
    measure(args, lambda result: write("gpu", result, args.out))
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
