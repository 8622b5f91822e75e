"""The worked examples of CONTRIBUTING.md, done in a copy of the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.environments import sources
from tests.processes import PYTHON, ROOT, clean_env

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXAMPLES = {
    found.splitlines()[0].split(":")[0].lower(): found
    for found in re.split(r"^### ", TEXT.partition("## Worked examples")[2].partition("\n## ")[0], flags=re.MULTILINE)[
        1:
    ]
}
BLOCK = re.compile(
    r"^(?:New file `(?P<new>[^`]+)`|In `(?P<file>[^`]+)`, (?P<how>after|in place of) the line `(?P<line>[^`]+)`)[^\n]*:\n\n"
    r"```\w+\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
COMMANDS = re.compile(r"^```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def apply(text: str, folder: Path) -> None:
    """Does what the blocks of an example say."""
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == len(re.findall(r"^```(?!sh)\w+$", text, re.MULTILINE)) > 0, "a block that nobody reads"
    for block in blocks:
        path = folder / (block["new"] or block["file"])
        if block["new"]:
            assert not path.exists(), f"{path.name} is there already"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block["text"], encoding="utf-8")
            continue
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        (at,) = [number for number, line in enumerate(lines) if line.strip() == block["line"]]
        lines[at : at + 1] = [lines[at], block["text"]] if block["how"] == "after" else [block["text"]]
        path.write_text("".join(lines), encoding="utf-8")


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_passes_the_contract_test_that_it_names(name: str, tmp_path: Path) -> None:
    copy = tmp_path / "lockstep"
    for file in sources():
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, copy / file, follow_symlinks=False)
    apply(EXAMPLES[name], copy)
    (commands,) = COMMANDS.findall(EXAMPLES[name])
    env = clean_env(PYTHONPATH=str(tmp_path / "installed"), PYTEST_ADDOPTS="-p no:cacheprovider", PIP_NO_INDEX="1")
    env["PATH"] = f"{Path(PYTHON).parent}{os.pathsep}{env['PATH']}"
    passed = 0
    for line in commands.splitlines():
        # Not into the environment that the tests run in.
        command = line.replace("pip install ", f"pip install --target {tmp_path}/installed ")
        done = subprocess.run(
            ["bash", "-c", command], cwd=copy, env=env, capture_output=True, text=True, timeout=550, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}{done.stderr[-2000:]}"
        passed += sum(map(int, re.findall(r"(\d+) passed", done.stdout)))
    assert passed >= 4, "the contract test did not see the example"
    changed = [str(copy / (block["new"] or block["file"])) for block in BLOCK.finditer(EXAMPLES[name])]
    python = [path for path in changed if path.endswith(".py")]
    ruff = subprocess.run(
        [PYTHON, "-m", "ruff", "check", *python], cwd=copy, capture_output=True, text=True, check=False
    )
    assert ruff.returncode == 0, ruff.stdout


def test_there_is_one_for_each_kind() -> None:
    assert EXAMPLES.keys() == {"a model", "a strategy", "a data source", "a metric", "a backend"}
