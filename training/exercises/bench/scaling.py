"""python -m lockstep.training bench scaling --ranks 1,2,4: how much faster are more ranks, and where does the time go?

Each number of ranks trains the same recipe with the global batch fixed, and with the batch a rank fixed. Every rank has
the same number of CPU threads at every world size, as every rank of a cluster has its own device. Rounds are
interleaved and medians are printed. Then every gradient-sync strategy in turn: images a second and peak memory.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.training import config as configuration
from lockstep.training.cli import PROGRAM, Parser, about, add_set, make_folder, positive, several
from lockstep.training.contract import EXIT_DONE, UserError
from lockstep.training.exercises.bench.gang import PHASES, Job, Measured, run
from lockstep.training.parallel.world import cores

BOTH = ("fixed", "scaled")
"""The global batch stays, or grows with the ranks."""


def main(argv: list[str]) -> int:
    """Measures, prints, and writes scaling.json and scaling.png.

    Raises `UserError` for wrong arguments, or a folder that cannot be written.
    """
    parser = Parser(prog=f"{PROGRAM} bench scaling", description=about(__doc__))
    parser.add_argument(
        "--ranks", type=several, default=[1, 2], metavar="1,2,4", help="numbers of ranks to compare (default: 1,2)"
    )
    parser.add_argument("--recipe", default="smoke", help="what to train (default: smoke)")
    parser.add_argument(
        "--batch", type=positive, help="the batch at the smallest number of ranks; default: the recipe's"
    )
    parser.add_argument("--steps", type=positive, default=20, help="steps that are timed in a round (default: 20)")
    parser.add_argument("--warm-up", type=positive, default=3, help="steps before them that are not timed (default: 3)")
    parser.add_argument("--rounds", type=positive, default=3, help="how often each is trained (default: 3)")
    parser.add_argument(
        "--threads", type=positive, help="CPU threads a rank; default: cores / the largest number of ranks"
    )
    parser.add_argument("--strategies", help="strategies to compare, e.g. ddp,flat; default: all; none: leave them out")
    add_set(parser, "change settings of the recipe")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench-scaling"), help="folder of scaling.json and scaling.png"
    )
    args = parser.parse_args(argv)
    args.ranks = sorted(set(args.ranks))
    settings = configuration.load(args.recipe, args.assignments)
    batch = args.batch or settings.global_batch_size or (settings.batch_size or 0) * args.ranks[0]
    threads = args.threads or max(1, cores() // max(args.ranks))
    strategies = _strategies(args.strategies)
    base = Job(args.recipe, args.assignments, args.ranks[0], args.steps, args.warm_up, threads)
    make_folder(args.out)
    measured = _measure(base, args.ranks, batch, args.rounds)
    rows = {name: table(times, args.ranks[0]) for name, times in measured.items()}
    by_strategy = dict(_each_strategy(base, strategies, max(args.ranks), batch))
    sentence = why(rows["fixed"], threads)
    _print(rows, by_strategy, batch, threads, args, sentence)
    result = {
        "recipe": args.recipe, "set": args.assignments, "batch": batch, "steps": args.steps, "rounds": args.rounds,
        "threads_a_rank": threads, "cores": cores(), "fixed": rows["fixed"], "scaled": rows["scaled"],
        "strategies": by_strategy, "why": sentence, "data_parallel_against_ddp": against_ddp(by_strategy),
    }  # fmt: skip
    (args.out / "scaling.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    from lockstep.training.exercises.bench.chart import draw

    draw(rows, args.out / "scaling.png", f"{args.recipe}, batch {batch}, {threads} thread(s) a rank")
    print(f"\nwritten to {args.out / 'scaling.json'} and {args.out / 'scaling.png'}")
    return EXIT_DONE


def _strategies(names: str | None) -> list[str]:
    from lockstep.training import sync

    if names == "none":
        return []
    chosen = names.split(",") if names else list(sync.STRATEGIES)
    for name in chosen:
        if name not in sync.STRATEGIES:
            raise UserError(f"--strategies: there is no {name!r}; known: {', '.join(sync.STRATEGIES)}")
    return chosen


def _measure(base: Job, ranks: list[int], batch: int, rounds: int) -> dict[str, dict[int, Measured]]:
    """{fixed | scaled: {ranks: the medians over the rounds}}; the smallest number of ranks is in both."""
    jobs = {("fixed", size): _with(base, size, batch) for size in ranks}
    jobs |= {("scaled", size): _with(base, size, batch * size // ranks[0]) for size in ranks[1:]}
    runs: dict[tuple[str, int], list[Measured]] = {key: [] for key in jobs}
    total = rounds * len(jobs)
    for number in range(rounds):
        keys = list(jobs)
        turn = number % len(keys)
        for place, key in enumerate(keys[turn:] + keys[:turn], number * len(keys) + 1):
            _progress(
                f"{place} of {total}: {key[0]} batch, {key[1]} rank{'s' if key[1] > 1 else ''}, round {number + 1}"
            )
            runs[key].append(run(jobs[key]))
    runs["scaled", ranks[0]] = runs["fixed", ranks[0]]
    return {name: {size: _median(runs[name, size]) for size in ranks} for name in BOTH}


def _progress(text: str) -> None:
    """On stderr, because minutes pass: a measurement on a busy machine looked as if it hung."""
    print(f"measuring {text}", file=sys.stderr, flush=True)


def _with(base: Job, ranks: int, batch: int, *more: str) -> Job:
    # `weight`: any number of ranks can share any batch.
    assignments = [*base.assignments, f"global_batch_size={batch}", "uneven=weight", *more]
    return dataclasses.replace(base, ranks=ranks, assignments=assignments)


def _median(runs: list[Measured]) -> Measured:
    middle = statistics.median
    return Measured(
        images_per_second=middle(measured.images_per_second for measured in runs),
        step=middle(measured.step for measured in runs),
        phases={phase: middle(measured.phases[phase] for measured in runs) for phase in PHASES},
        peak_bytes=int(middle(measured.peak_bytes for measured in runs)),
        sent_bytes=runs[0].sent_bytes,
    )


def table(times: dict[int, Measured], smallest: int) -> list[dict[str, Any]]:
    """A row for each number of ranks: speed-up against the smallest number, and efficiency = speed-up / ratio of ranks."""
    first = times[smallest]
    rows = []
    for size, measured in times.items():
        speed_up = measured.images_per_second / first.images_per_second
        rows.append(
            {
                "ranks": size,
                "speed_up": speed_up,
                "efficiency": speed_up * smallest / size,
                **dataclasses.asdict(measured),
            }
        )
    return rows


def why(rows: list[dict[str, Any]], threads: int) -> str:
    """A sentence that says, from the measured phases, why the most ranks are not as many times as fast as the fewest."""
    first, last = rows[0], rows[-1]
    if first is last:
        return "One number of ranks has no speed-up to explain: give --ranks at least two."
    ratio = last["ranks"] / first["ranks"]
    ideal, step = first["step"] / ratio, last["step"]
    extra = {phase: last["phases"][phase] - first["phases"][phase] / ratio for phase in PHASES}
    parts = [f"{phase} {1000 * extra[phase]:+.1f} ms" for phase in sorted(PHASES, key=lambda phase: -extra[phase])]
    text = (
        f"Why is it not {ratio:g}×? At {last['ranks']} ranks and the same global batch a step takes {1000 * step:.1f} ms where "
        f"1/{ratio:g} of the step on {first['ranks']} would be {1000 * ideal:.1f} ms. The difference: {', '.join(parts)}. "
        "Communication is new work that one rank does not have; optimizer and per-step overhead are done by every rank in "
        "full; smaller parts of a batch use a device less well; and ranks on one machine share its memory bandwidth."
    )
    if last["ranks"] * threads > cores():
        text += (
            f" {last['ranks']} ranks of {threads} thread(s) share {cores()} cores here: they cannot all run at once."
        )
    return text


def _each_strategy(base: Job, names: list[str], ranks: int, batch: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Images a second and peak memory of each strategy.

    One that refuses several ranks is measured with one, on the CPU threads of all of them: the same part of the machine.
    """
    for place, name in enumerate(names, 1):
        _progress(f"strategy {place} of {len(names)}: {name}")
        refused = None
        for size in [ranks, 1] if ranks > 1 else [1]:
            threads = base.threads * ranks // size
            job = dataclasses.replace(_with(base, size, batch, f"sync.name={name}"), threads=threads)
            try:
                values = dataclasses.asdict(run(job))
            except UserError as error:
                refused = str(error)
                continue
            except RuntimeError as error:  # the others still have theirs to show
                yield name, {"ranks": 0, "refused": refused, "failed": str(error)}
                break
            yield name, {"ranks": size, "threads": threads, **values, "refused": refused}
            break
        else:
            yield name, {"ranks": 0, "refused": refused}


def against_ddp(rows: dict[str, dict[str, Any]]) -> str:
    """A sentence: how fast `data_parallel` is beside `ddp`. Empty where one of them has no numbers."""
    data_parallel, ddp = rows.get("data_parallel", {}), rows.get("ddp", {})
    if not data_parallel.get("ranks") or not ddp.get("ranks"):
        return ""

    def started(row: dict[str, Any]) -> str:
        return f"{row['ranks']} process{'es' if row['ranks'] > 1 else ''} × {row['threads']} CPU thread(s)"

    ratio = data_parallel["images_per_second"] / ddp["images_per_second"]
    return (
        f"data_parallel ({started(data_parallel)}) is {ratio:.2f}× as fast as ddp ({started(ddp)}), at the same batch."
    )


def _print(
    rows: dict[str, list[dict[str, Any]]],
    strategies: dict[str, dict[str, Any]],
    batch: int,
    threads: int,
    args: Any,
    sentence: str,
) -> None:
    print(f"{args.recipe}, {args.steps} steps, {args.rounds} round(s), {threads} thread(s) a rank of {cores()} cores")
    for name in BOTH:
        grows = f"global batch {batch}" if name == "fixed" else f"batch grows with the ranks, from {batch}"
        print(f"\n{grows}\nranks  images/s  speed-up  efficiency   step ms | " + "  ".join(f"{p:>9}" for p in PHASES))
        for row in rows[name]:
            phases = "  ".join(f"{1000 * row['phases'][p]:{max(9, len(p))}.1f}" for p in PHASES)
            print(
                f"{row['ranks']:5d} {row['images_per_second']:9.1f} {row['speed_up']:8.2f}× {row['efficiency']:11.2f}"
                f" {1000 * row['step']:9.1f} | {phases}"
            )
    print(f"\n{sentence}")
    if strategies:
        print("\nstrategy        ranks  images/s  peak memory MB a rank  gradient MB sent a step")
    for name, row in strategies.items():
        if row["ranks"]:
            print(
                f"{name:15} {row['ranks']:5d} {row['images_per_second']:9.1f} {row['peak_bytes'] / 1e6:22.1f}"
                f" {row['sent_bytes'] / 1e6:24.2f}"
            )
        for reason in ("refused", "failed"):
            if row.get(reason):
                print(f"{name:15} {reason}: {row[reason]}")
    if against_ddp(strategies):
        print(against_ddp(strategies))
