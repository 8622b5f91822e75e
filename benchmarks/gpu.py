"""python benchmarks/gpu.py [--rounds 7] [--seconds 600] [--limit 120] [--out FILE]

What the steps of one GPU tell (`make bench GPU=1`, which goes on with `speedrun.py`): milliseconds of a whole training step
of bag_of_tricks and speedrun in the form that they have on a GPU, eager, recorded as CUDA graphs, recorded and compiled, and recorded
under exact, in turn, at the recipe's batch; at 1/2 … 1/8 of it eager and recorded alone; the share of the floor, which is the step's
arithmetic at the rate of a large half-precision matrix product measured in the same rounds; and the kernels that take the time of an
eager step.

What is done is said on standard error as it goes, and the file is written anew after every stage. A form that takes longer than `--limit`
to get ready, and one for which no time is left, fails alone. `--device cpu --small` runs every line of it that needs no GPU, on small
batches: to see that it works, not to measure.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.cpu_step import FLOP_PER_IMAGE, our_step
from benchmarks.measure import RESULTS, interleaved, machine, write
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


def forms(device: torch.device, whole: bool = True) -> dict[str, list[str]]:
    """Name → settings; the compiled ones, which take long to make, for the whole batch alone."""
    plain = ["nonfinite=ignore", "compile=false"]
    found = {"eager": [*plain, "capture=never"]}
    if device.type == "cuda":
        found["recorded"] = plain
    if whole and device.type == "cuda":
        found["exact, recorded"] = [*plain, "sync.name=exact"]
        found["recorded, compiled"] = ["nonfinite=ignore", "compile=true"]
    return found


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises `TimeoutError` inside after so many seconds."""

    def ended(*_: object) -> None:
        raise TimeoutError(f"not ready after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ended)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def steps(recipe: str, world: World, args: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """Milliseconds of each form at each part of the batch, and the share of the floor at the whole one. No form begins after `deadline`."""
    device, repeats = world.device, 1 if args.small else REPEATS
    size = 512 if args.small else 8192
    whole = 64 if args.small else BATCH[recipe]
    found: dict[str, Any] = {"batch": whole, "milliseconds": {}, "share_of_floor": {}}
    for part in (1, 2) if args.small else (1, 2, 4, 8):
        batch = whole // part
        variants = {"matmul": repeated(matmul(device, size), device, repeats)}
        with contextlib.ExitStack() as stack:
            for name, settings in forms(device, part == 1).items():
                left = deadline - time.monotonic()
                # What a run prints is swallowed while it is open: standard error is not.
                print(f"{recipe}, batch {batch}: {name} …", file=sys.stderr, flush=True)
                try:
                    if left <= 0:
                        raise TimeoutError("no time is left (--seconds)")
                    with limited(min(args.limit, left)):
                        step = stack.enter_context(our_step(recipe, batch, world, *settings))
                        for _ in range(1 if args.small else 5):  # compiles
                            step()
                except (Exception, SystemExit) as error:  # noqa: BLE001 - one form that fails is a result too
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
    activities = [torch.profiler.ProfilerActivity.CPU]
    if world.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with our_step(recipe, row["batch"], world, *forms(world.device)["eager"]) as step:
        for _ in range(3):
            step()
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


def measure(args: argparse.Namespace, found: dict[str, Any], save: Callable[[dict[str, Any]], object]) -> None:
    """Fills in the recipes; hands what there is to `save` after each stage."""
    began = time.monotonic()
    with joined(detect({}), args.device) as world:
        for number, recipe in enumerate(BATCH, 1):
            row = found["recipes"][recipe] = steps(recipe, world, args, began + args.seconds * number / len(BATCH))
            save(found)
            try:
                row["kernels"] = kernels(recipe, world, row)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the next recipe has something to tell all the same
                row.setdefault("failed", {})["kernels"] = f"{type(error).__name__}: {error}"[:500]
            show(recipe, row)
            save(found)


def show(recipe: str, row: dict[str, Any]) -> None:
    print(f"{recipe}: matmul {row['matmul_tflops']:.3g} TFLOP/s", flush=True)
    for name, times in row["milliseconds"].items():
        share = row["share_of_floor"].get(name)
        cells = "   ".join(f"{batch}: {ms:.2f} ms" for batch, ms in times.items())
        print(f"  {name:20} {cells}   share of the floor {share:.2f}" if share else f"  {name:20} {cells}")
    for name, text in row.get("failed", {}).items():
        print(f"  {name}: {text}")
    for kernel in row.get("kernels", [])[:6]:
        print(f"  {kernel['share']:6.1%}  {kernel['calls']:5.1f} calls  {kernel['name']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="small batches, to see that everything runs")
    parser.add_argument("--rounds", type=int, default=7, help="of each step form")
    parser.add_argument("--seconds", type=float, default=600, help="no form begins after so long")
    parser.add_argument(
        "--limit", type=float, default=120, help="seconds for a form to get ready, with what it compiles"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="the file of the result (default: in benchmarks/results)")
    args = parser.parse_args()
    if args.device == "cpu" and not args.small:
        raise SystemExit("error: no GPU here: run this where one is, or see that it works with --device cpu --small")
    about = machine()
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    file = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    out = args.out or RESULTS / f"{file}-{about['date']}.json"
    measure(args, {"machine": about, "gpu": name, "recipes": {}}, lambda result: write("gpu", result, out))
    print(f"written to {out}")


if __name__ == "__main__":
    main()
