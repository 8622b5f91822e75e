"""Every command and code block that README and docs print is run as they print it, from a clean checkout.

A command that this cannot run says why in its comment, in brackets: (on SLURM), (in an engine), (minutes), … `HARDWARE` in
`tests/printed.py` lists what these mean, and which test runs the command where another one does. A block with a title is a
file, which the page's commands use. A block that is a fragment says so in a comment before it: <!-- not run: … -->. One that
another suite runs names it: <!-- run: on SLURM -->.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkout import copy_to
from tests.exercises.conftest import COUNTS
from tests.printed import HARDWARE, PAGES, blocks
from tests.processes import PYTHON, ROOT, clean_env, run

CODE = ("python", "yaml", "toml", "dockerfile")
OUTPUT = ("text", "")


def _is_run(page: str) -> bool:
    return any(
        (block.language == "python" and not block.title and not block.why) or any(not why for _, why in block.commands)
        for block in blocks(page)
    )


def test_commands_stand_in_shell_blocks() -> None:
    """What looks like one elsewhere would not be run."""
    begins = ("lockstep ", "make ", "torchrun ", "mpiexec ", "srun ", "python -m lockstep.training run")
    for page in PAGES:
        for block in blocks(page):
            assert block.language in (*CODE, *OUTPUT, "sh"), (page, block.language)
            assert block.language not in OUTPUT or not block.text.startswith(begins), (page, block.text)


def test_every_block_is_run_or_says_why_not(record_property: Callable[[str, object], None]) -> None:
    """And how many there are."""
    counts: Counter[str] = Counter()
    for page in PAGES:
        later = [command for block in blocks(page) for command, _ in block.commands]
        for block in blocks(page):
            for _, why in block.commands:
                counts[f"commands that need {HARDWARE[why]}" if why else "commands run here"] += 1
            if block.language in CODE:
                assert block.title or block.why or block.language == "python", (
                    f"{page}: neither a file nor marked:\n{block.text}"
                )
                assert not block.title or any(block.title.split(".")[0] in command for command in later), (
                    f"{page}: nothing uses {block.title}"
                )
                there = HARDWARE.get(block.why)
                not_here = f"code blocks that need {there}" if there else "fragments that are not run"
                counts[not_here if block.why else "files and code blocks run here"] += 1
    assert counts["commands run here"] > 60 and counts["files and code blocks run here"] > 10
    record_property(COUNTS, [(count, what) for what, count in counts.most_common()])


def test_a_marker_that_names_a_test_is_run_by_it() -> None:
    """By every one that asks for the marker's commands on all pages."""
    named = 0
    for marker, what in HARDWARE.items():
        for path in re.findall(r"tests/[\w/]+\.py", what):
            text = (ROOT / path).read_text(encoding="utf-8")
            assert f'"{marker}"' in text and "marked(" in text, f"{path} does not run what is marked ({marker})"
            named += 1
    assert named >= 5


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_to(tmp_path_factory.mktemp("checkout") / "lockstep")


@pytest.mark.parametrize("page", [page for page in PAGES if _is_run(page)])
def test_what_the_page_prints(page: str, checkout: Path, tmp_path: Path) -> None:
    here = tmp_path / "lockstep"
    shutil.copytree(checkout, here)
    env = clean_env(PYTHONPATH=str(here), LOCKSTEP_HOME=str(tmp_path / "home"), PYTHONWARNINGS="ignore")
    env["PATH"] = f"{Path(PYTHON).parent}:{env['PATH']}"
    for number, block in enumerate(blocks(page)):
        if block.title:
            (here / block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "python" and not block.why:
            (here / f"block{number}.py").write_text(block.text, encoding="utf-8")
            done = run([PYTHON, f"block{number}.py"], env, timeout=180, cwd=here)
            assert done.code == 0, f"{page}:\n{block.text}\n{done.output}"
        for command, why in block.commands:
            if why or (command.startswith("mpiexec") and shutil.which("mpiexec") is None):
                continue
            if command.startswith("cd "):
                here /= command[3:].strip()
                continue
            if command.startswith("mpiexec"):  # which Open MPI refuses to root, and where there are fewer cores
                env |= {
                    "OMPI_ALLOW_RUN_AS_ROOT": "1",
                    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                    "OMPI_MCA_rmaps_base_oversubscribe": "1",
                }
            done = run(["bash", "-c", command], env, timeout=180, cwd=here)
            assert done.code == 0, f"{page}: {command}\n{done.output}\n{_logs(tmp_path / 'home')}"


def _logs(home: Path) -> str:
    """What the local jobs have printed: why one ended as it did."""
    texts = {path: path.read_text(encoding="utf-8", errors="replace") for path in sorted(home.glob("local/*/log.txt"))}
    return "\n".join(f"{path.parent.name}:\n{text[-3000:]}" for path, text in texts.items())
