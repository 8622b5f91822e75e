"""lockstep top RUN: all ranks of a run, live. Shows the phases of their steps, and the slow rank. Imports no torch."""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.training.cli import run_dir
from lockstep.training.contract import EXIT_DONE, UserError, printable
from lockstep.wire.status import slow_rank_line

from . import RUN, parser
from .ranks import Rank, Reader

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

STUCK_SECONDS = 60
MAX_LOGGED = 4
"""Largest number of the script's own numbers in the title."""
BAR = 20
AROUND = 7
"""Lines of the terminal around the ranks: title, head, straggler, legend, the number of hidden ranks, and the cursor."""
_LETTERS = (("data_wait", "d", "yellow"), ("compute", "c", "green"), ("sync_wait", "s", "blue"), ("rest", "·", "dim"))
LEGEND = "d waits for data, c computes, s waits for other ranks, · the rest"
_HEAD = ("RANK", "STEP", "IMAGES/S", "MS/STEP", "WHERE A STEP GOES", "LOSS", "MEMORY", "NOTE")


def main(argv: list[str]) -> int:
    """Shows the ranks. Raises `UserError` for wrong arguments, and for a run without metrics."""
    parsed = parser("top")
    parsed.add_argument("run", type=run_dir, metavar="RUN", help=RUN)
    parsed.add_argument("--every", type=float, default=3.0, help="seconds between two updates, from 0.2; default: 3")
    parsed.add_argument("--once", action="store_true", help="print one table and exit")
    parsed.add_argument("--json", action="store_true", help="print one JSON value with stable fields")
    args = parsed.parse_args(argv)
    if not 0.2 <= args.every < math.inf:
        raise UserError(f"--every must be a number of seconds from 0.2, got {args.every}")
    run: Path = args.run
    reader = Reader(run)
    before = reader.read()
    if not before:
        raise UserError(f"{run} has no metrics yet: check that it has started, and that metrics.enabled is true")
    if not args.once and not args.json:
        _live(run, reader, args.every)
        return EXIT_DONE
    time.sleep(0.0 if all(snapshot.values.get("finished") for snapshot in before.values()) else args.every)
    ranks = reader.judged(before, reader.read() or before)
    if args.json:
        print(json.dumps([asdict(rank) for rank in ranks], indent=1))
        return EXIT_DONE
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 160).print(picture(str(run), ranks, len(ranks)))
    return EXIT_DONE


def _live(run: Path, reader: Reader, every: float) -> None:
    from rich.live import Live

    # Compares with the reading before the last, so that a slow step ends between the two.
    readings = [reader.read()]
    ranks = reader.judged({}, readings[0])
    with Live(auto_refresh=False, screen=False) as live:
        while True:
            live.update(picture(str(run), ranks, max(shutil.get_terminal_size().lines - AROUND, 1)), refresh=True)
            if all(rank.exit_code is not None for rank in ranks):
                return
            time.sleep(every)
            readings = [*readings[-2:], reader.read() or readings[-1]]
            ranks = reader.judged(readings[0], readings[-1])


def picture(run: str, ranks: list[Rank], rows: int) -> Group:
    """Returns the title, the table and the legend. Of more ranks than `rows` it shows those that delay the others, or wait least."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    first = sorted(ranks, key=lambda rank: (not rank.hang, not rank.straggler, rank.sync_wait or 0.0))[:rows]
    table = Table(box=None, pad_edge=False)
    for name in _HEAD:
        table.add_column(name, justify="left" if name in ("WHERE A STEP GOES", "NOTE") else "right", no_wrap=True)
    for rank in sorted(first, key=lambda rank: rank.rank):
        cells = (
            str(rank.rank), str(rank.step), _number(rank.images_per_second, "{:.0f}"),
            _number(rank.step_seconds and rank.step_seconds * 1e3, "{:.1f}"), _bar(rank), _number(rank.loss, "{:.4f}"),
            _number(rank.memory_bytes and rank.memory_bytes / 2**20, "{:.0f} MiB"), Text(note(rank)),
        )  # fmt: skip
        table.add_row(*cells, style="bold red" if rank.straggler or rank.hang else None)
    slow = [slow_rank_line(rank.straggler) for rank in ranks if rank.straggler]
    hidden = [f"… and {len(ranks) - rows} more ranks"] if len(ranks) > rows else []
    # As text: a [/x] in a path is no markup.
    return Group(Text(title(run, ranks), "bold"), table, Text("\n".join([*slow, LEGEND, *hidden]), "dim"))


def title(run: str, ranks: list[Rank]) -> str:
    """Returns how far the run is, how fast, and the numbers that its script logged."""
    images, first = sum(rank.images_per_second or 0 for rank in ranks), ranks[0]
    planned = f" of {first.steps_planned}" if first.steps_planned else ""
    logged = "".join(f", {printable(name)} {value:.4g}" for name, value in list(first.logged.items())[:MAX_LOGGED])
    return f"{printable(run)}: step {first.step}{planned}, {images:.0f} samples/s{logged}"


def note(rank: Rank) -> str:
    if rank.hang:
        return f"◀ HANGS: {rank.hang}"
    if rank.straggler:
        return f"◀ STRAGGLER ({printable(rank.straggler['phase'])})"
    if rank.exit_code is not None:
        return {0: "done", 2: "wrong usage", 75: "preempted"}.get(rank.exit_code, f"failed ({rank.exit_code})")
    if rank.seconds_since_step is not None and rank.seconds_since_step > STUCK_SECONDS:
        return f"no step for {rank.seconds_since_step:.0f} s"
    return ""


def _bar(rank: Rank) -> Text:
    """Returns `BAR` letters, a letter and colour for each phase."""
    from rich.text import Text

    bar, at = Text(), 0.0
    for name, letter, colour in _LETTERS:
        at += getattr(rank, name) or 0.0
        upto = min(BAR, round(at * BAR)) if math.isfinite(at * BAR) else 0
        bar.append(letter * (upto - len(bar)), colour)
    return bar


def _number(value: float | None, form: str) -> str:
    return "–" if value is None or not math.isfinite(value) else form.format(value)
