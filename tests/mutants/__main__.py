"""python -m tests.mutants [NAME …] [--needs plain|slurm|containers] [--list] [--check-clean]

Breaks the code on purpose, one mistake at a time, and shows that a test notices. Exit code 1 where one did not, or where
nothing can be said of one; with CI=true also where its test was skipped.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import signal
import sys

from tests.mutants import runner
from tests.mutants.runner import Outcome
from tests.mutants.table import NEEDS, load


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants, or patterns such as '*-run-*'; default: all")
    parser.add_argument("--needs", action="append", choices=NEEDS, help="only those that need this; may be given again")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument("--check-clean", action="store_true", help="run each test without the mistake, too")
    args = parser.parse_args()
    mutants = [one for one in load() if not args.needs or one.needs in args.needs]
    for pattern in args.names:
        if not any(fnmatch.fnmatch(one.name, pattern) for one in mutants):
            parser.error(f"there is no mutant {pattern!r}: see --list")
    if args.names:
        mutants = [one for one in mutants if any(fnmatch.fnmatch(one.name, pattern) for pattern in args.names)]
    if args.list:
        for one in mutants:
            print(f"{one.name:40} {one.needs:11} {one.promise}")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the copy goes, and what runs in it
    verdicts = []
    for one in mutants:
        clean = runner.run(one, broken=False) if args.check_clean else None
        if clean is not None and clean.verdict == "caught":
            outcome = Outcome("invalid", f"fails without the mistake, too: {clean.by}", clean.seconds)
        elif clean is not None and clean.verdict != "survived":
            outcome = clean
        else:
            outcome = runner.run(one)
        print(f"{outcome.verdict:8} {outcome.seconds:6.1f} s  {one.name}: {outcome.by}", flush=True)
        verdicts.append(outcome.verdict)
    caught, skipped = verdicts.count("caught"), verdicts.count("skipped")
    print(f"{caught} of {len(mutants)} mutants were caught, {skipped} could not be tried here")
    return 0 if caught + (0 if "CI" in os.environ else skipped) == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
