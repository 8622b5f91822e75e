"""lockstep top RUN: all ranks of a run, live. Shows the phases of their steps, and the slow rank. Imports no torch."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.training.contract import EXIT_DONE, UserError, printable
from lockstep.wire.status import slow_rank_line

from . import RUN, parser
from .ranks import Rank, Reader, Snapshot

if TYPE_CHECKING:
    from rich.console import Group

STUCK_SECONDS = 60
MAX_LOGGED = 4
"""Largest number of the script's own numbers in the title."""
BAR = 20
AROUND = 6
"""Lines of the terminal around the ranks: title, head, straggler, legend, the number of hidden ranks, and the cursor."""
_LETTERS = (("data_wait", "d", "yellow"), ("compute", "c", "green"), ("sync_wait", "s", "blue"), ("rest", "·", "dim"))
LEGEND = "d waits for data, c computes, s waits for other ranks, · the rest"
WIDE = 110
"""Columns of a terminal that has room for numbers next to the bar."""
_HEAD = (
    "RANK",
    "STEP",
    "IMAGES/S",
    "MS/STEP",
    "WHERE A STEP GOES",
    "DATA",
    "COMPUTE",
    "SYNC",
    "LOSS",
    "MEMORY",
    "NOTE",
)
_NUMBERS = ("DATA", "COMPUTE", "SYNC", "MEMORY")


def main(argv: list[str]) -> int:
    """Shows the ranks. Raises `UserError` for wrong arguments, and for a run without metrics."""
    parsed = parser("top")
    parsed.add_argument("run", type=Path, metavar="RUN", help=RUN)
    parsed.add_argument("--every", type=_seconds, default=2.0, help="seconds between two updates, from 0.2; default: 2")
    parsed.add_argument("--once", action="store_true", help="print one table and exit")
    parsed.add_argument("--json", action="store_true", help="print one JSON value with stable fields")
    args = parsed.parse_args(argv)
    run: Path = args.run
    reader = Reader(run)
    before = reader.read()
    if not before:
        raise UserError(f"{run} has no metrics yet: check that it has started, and that metrics.enabled is true")
    if not args.once and not args.json:
        _live(run, reader, before, args.every)
        return EXIT_DONE
    time.sleep(0.0 if all(snapshot.values.get("finished") for snapshot in before.values()) else args.every)
    ranks = reader.judged(before, reader.read() or before)
    if args.json:
        print(json.dumps([asdict(rank) for rank in ranks], indent=1))
        return EXIT_DONE
    print(title(str(run), ranks))
    rows = [_HEAD, *map(row, ranks)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for cells in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip())
    print(legend(ranks))
    return EXIT_DONE


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0.2 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds from 0.2, got {text!r}")
    return found


def _live(run: Path, reader: Reader, before: dict[int, Snapshot], every: float) -> None:
    from rich.live import Live

    # Compares with the reading before the last, so that a slow step ends between the two.
    readings = [before]
    with Live(picture(str(run), reader.judged({}, before)), auto_refresh=False, screen=False) as live:
        while True:
            time.sleep(every)
            readings = [*readings[-2:], reader.read() or readings[-1]]
            ranks = reader.judged(readings[0], readings[-1])
            live.update(picture(str(run), ranks), refresh=True)
            if all(rank.exit_code is not None for rank in ranks):
                return


def legend(ranks: list[Rank]) -> str:
    """Returns the meaning of the letters, and the cost of the slow rank."""
    return "\n".join([slow_rank_line(rank.straggler) for rank in ranks if rank.straggler] + [LEGEND])


def fitting(ranks: list[Rank], rows: int) -> list[Rank]:
    """Returns as many ranks as fit into `rows`, in their order. Ranks that delay the others or report something come first, then those
    that wait least."""
    if len(ranks) <= rows:
        return ranks
    found = sorted(
        ranks, key=lambda rank: (not rank.hang, not rank.straggler, not note(rank), rank.sync_wait or 0.0, rank.rank)
    )
    return sorted(found[:rows], key=lambda rank: rank.rank)


def title(run: str, ranks: list[Rank], width: int = 10_000) -> str:
    """Returns how far the run is, how fast, and the numbers that its script logged. A path that does not fit loses its beginning."""
    images = sum(rank.images_per_second or 0 for rank in ranks)
    first = ranks[0]
    planned = f" of {first.steps_planned}" if first.steps_planned else ""
    logged = "".join(f", {printable(name)} {value:.4g}" for name, value in list(first.logged.items())[:MAX_LOGGED])
    told = f": step {first.step}{planned}, {images:.0f} samples/s{logged}"
    path, room = printable(run), max(width - len(told), 2)
    return (path if len(path) <= room else f"…{path[1 - room :]}") + told


def picture(run: str, ranks: list[Rank]) -> Group:
    """Returns the live table, in the current size of the terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    terminal = shutil.get_terminal_size()
    shown_ranks = fitting(ranks, max(terminal.lines - AROUND, 1))
    left = len(ranks) - len(shown_ranks)
    caption = legend(ranks) + (f"\n… and {left} more ranks" if left else "")
    table = Table(box=None, pad_edge=False)
    wide = terminal.columns >= WIDE
    shown = [number for number, name in enumerate(_HEAD) if wide or name not in _NUMBERS]
    for name in (_HEAD[number] for number in shown):
        table.add_column(name, justify="left" if name in ("WHERE A STEP GOES", "NOTE") else "right", no_wrap=True)
    for rank in shown_ranks:
        cells: list[str | Text] = list(row(rank))
        bar = Text()
        for letters, colour in _runs(rank):
            bar.append(letters, style=colour)
        cells[4] = bar
        style = "bold red" if rank.straggler or rank.hang else None
        table.add_row(*(cells[number] for number in shown), style=style)
    # Apart from the table, which may be narrower. As text: a [/x] in a path is no markup.
    head = Text(title(run, ranks, terminal.columns), style="bold", no_wrap=True, overflow="ellipsis")
    return Group(head, table, Text(caption, style="dim"))


def row(rank: Rank) -> tuple[str, ...]:
    """Returns the cells of a rank as plain text."""
    return (
        str(rank.rank), str(rank.step), _number(rank.images_per_second, "{:.0f}"),
        _number(rank.step_seconds and rank.step_seconds * 1e3, "{:.1f}"), "".join(letters for letters, _ in _runs(rank)),
        _number(rank.data_wait, "{:.0%}"), _number(rank.compute, "{:.0%}"), _number(rank.sync_wait, "{:.0%}"),
        _number(rank.loss, "{:.4f}"), _number(rank.memory_bytes and rank.memory_bytes / 2**20, "{:.0f} MiB"), note(rank),
    )  # fmt: skip


def note(rank: Rank) -> str:
    if rank.hang:
        return f"◀ HANGS: {rank.hang}"
    if rank.straggler:
        return f"◀ STRAGGLER ({printable(rank.straggler['phase'])})"
    if rank.exit_code is not None:
        return {0: "done", 2: "wrong usage", 75: "preempted"}.get(rank.exit_code, f"failed ({rank.exit_code})")
    if rank.seconds_since_step is not None and rank.seconds_since_step > STUCK_SECONDS:
        return f"no step for {rank.seconds_since_step:.0f} s"
    return "from its textfile" if rank.source == "textfile" else ""


def _runs(rank: Rank) -> list[tuple[str, str]]:
    """Returns the bar: letters and colour of each phase, `BAR` letters in all."""
    runs, done, at = [], 0, 0.0
    for name, letter, colour in _LETTERS:
        at += getattr(rank, name) or 0.0
        upto = min(BAR, round(at * BAR)) if math.isfinite(at * BAR) else done
        runs.append((letter * (upto - done), colour))
        done = max(done, upto)
    return runs


def _number(value: float | None, form: str) -> str:
    return "–" if value is None or not math.isfinite(value) else form.format(value)
