"""Matches paths against gitignore patterns from an untrusted file, in a separate process with a time limit.

pathspec makes a regular expression of each pattern. One with ten stars takes for ever, and no thread can end it.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

from lockstep.training.contract import UserError

SECONDS = 10
_MATCH = """
import json, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[2]), int(sys.argv[2])))  # it ends also if its parent was killed
except (ImportError, OSError, ValueError):
    pass
sys.path.append(sys.argv[1])
from pathspec import GitIgnoreSpec
lines, paths = json.load(sys.stdin)
try:
    json.dump([*GitIgnoreSpec.from_lines(lines).match_files(paths)], sys.stdout)
except Exception as error:
    sys.exit(f"{error}")
"""


def matched(text: str, paths: set[str], name: str) -> set[str]:
    """Those of the paths that the patterns match.

    Args:
        name: of the file with the patterns, for people.

    Raises:
        UserError: it takes too long.
        ValueError: no patterns.
    """
    lines = re.sub(r"\*{3,}", "*", text).splitlines()  # the same to git
    found = importlib.util.find_spec("pathspec")  # not imported here: only the other process needs it
    assert found is not None and found.origin is not None
    place = str(Path(found.origin).parents[1])
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _MATCH, place, str(SECONDS)], input=json.dumps([lines, sorted(paths)]),
            capture_output=True, text=True, timeout=SECONDS, check=False, cwd=place,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UserError(f"code: {name} has patterns that take more than {SECONDS} s: simplify them") from None
    if done.returncode < 0:  # by the limit that it has itself, or for its memory
        raise UserError(f"code: {name} has patterns that take too much: simplify them")
    if done.returncode != 0:
        raise ValueError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no patterns")
    return set(json.loads(done.stdout))
