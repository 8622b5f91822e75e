"""lockstep goodput RUN …: where the time of one or several runs went, over all attempts. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path

from lockstep.training.cli import run_dir
from lockstep.training.contract import EXIT_DONE, TIME_FILE, UserError, printable
from lockstep.training.observe.account import TimeCategory, of_run, together
from lockstep.wire.status import goodput_line

from . import RUN, parser


def main(argv: list[str]) -> int:
    """Prints the table, or JSON. Raises `UserError` for wrong arguments, and for a run without a record of its time."""
    parsed = parser("goodput")
    parsed.add_argument(
        "runs", type=run_dir, metavar="RUN", nargs="+", help=f"{RUN}; several, such as those of a sweep"
    )
    parsed.add_argument("--json", action="store_true", help="print one JSON value with stable fields")
    args = parsed.parse_args(argv)
    runs: list[Path] = args.runs
    accounts = [of_run(run) for run in runs]
    for run, account in zip(runs, accounts):
        if not account.attempts:
            raise UserError(f"{run} has no {TIME_FILE} that can be read: give a run directory whose run has begun")
    total = together(accounts).plain()
    if args.json:
        each = [{"run": str(run), **account.plain()} for run, account in zip(runs, accounts)]
        print(json.dumps({"runs": each, "total": total}, indent=1))
        return EXIT_DONE
    for run, account in zip(runs, accounts):
        print(printable(f"{run}: {goodput_line(account.shares())}, of {account.wall:.0f} s"))
    if len(runs) > 1:
        print(f"{len(runs)} runs: {goodput_line(total)}, of {total['wall_seconds']:.0f} s")
    print(f"{'':12} {'SECONDS':>12} {'SHARE':>7}")
    for name, seconds in sorted(total["seconds"].items(), key=lambda item: -item[1]):
        if seconds or name == TimeCategory.UNKNOWN:
            print(
                f"{name.replace('_', ' '):12} {seconds:12.1f} {100 * seconds / max(total['wall_seconds'], 1e-9):5.1f} %"
            )
    return EXIT_DONE
