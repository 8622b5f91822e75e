"""python -m tests.mutants [NAME …] [--check-clean]

Breaks the code on purpose, one mistake at a time, in a copy of the working tree, and shows that a test notices. Exit code 1
where one did not, or where nothing can be said of one; with CI=true also where its test was skipped.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import sys
import tempfile
import time
from pathlib import Path

from tests.checkout import copy_to
from tests.mutants.table import Mutant, load
from tests.processes import run


def verdict(mutant: Mutant, broken: bool) -> tuple[str, str]:
    """`caught`, `survived`, `skipped` or `invalid`, and the test that failed, or why nothing can be said."""
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)  # daemons of other users are started from it
        tree = copy_to(Path(folder).resolve() / "tree")
        if broken:
            path = tree / mutant.file
            path.write_text(mutant.applied(path.read_text(encoding="utf-8")), encoding="utf-8")
        words = ["-x", "-q", "-rfE", "-p", "no:randomly", "-p", "no:cacheprovider", f"--basetemp={folder}/t"]
        # CI makes a failure of what is missing.
        env = {name: value for name, value in os.environ.items() if name != "CI"} | {"PYTHONPATH": str(tree)}
        try:
            done = run([sys.executable, "-m", "pytest", *words, mutant.tests], env, mutant.seconds, tree)
        except AssertionError:
            return "invalid", f"timed out after {mutant.seconds} s"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.output, re.MULTILINE)
    passed = re.search(r"\d+ passed", done.output)
    if done.code == 1 and failed:  # of a fixture, too: a gang that trains, say
        return "caught", failed[1]
    if done.code == 0:
        return ("survived", passed[0]) if passed else ("skipped", "the test was skipped")
    return "invalid", f"pytest ended with {done.code}:\n{done.output[-2000:]}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants, or patterns such as '*-run-*'; default: all")
    parser.add_argument("--check-clean", action="store_true", help="run each test without the mistake, too")
    args = parser.parse_args()
    patterns = args.names or ["*"]
    mutants = [one for one in load() if any(fnmatch.fnmatch(one.name, pattern) for pattern in patterns)]
    if not mutants:
        parser.error(f"there is no mutant {' '.join(args.names)}: see tests/mutants/table.yaml")
    verdicts = []
    for one in mutants:
        began = time.monotonic()
        clean = verdict(one, broken=False) if args.check_clean else ("survived", "")
        if clean[0] == "caught":
            found, by = "invalid", f"fails without the mistake, too: {clean[1]}"
        else:
            found, by = verdict(one, broken=True) if clean[0] == "survived" else clean
        print(f"{found:8} {time.monotonic() - began:6.1f} s  {one.name}: {by}", flush=True)
        verdicts.append(found)
    caught, skipped = verdicts.count("caught"), verdicts.count("skipped")
    print(f"{caught} of {len(mutants)} mutants were caught, {skipped} could not be tried here")
    return 0 if caught + (0 if "CI" in os.environ else skipped) == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
