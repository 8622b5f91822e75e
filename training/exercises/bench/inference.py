"""python -m lockstep.training bench inference: does `nn.DataParallel` speed up inference?

The same network and batches alone on one device and wrapped in `DataParallel`, interleaved, over batch sizes. Without at
least two GPUs DataParallel hands the batch through to the module: the numbers then show that wrapping costs nothing and
gives nothing, and the output says so.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.training import config as configuration
from lockstep.training.cli import PROGRAM, Parser, about, add_set, make_folder, positive, several
from lockstep.training.contract import EXIT_DONE


def main(argv: list[str]) -> int:
    """Measures, prints and writes inference.json. Raises `UserError` for wrong arguments, or a folder that cannot be written."""
    parser = Parser(prog=f"{PROGRAM} bench inference", description=about(__doc__))
    parser.add_argument("--recipe", default="resnet18", help="whose model to run (default: resnet18)")
    parser.add_argument("--batches", type=several, default=[1, 16, 64, 256], metavar="1,16,64",
                        help="images of a batch (default: 1,16,64,256)")  # fmt: skip
    parser.add_argument("--rounds", type=positive, default=7, help="how often each is timed (default: 7)")
    add_set(parser, "change settings of the recipe")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-inference"), help="folder of inference.json")
    args = parser.parse_args(argv)
    config = configuration.load(args.recipe, args.assignments)
    make_folder(args.out)

    import torch
    from torch import nn

    from lockstep.training import models
    from lockstep.training.data.shards import Manifest, prepare

    devices = torch.cuda.device_count() if config.device != "cpu" else 0
    device = torch.device("cuda" if devices else "cpu")
    classes = 10
    shape: tuple[int, ...] = (32, 32, 3)
    if config.data.source in ("classification", "fashion_mnist") or config.data.shards:
        manifest = Manifest.read(prepare(config.data))
        classes, shape = len(manifest.classes), manifest.shape
    torch.manual_seed(0)
    alone = models.build(config.model, config.model_options, classes, shape).to(device).eval()
    wrapped = nn.DataParallel(alone)
    sample = (shape[2], *shape[:2]) if len(shape) == 3 else shape
    rows = []
    with torch.inference_mode():
        for batch in args.batches:
            images = torch.randn(batch, *sample, device=device)
            times = _interleaved({"alone": alone, "data_parallel": wrapped}, images, args.rounds)
            rate = {name: batch / statistics.median(seconds) for name, seconds in times.items()}
            ratio = statistics.median(a / b for a, b in zip(times["alone"], times["data_parallel"]))
            rows.append({"batch": batch, "images_per_second": rate, "speed_up": ratio, "seconds": times})
    verdict = _verdict(devices, rows)
    print(f"{args.recipe} on {devices or 'no'} GPU(s), {torch.get_num_threads()} CPU threads, {args.rounds} rounds")
    print("batch   one device   DataParallel images/s   speed-up")
    for row in rows:
        single, many = row["images_per_second"].values()
        print(f"{row['batch']:5d} {single:12.1f} {many:23.1f} {row['speed_up']:9.2f}×")
    print(verdict)
    path = args.out / "inference.json"
    path.write_text(
        json.dumps({"recipe": args.recipe, "gpus": devices, "rows": rows, "verdict": verdict}, indent=1) + "\n"
    )
    print(f"written to {path}")
    return EXIT_DONE


def _interleaved(forms: dict[str, Callable[[Any], Any]], images: Any, rounds: int) -> dict[str, list[float]]:
    import torch

    times: dict[str, list[float]] = {name: [] for name in forms}
    for number in range(rounds + 1):  # the first round warms up
        names = list(forms) if number % 2 else list(forms)[::-1]
        for name in names:
            began = time.perf_counter()
            forms[name](images)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if number:
                times[name].append(time.perf_counter() - began)
    return times


def _verdict(devices: int, rows: list[dict[str, Any]]) -> str:
    if devices < 2:
        return (
            f"DataParallel is a pass-through here: with {devices or 'no'} GPU(s) it has nothing to share a batch among, so a "
            "ratio other than 1 is noise. On several GPUs it copies the weights to each at every call, which pays only "
            "for large batches; this machine cannot show it."
        )
    best = max(rows, key=lambda row: row["speed_up"])
    pays = [row["batch"] for row in rows if row["speed_up"] > 1.05]
    if not pays:
        return f"DataParallel over {devices} GPUs is not faster than one at any of these batch sizes: scattering and copying cost more."
    return f"DataParallel over {devices} GPUs pays from a batch of {min(pays)} on, at best {best['speed_up']:.2f}× (batch {best['batch']})."
