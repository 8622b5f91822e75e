"""What the documentation prints: its commands, its code and its files, in the order of the page."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tests.processes import ROOT, Result

PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]

HARDWARE = {
    "on SLURM": "a SLURM of two nodes: tests/slurm/test_slurm_docs.py",
    "on Kubernetes": "the emulated Kubernetes: tests/kubernetes/test_k8s_docs.py",
    "in an engine": "a container engine: tests/containers/test_compose_docs.py",
    "needs the CUDA image": "gigabytes of CUDA: make test SUITE=cuda-image builds it",
    "needs the internet": "a package index",
    "from DATA, or the internet": "a data set",
    "needs a GPU": "a GPU",
    "minutes": "minutes of time",
    "by the administrator": "root, and the users of a cluster",
    "by hand": "a terminal, and a person who types: tests/exercises/test_printed_during_runs.py",
    "during a run": "a second terminal: tests/exercises/test_printed_during_runs.py",
    "needs promtool": "promtool: tests/prometheus/test_rules.py",
}
"""The marker in a command's comment → what is needed to run it."""
_MARKER = re.compile(r"\((" + "|".join(map(re.escape, HARDWARE)) + r")[^)]*\)")
_BLOCK = re.compile(
    r"(?:^<!-- (?:not )?run: (?P<why>.+?) -->\n+)?^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
_TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True, slots=True)
class Block:
    """A code block. `title`: the file that it is. `why`: why it is not run, or the marker of where it is; "" where neither."""

    page: str
    language: str
    title: str
    why: str
    text: str

    @property
    def commands(self) -> list[tuple[str, str]]:
        """(command, marker or "") of each line of a shell block."""
        if self.language != "sh":
            return []
        found = []
        for line in self.text.splitlines():
            command, mark, comment = line.partition("#") if line.lstrip().startswith("#") else _cut(line)
            if command.strip():
                why = _MARKER.search(comment) if mark else None
                found.append((command.strip(), why[1] if why else ""))
        return found


def _cut(line: str) -> tuple[str, str, str]:
    """A line and its comment, which begins with two spaces and a #."""
    found = re.search(r"\s{2,}#|\s#\s", line)
    return (line[: found.start()], "#", line[found.end() :]) if found else (line, "", "")


def blocks(page: str) -> list[Block]:
    """Every code block of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for it in _BLOCK.finditer(text):
        title = _TITLE.search(it["info"])
        found.append(Block(page, it["info"].split(" ")[0], title[1] if title else "", it["why"] or "", it["text"]))
    return found


def marked(marker: str, page: str) -> list[str]:
    """The commands of a page that carry this marker."""
    return [command for block in blocks(page) for command, why in block.commands if why == marker]


class Checked:
    """What is asserted of a page's commands beside their exit codes."""

    CHECKS: ClassVar[dict[str, Callable[[Any, Result], None]]]
    """By how a command begins."""
    checked = 0

    def after(self, command: str, done: Result) -> None:
        check = next((check for pattern, check in self.CHECKS.items() if re.match(pattern, command)), None)
        assert check is not None, f"nothing is asserted of {command}"
        check(self, done)
        self.checked += 1


def write_files(page: str, folder: Path) -> None:
    """Writes what the page's blocks with a title are."""
    for block in blocks(page):
        if block.title:
            (folder / block.title).write_text(block.text, encoding="utf-8")
