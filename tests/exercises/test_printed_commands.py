"""Every command that README and docs print is run as they print it, from a clean checkout.

A command that this cannot run says why in its comment, in brackets: (needs a cluster), (needs an engine), (minutes), …
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.processes import PYTHON, ROOT, clean_env, run

PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]
_WHY_NOT = re.compile(
    r"\((needs a cluster|needs an engine|needs the internet|minutes|on a cluster|during a run|after a run|after two runs|"
    r"from DATA, or the internet)\)"
)


def printed(page: str) -> list[tuple[str, str]]:
    """(command, why it is not run or "") of each line of the page's shell blocks."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    found = []
    for line in (line for block in blocks for line in block.splitlines()):
        command, _, comment = line.partition("#")
        if command.strip():
            why = _WHY_NOT.search(comment)
            found.append((command.strip(), why[1] if why else ""))
    return found


def test_commands_stand_in_shell_blocks() -> None:
    """What looks like one elsewhere would not be run."""
    for page in PAGES:
        for block in re.findall(
            r"^```\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        ):
            first = block.split("\n")[0]
            assert not re.match(
                r"(lockstep|make|torchrun|mpiexec|srun|python -m training (?!launch .* launch\.py)) ", first
            ), (page, first)
    assert sum(len(printed(page)) for page in PAGES) > 25


@pytest.mark.parametrize("page", [page for page in PAGES if any(not why for _, why in printed(page))])
def test_what_the_page_prints(page: str, tmp_path: Path) -> None:
    here = tmp_path / "lockstep"
    git = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"]
    files = subprocess.run(git, cwd=ROOT, capture_output=True, check=False).stdout.split(b"\0")
    if len(files) < 100:  # no history here: the sources as they lie
        parts = (
            "lockstep",
            "training",
            "jobs",
            "examples",
            "docs",
            "deploy",
            "docker",
            "Makefile",
            "job.yaml",
            "pyproject.toml",
            "README.md",
        )
        found = [path for part in parts for path in [ROOT / part, *(ROOT / part).rglob("*")] if path.is_file()]
        files = [str(path.relative_to(ROOT)).encode() for path in found]
    for name in filter(None, (name.decode() for name in files)):
        if (ROOT / name).is_file():
            (here / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, here / name)
    env = clean_env(PYTHONPATH=str(here), LOCKSTEP_HOME=str(tmp_path / "home"))
    env["PATH"] = f"{Path(PYTHON).parent}:{env['PATH']}"
    for command, why in printed(page):
        if why or (command.startswith("mpiexec") and shutil.which("mpiexec") is None):
            continue
        if command.startswith("mpiexec"):  # which Open MPI refuses to root, and where there are fewer cores
            env |= {
                "OMPI_ALLOW_RUN_AS_ROOT": "1",
                "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                "OMPI_MCA_rmaps_base_oversubscribe": "1",
            }
        done = run(["bash", "-c", command], env, timeout=180, cwd=here)
        assert done.code == 0, f"{page}: {command}\n{done.output}"
