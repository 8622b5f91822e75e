"""The table of mutants: which edit breaks which promise, and which tests have to notice.

A mutant is an entry of a YAML file in `tables/`:

    - name: prune-before-reading-back
      breaks: Old checkpoints are removed only after       # words that stand in one line of docs/guarantees.md, and no other
      file: training/checkpoint/store.py
      replace: the text, found exactly once in the file
      by: what stands there instead
      tests: tests/unit/test_checkpoint.py::test_older_ones_go_only_after_the_new_one_was_read_back
      needs: plain        # slurm, containers, chromium, prometheus or root, where a laptop's Python is not enough
      hangs: true         # ranks that wait for ever are how this one shows: running into the bound counts as caught
      seconds: 600        # another bound than the usual one

`breaks` and `tests` may be lists. Block scalars (`|-`) hold texts of several lines; only the first of these may leave
out its indentation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
TABLES = Path(__file__).parent / "tables"
GUARANTEES = "docs/guarantees.md"
HEAD = "| Promise | Test |"
NEEDS = ("plain", "root", "prometheus", "chromium", "slurm", "containers")
_REQUIRED = {"name", "breaks", "file", "replace", "by", "tests"}
_OPTIONAL: dict[str, Any] = {"needs": "plain", "hangs": False, "seconds": 300}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake that a person could make."""

    name: str
    breaks: tuple[str, ...]
    file: str
    replace: str
    by: str
    tests: tuple[str, ...]
    needs: str
    hangs: bool
    seconds: int

    @property
    def suite(self) -> str:
        """The folders of its tests."""
        return ", ".join(sorted({test.partition("::")[0].rpartition("/")[0] for test in self.tests}))

    def applied(self, text: str) -> str:
        """The file's text with the mistake in it. Raises `ValueError` where the place is not there exactly once."""
        found = text.count(self.replace)
        if found != 1:
            raise ValueError(f"{self.name}: the text to replace is {found} times in {self.file}, not once")
        return text.replace(self.replace, self.by)


def load(tables: Path = TABLES) -> list[Mutant]:
    """All mutants, in the order of their tables. Raises `ValueError` for an entry that is not one."""
    return [_mutant(entry, path.name) for path in sorted(tables.glob("*.yaml")) for entry in _entries(path)]


def _entries(path: Path) -> list[dict[str, Any]]:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(found, list):
        raise ValueError(f"{path.name} is no list of mutants")  # noqa: TRY004 - what `load` raises for all of them
    return found


def _mutant(entry: dict[str, Any], file: str) -> Mutant:
    wrong = (_REQUIRED - set(entry)) | (set(entry) - _REQUIRED - set(_OPTIONAL))
    if wrong:
        raise ValueError(f"{file}: {entry.get('name', '?')} lacks, or should not have, {', '.join(sorted(wrong))}")
    lists = {key: (value,) if isinstance(value := entry[key], str) else tuple(value) for key in ("breaks", "tests")}
    return Mutant(**{**_OPTIONAL, **entry, **lists})


def promises(text: str) -> list[str]:
    """The first column of the tables in docs/guarantees.md, line by line."""
    text = text.partition("## The promises")[2].partition("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("| ") and line != HEAD]
    return [re.split(r" \| ", row[2:])[0] for row in rows]


def lines_of(mutant: Mutant, lines: list[str]) -> list[str]:
    """The promises that a mutant breaks. Raises `ValueError` where its words stand in no line, or in several."""
    found = []
    for words in mutant.breaks:
        holding = [line for line in lines if words in line]
        if len(holding) != 1:
            raise ValueError(f"{mutant.name}: {words!r} stands in {len(holding)} lines of {GUARANTEES}, not in one")
        found += holding
    return found
