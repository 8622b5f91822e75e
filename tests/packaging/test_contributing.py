"""The worked example of CONTRIBUTING.md, done in a copy of the repository."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.checkout import copy_to
from tests.processes import PYTHON, ROOT, clean_env, run

BLOCK = re.compile(
    r"^(?:New file `(?P<new>[^`]+)`|In `(?P<file>[^`]+)`, (?P<how>after|in place of) the line `(?P<line>[^`]+)`)[^\n]*:\n\n"
    r"```\w+\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


def apply_example(text: str, folder: Path) -> list[Path]:
    """Applies the blocks of an example. Returns the files that it makes or changes."""
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == len(re.findall(r"^```(?!sh)\w+$", text, re.MULTILINE)) > 0, "a block that nobody reads"
    for block in blocks:
        path = folder / (block["new"] or block["file"])
        assert path.exists() != bool(block["new"]), f"{path.name} is there already, or not there"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if block["file"] else [""]
        (at,) = [number for number, line in enumerate(lines) if line.strip() == (block["line"] or "")]
        lines[at : at + 1] = [lines[at], block["text"]] if block["how"] == "after" else [block["text"]]
        path.write_text("".join(lines), encoding="utf-8")
    return [folder / (block["new"] or block["file"]) for block in blocks]


@pytest.mark.nightly
def test_the_example_passes_the_contract_test_that_it_names(tmp_path: Path) -> None:
    copy = copy_to(tmp_path / "lockstep")
    whole = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    example = whole.partition("## A worked example\n")[2].partition("### The other kinds\n")[0]
    changed = apply_example(example, copy)
    (commands,) = re.findall(r"^```sh\n(.*?)^```$", example, re.DOTALL | re.MULTILINE)
    env = clean_env(PYTHONPATH="", PYTEST_ADDOPTS="-p no:cacheprovider")
    env["PATH"] = f"{Path(PYTHON).parent}{os.pathsep}{env['PATH']}"
    done = run(["bash", "-ec", commands], env, 550, copy)
    assert done.code == 0, done.output[-5000:]
    assert sum(map(int, re.findall(r"(\d+) passed", done.output))) >= 4, "the contract test did not see the example"
    lint = run([PYTHON, "-m", "ruff", "check", *(str(path) for path in changed if path.suffix == ".py")], cwd=copy)
    assert lint.code == 0, lint.output
