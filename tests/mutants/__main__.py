"""python -m tests.mutants [NAME …] [--needs plain|root|…] [--list] [--check-clean] [--json FILE]

Breaks the code on purpose, one mistake at a time, and shows that a test notices. Exit code 1 where one did not, or where
nothing can be said of one.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from tests.mutants import runner
from tests.mutants.runner import Outcome
from tests.mutants.table import NEEDS, Mutant, load

HEAD = ("Mutant", "Promise", "Suite", "Caught by")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants, or patterns such as 'slurm-*'; default: all")
    parser.add_argument("--needs", action="append", choices=NEEDS, help="only those that need this; may be given again")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument(
        "--check-clean", action="store_true", help="first run each selection of tests without a mistake"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there, too")
    args = parser.parse_args(argv)
    mutants = [one for one in load() if not args.needs or one.needs in args.needs]
    for pattern in args.names:
        if not any(fnmatch.fnmatch(one.name, pattern) for one in mutants):
            parser.error(f"there is no mutant {pattern!r}: see --list")
    if args.names:
        mutants = [one for one in mutants if any(fnmatch.fnmatch(one.name, pattern) for pattern in args.names)]
    if args.list:
        for one in mutants:
            print(f"{one.name:44} {one.needs:11} {'; '.join(one.breaks)}")
        return 0
    signal.signal(signal.SIGTERM, _stop)  # as Ctrl-C: the copy goes, and what runs in it
    return _run(mutants, args.check_clean, args.json)


def _run(mutants: list[Mutant], check_clean: bool, file: Path | None) -> int:
    clean: dict[tuple[str, ...], Outcome] = {}
    found: list[tuple[Mutant, Outcome]] = []
    stopped = False
    try:
        for one in mutants:
            if check_clean and one.tests not in clean:
                clean[one.tests] = runner.run_clean(one.tests, one.seconds)
                _say("unbroken", " ".join(one.tests), clean[one.tests])
            if check_clean and clean[one.tests].verdict != "survived":
                before = clean[one.tests]
                outcome = Outcome("invalid", f"fails without the mistake, too: {before.by}", before.said)
            else:
                outcome = runner.run(one)
            _say(outcome.verdict, one.name, outcome)
            found.append((one, outcome))
    except KeyboardInterrupt:
        stopped = True
    print(table(found))
    if file is not None:
        file.write_text(json.dumps([_plain(one, outcome) for one, outcome in found], indent=1) + "\n", encoding="utf-8")
    if stopped:
        return 128 + signal.SIGINT
    return 0 if all(outcome.verdict == "caught" for _, outcome in found) else 1


def _say(what: str, name: str, outcome: Outcome) -> None:
    print(f"{what:8} {outcome.seconds:6.1f} s  {name}: {outcome.by}", file=sys.stderr, flush=True)


def table(found: list[tuple[Mutant, Outcome]]) -> str:
    """A Markdown table of the outcomes."""
    rows = [HEAD, tuple("---" for _ in HEAD)]
    for one, outcome in found:
        by = outcome.by if outcome.verdict == "caught" else f"**{outcome.verdict}**: {outcome.by}"
        said = f": `{outcome.said.replace('`', '')}`" if outcome.said else ""
        rows.append((one.name, "; ".join(one.breaks), one.suite, by + said))
    return "\n".join(f"| {' | '.join(cell.replace('|', '¦') for cell in row)} |" for row in rows)


def _plain(one: Mutant, outcome: Outcome) -> dict[str, Any]:
    return {"name": one.name, "breaks": one.breaks, "suite": one.suite, "needs": one.needs, **asdict(outcome)}


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
