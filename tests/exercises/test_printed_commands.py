"""Every command and code block that README and docs print is run as they print it, from a clean checkout.

A command that this cannot run says why in its comment, in brackets: (on SLURM), (in an engine), (minutes), … `HARDWARE` in
`tests/printed.py` lists what these mean, and which test runs the command where another one does. A block with a title is a
file, which the page's commands use. A block that is a fragment says so in a comment before it: <!-- not run: … -->. One that
another suite runs names it: <!-- run: on SLURM -->.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.checkout import copy_to
from tests.printed import PAGES, blocks
from tests.processes import PYTHON, clean_env, run

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


def test_every_block_is_run_or_says_why_not() -> None:
    counts: Counter[str] = Counter()
    for page in PAGES:
        later = [command for block in blocks(page) for command, _ in block.commands]
        counts["commands"] += sum(not why for block in blocks(page) for _, why in block.commands)
        for block in blocks(page):
            if block.language in CODE:
                assert block.title or block.why or block.language == "python", f"{page}: {block.text}"
                used = any(block.title.split(".")[0] in command for command in later)
                assert used or not block.title, f"{page}: nothing uses {block.title}"
                counts["blocks"] += not block.why
    assert counts["commands"] > 60 and counts["blocks"] > 10, counts


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
                env |= dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
                env["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
            done = run(["bash", "-c", command], env, timeout=180, cwd=here)
            assert done.code == 0, f"{page}: {command}\n{done.output}\n{_logs(tmp_path / 'home')}"


def _logs(home: Path) -> str:
    """What the local jobs have printed: why one ended as it did."""
    texts = {path: path.read_text(encoding="utf-8", errors="replace") for path in sorted(home.glob("local/*/log.txt"))}
    return "\n".join(f"{path.parent.name}:\n{text[-3000:]}" for path, text in texts.items())
