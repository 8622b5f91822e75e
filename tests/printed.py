"""The commands and the files that README and the tutorials print, in the order of the page, and a reader that runs them.

A comment that begins with brackets names what the commands below it need, up to the next comment: (on SLURM), (minutes), …
A command that ends with a backslash continues on the next line. A block with a title is a file, which the commands use.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.processes import ROOT, Result, run

PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs/tutorials").glob("*.md"))]
NEEDS = {
    "on SLURM": "tests/slurm/test_slurm_docs.py",
    "on Kubernetes": "tests/kubernetes/test_k8s_docs.py",
    "in an engine": "tests/containers/test_image_push.py",
    "by hand": "tests/exercises/test_printed_commands.py",
    "during a run": "tests/exercises/test_printed_commands.py",
    "minutes": "",
    "needs the internet": "",
    "needs the CUDA image": "",
}
"""Text in brackets → the test that runs these commands, or "" without one."""
_BLOCK = re.compile(r'^```(\w*)(?: title="([^"\n]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A code block. `title`: the file that it is, or ""."""

    language: str
    title: str
    text: str

    @property
    def commands(self) -> list[tuple[str, str]]:
        """(command, its need or "") of each line of a shell block."""
        commands, need = [], ""
        for line in re.sub(r"\\\n\s*", "", self.text).splitlines() if self.language == "sh" else ():
            if line.startswith("#"):
                match = re.match(r"# \((.+?)\)", line)
                need = match[1] if match else ""
            elif line.strip():
                commands.append((line.strip(), need))
        return commands


def blocks(page: str) -> list[Block]:
    """Every code block of a page."""
    return [Block(*fields) for fields in _BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))]


def programs(page: str) -> list[str]:
    """Returns a page's Python blocks that are whole programs: they begin with their imports."""
    candidates = [block for block in blocks(page) if block.language == "python" and not block.title]
    return [block.text for block in candidates if block.text.startswith(("import ", "from "))]


def marked(need: str, page: str) -> list[str]:
    """Returns the commands of a page that have this need."""
    return [command for block in blocks(page) for command, why in block.commands if why == need]


def pages(need: str) -> list[str]:
    """Returns the pages that have such commands."""
    return [page for page in PAGES if marked(need, page)]


class Reader:
    """Runs the commands of a page in order, in a folder with the page's files."""

    NEED = ""
    BOUND = 180

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.folder, self.env = folder, env

    def own(self, text: str) -> str:
        """Returns a command or a file with the parts replaced that differ here."""
        return text

    def before(self, command: str) -> None:
        """Prepares a command, or waits until it can run."""

    def run(self, command: str) -> Result:
        return run(["/bin/bash", "-c", command], self.env, timeout=self.BOUND, cwd=self.folder)

    def after(self, command: str, done: Result) -> None:
        """Checks a command's result."""
        assert done.code == 0, f"{command}\n{done.output}"

    def reads(self, page: str) -> None:
        """Runs the page from its first to its last command. Commands with a need use the folders of the others."""
        for block in blocks(page):
            if block.title:
                (self.folder / block.title).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / block.title).write_text(self.own(block.text), encoding="utf-8")
        for printed, need in [each for block in blocks(page) for each in block.commands]:
            command = self.own(printed)
            if need == self.NEED:
                self.before(command)
                self.after(command, self.run(command))
            elif not need and command.startswith(("mkdir ", "cp ")):
                Reader.after(self, command, self.run(command))
