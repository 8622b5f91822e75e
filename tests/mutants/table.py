"""The table of mutants: which edit breaks which promise, and which tests have to notice.

A mutant is an entry of `table.yaml`:

    - name: older-ones-go-unread
      promise: Old checkpoints go only after the new one was read back     # of docs/guarantees.md, in short
      file: training/checkpoint/store.py
      replace: the text, found exactly once in the file
      by: what stands there instead
      tests: tests/unit/training/checkpoint/test_store.py::test_older_ones_go_only_after_the_new_one_was_read_back
      seconds: 600        # another bound than the usual one
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake that a person could make."""

    name: str
    promise: str
    file: str
    replace: str
    by: str
    tests: str
    seconds: int = 300

    def applied(self, text: str) -> str:
        """The file's text with the mistake in it. Raises `ValueError` where the place is not there exactly once."""
        found = text.count(self.replace)
        if found != 1:
            raise ValueError(f"{self.name}: the text to replace is {found} times in {self.file}, not once")
        return text.replace(self.replace, self.by)


def load() -> list[Mutant]:
    """All mutants, in the order of the table."""
    entries = yaml.safe_load((Path(__file__).parent / "table.yaml").read_text(encoding="utf-8"))
    return [Mutant(**entry) for entry in entries]
