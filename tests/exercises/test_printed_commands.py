"""Every command and code block that README and docs print is run as they print it, from a clean checkout (tests/printed.py)."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path
from typing import ClassVar

import pytest

from tests.checkout import copy_to, environment
from tests.printed import HARDWARE, PAGES, Reader, blocks, pages
from tests.processes import ROOT, Result

pytestmark = pytest.mark.promise("printed")
CODE = ("python", "yaml", "toml", "dockerfile")
OUTPUT = ("text", "")


def test_every_block_is_run_or_says_why_not() -> None:
    """What looks like a command stands in a shell block: elsewhere it would not be run."""
    begins = ("lockstep ", "make ", "torchrun ", "mpiexec ", "srun ", "python -m lockstep.training run")
    counts: Counter[str] = Counter()
    for page in PAGES:
        later = [command for block in blocks(page) for command, _ in block.commands]
        for block in blocks(page):
            assert block.language in (*CODE, *OUTPUT, "sh"), (page, block.language)
            assert block.language not in OUTPUT or not block.text.startswith(begins), (page, block.text)
            counts["commands run here"] += [why for _, why in block.commands].count("")
            if block.language in CODE:
                assert block.title or block.why or block.language == "python", (
                    f"{page}: neither a file nor marked:\n{block.text}"
                )
                assert not block.title or any(block.title.split(".")[0] in command for command in later), (
                    f"{page}: nothing uses {block.title}"
                )
                counts["files and code blocks run here"] += not block.why
    assert counts["commands run here"] > 60 and counts["files and code blocks run here"] > 10


def test_a_marker_that_names_a_test_is_run_by_it() -> None:
    """By every one that asks for the marker's commands on all pages."""
    named = [(marker, path) for marker, what in HARDWARE.items() for path in re.findall(r"tests/[\w/]+\.py", what)]
    assert len(named) >= 5
    for marker, path in named:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert f'"{marker}"' in text and re.search(r"\b(pages|marked)\(", text), f"{path} does not run ({marker})"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_to(tmp_path_factory.mktemp("checkout") / "lockstep")


class Here(Reader):
    """Open MPI refuses root, and more ranks than cores. Where it is missing its command is left out."""

    MPI: ClassVar = dict.fromkeys(
        ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe"), "1"
    )

    def run(self, command: str) -> Result:
        if command.startswith("mpiexec") and shutil.which("mpiexec") is None:
            return Result(0, "")
        done = super().run(command)
        # What the local jobs have printed says why one ended as it did.
        for log in sorted((self.folder.parent / "home/lockstep").glob("local/*/log.txt")) if done.code else ():
            done.output += f"\n{log.parent.name}:\n{log.read_text(encoding='utf-8', errors='replace')[-3000:]}"
        return done


@pytest.mark.parametrize("page", pages(""))
def test_what_the_page_prints(page: str, checkout: Path, tmp_path: Path) -> None:
    here = tmp_path / "lockstep"
    shutil.copytree(checkout, here)
    Here(here, environment(here, tmp_path / "home", PYTHONWARNINGS="ignore", **Here.MPI)).reads(page)
