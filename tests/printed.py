"""What the documentation prints, and who reads it: its commands, its code and its files, in the order of the page.

A comment's line in brackets names what the commands below it need, up to the next comment's line: (on SLURM), (in an
engine), (minutes), … `HARDWARE` lists what these mean, and which test runs the command where another one does. A command
that ends with a backslash continues on the next line. A block with a title is a file, which the page's commands use. A block
that is a fragment says so in a comment before it: <!-- not run: … -->. One that another suite runs names it:
<!-- run: on SLURM -->.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.processes import PYTHON, ROOT, Result, run

PAGES = [
    "README.md",
    "examples/modules/README.md",
    "examples/modules/answers.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]

HARDWARE = {
    "on SLURM": "a SLURM of two nodes: tests/slurm/test_slurm_docs.py",
    "on Kubernetes": "the emulated Kubernetes: tests/kubernetes/test_k8s_docs.py",
    "in an engine": "a container engine: tests/containers/test_compose_docs.py",
    "in a bucket": "an object store: tests/objects/test_checkpoints.py",
    "needs the CUDA image": "gigabytes of CUDA: make test SUITE=cuda-image builds it",
    "needs the internet": "a package index",
    "from DATA, or the internet": "a data set",
    "needs a GPU": "a GPU",
    "minutes": "minutes of time",
    "by the administrator": "root, and the users of a cluster",
    "by hand": "a terminal, and a person who types: those of the first tutorial in tests/exercises/test_printed_during_runs.py",
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
        if self.language != "sh" or self.why:
            return []
        found, why = [], ""
        for line in re.sub(r"\\\n\s*", "", self.text).splitlines():
            if line.startswith("#"):
                marker = _MARKER.search(line)
                why = marker[1] if marker else ""
            elif line.strip():
                found.append((line.strip(), why))
        return found


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


def _runs(block: Block) -> bool:
    """Whether it is code that is run as it stands."""
    return block.language == "python" and not block.title and not block.why


def pages(marker: str) -> list[Any]:
    """Parameters: the pages with commands of this marker. Others than `README.md` and the tutorials are for the night, and so
    is what a tutorial has without a marker, where it is like what the first two have."""
    found = [page for page in PAGES if marked(marker, page) or (not marker and any(map(_runs, blocks(page))))]
    daily = {page for page in found if page == "README.md" or "/tutorials/" in page}
    daily -= {f"docs/tutorials/{name}.md" for name in ("watch-it", "to-slurm") if not marker}
    return [pytest.param(page, id=page, marks=() if page in daily else pytest.mark.nightly) for page in found]


class Reader:
    """Who types what a page prints, in its order, in a folder with the page's files."""

    MARKER = ""
    NEEDED = r"cd |lockstep init |mkdir |cp "
    """Commands without the marker that those with it need."""
    CHECKS: ClassVar[dict[str, Callable[[Any, Result], None]]] = {}
    """What is asserted of a command beside its exit code, by how it begins. With a marker each command has a check."""
    BOUND = 180
    FILES = "*.yaml"
    """What `own` changes of the files that lie where the commands run."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.folder = self.here = folder
        self.env = env

    def own(self, text: str) -> str:
        """A command, or a file, but for what differs here."""
        return text

    def files(self, page: str) -> None:
        """What lies in the folder before the first command."""
        write_files(page, self.folder)

    def before(self, command: str) -> None:
        """What has to be done, or waited for, first."""

    def run(self, command: str) -> Result:
        return run(["/bin/bash", "-c", command], self.env, timeout=self.BOUND, cwd=self.here)

    def passes(self, command: str, done: Result) -> bool:
        return done.code == 0

    def check(self, command: str, done: Result) -> None:
        found = next((check for pattern, check in self.CHECKS.items() if re.match(pattern, command)), None)
        assert found is not None or not self.MARKER, f"nothing is asserted of {command}"
        if found is not None:
            found(self, done)

    def reads(self, page: str) -> None:
        """The page from its first to its last command."""
        self.files(page)
        changed = set[Path]()
        for block in blocks(page):
            if _runs(block) and not self.MARKER:
                (self.here / "block.py").write_text(block.text, encoding="utf-8")
                done = self.run(f"{PYTHON} block.py")
                assert done.code == 0, f"{page}:\n{block.text}\n{done.output}"
            for command, why in block.commands:
                if why != self.MARKER and not (not why and re.match(self.NEEDED, command)):
                    continue
                if command.startswith("cd "):
                    self.here /= command[3:].strip()
                    continue
                for file in {*self.here.glob(self.FILES)} - changed:
                    text = file.read_text(encoding="utf-8")
                    if (ours := self.own(text)) != text:
                        file.write_text(ours, encoding="utf-8")
                    changed.add(file)
                typed = self.own(command)
                if why == self.MARKER:
                    self.before(typed)
                done = self.run(typed)
                assert self.passes(typed, done), f"{page}: {typed}\n{done.output}"
                if why == self.MARKER:
                    self.check(typed, done)


def write_files(page: str, folder: Path) -> None:
    """Writes what the page's blocks with a title are."""
    for block in blocks(page):
        if block.title:
            (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.title).write_text(block.text, encoding="utf-8")
