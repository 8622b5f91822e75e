"""The runner of the mutants over a small tree of its own: what it tells apart, and that nothing is left of it."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.mutants.runner import run, run_clean
from tests.mutants.table import Mutant
from tests.processes import poll

CODE = "import threading\n\ndef double(x):\n    return x + x\n\ndef wait(event):\n    event.wait(0)\n"
TESTS = """
import subprocess, threading
from pathlib import Path
import pytest
import training.small as small

def test_double(): assert small.double(3) == 6
def test_one(): assert small.double(2) == 4
def test_ignored(): assert not Path("secret.txt").exists()
def test_wait():
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path(PID).write_text(str(child.pid))
    small.wait(threading.Event())
    child.kill()
    child.wait()
@pytest.mark.skip
def test_skipped(): pass
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working tree with a mistake still to be made, and the temporary folder of the runs beside it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "runs"))
    (tmp_path / "runs").mkdir()
    root = tmp_path / "root"
    files = {
        "training/__init__.py": "",
        "training/small.py": CODE,
        "tests/test_small.py": TESTS,
        ".gitignore": "secret.txt\n",
        "secret.txt": "mine",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return root


def _mutant(by: str, test: str, replace: str = "x + x", **more: object) -> Mutant:
    values = {"needs": "plain", "hangs": False, "seconds": 60, **more}
    return Mutant("m", ("p",), "training/small.py", replace, by, (f"tests/test_small.py::{test}",), **values)  # type: ignore[arg-type]


def test_what_becomes_of_a_mistake_is_told_apart(tree: Path) -> None:
    found = run(_mutant("x + 2", "test_double"), tree)
    assert (found.verdict, found.by, found.said) == ("caught", "tests/test_small.py::test_double", "assert 5 == 6")
    assert run(_mutant("x + 2", "test_one"), tree).verdict == "survived"
    assert run(_mutant("x +", "test_double"), tree).verdict == "invalid", "code that nobody can import"
    assert run(_mutant("x + 2", "test_skipped"), tree).by == "all 1 tests were skipped"
    assert run(_mutant("x + 2", "test_gone"), tree).verdict == "invalid"
    assert run(_mutant("x", "test_double", replace="x"), tree).by.startswith("m: the text to replace is 3 times in")
    assert (
        run_clean(("tests/test_small.py::test_double", "tests/test_small.py::test_ignored"), 60, tree).by == "2 passed"
    )
    assert (tree / "training/small.py").read_text() == CODE and not list((tree.parent / "runs").iterdir())


@pytest.mark.parametrize(("hangs", "verdict"), [(True, "caught"), (False, "invalid")])
def test_what_hangs_is_ended_with_all_that_it_has_started(tree: Path, hangs: bool, verdict: str) -> None:
    """A process of a session of its own, too."""
    told = tree.parent / "pid"
    tests = tree / "tests/test_small.py"
    tests.write_text(f"PID = {str(told)!r}\n{TESTS}")
    found = run(_mutant("event.wait()", "test_wait", replace="event.wait(0)", hangs=hangs, seconds=4), tree)
    assert (found.verdict, found.by) == (verdict, "timed out after 4 s")
    pid = int(told.read_text())
    poll(lambda: not Path(f"/proc/{pid}").exists(), 10, "the end of a process that was killed")
    assert not list((tree.parent / "runs").iterdir())
