"""Looks for phrases that tests/words.yaml replaces: in code, documentation and templates. Part of `make lint`.

python -m tests.words [FILE …]      # default: every file of the repository that people read
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache

import yaml

from tests.checkout import sources
from tests.processes import ROOT

READ = (".md", ".py", ".yaml", ".yml", ".sh", ".toml", ".j2", ".sbatch", "Makefile", "Dockerfile", ".lockstepignore")
TESTS = ("tests/", "benchmarks/")
"""What users do not meet. Their README is read."""


@cache
def phrases() -> list[tuple[re.Pattern[str], str, str]]:
    """(pattern, what to write instead, example)."""
    rows = yaml.safe_load((ROOT / "tests/words.yaml").read_text(encoding="utf-8"))
    space = r"\s+(?:#:?\s+)?"  # over the end of a line, in a comment too
    return [
        (re.compile(row["find"].replace(" ", space), re.IGNORECASE | re.MULTILINE), row["say"], row["example"])
        for row in rows
    ]


def found(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, phrase, what to write instead)."""
    for pattern, say, _ in phrases():
        for match in pattern.finditer(text):
            yield text.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), say


def pages() -> list[str]:
    """Files that people read, relative to the repository."""
    return [
        name for name in sources()
        if name.endswith(READ) and (not name.startswith(TESTS) or name.endswith("README.md"))
    ]  # fmt: skip


def main(names: list[str]) -> int:
    bad = 0
    for name in names or pages():
        for line, phrase, say in found((ROOT / name).read_text(encoding="utf-8")):
            bad += 1
            print(f"{name}:{line}: {phrase!r}: write {say!r} (tests/words.yaml)")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
