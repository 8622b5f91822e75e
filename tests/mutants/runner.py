"""Runs a test over a copy of the working tree that has one mistake in it, and says whether it noticed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.checkout import copy_to
from tests.mutants.table import Mutant

Verdict = Literal["caught", "survived", "skipped", "invalid"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one selection of tests. `by` is the test that failed, or why nothing can be said."""

    verdict: Verdict
    by: str
    seconds: float = 0.0


@contextlib.contextmanager
def copied() -> Iterator[Path]:
    """A copy of the working tree: what git tracks, and what it does not ignore. Its links lead within the copy."""
    folder = Path(tempfile.mkdtemp(prefix="mutant-")).resolve()
    try:
        folder.chmod(0o755)  # daemons of other users are started from it
        yield copy_to(folder / "tree")
    finally:
        _end_all_of(folder)
        shutil.rmtree(folder, ignore_errors=True)


def run(mutant: Mutant, broken: bool = True) -> Outcome:
    """The mutant's tests over a copy of the tree that has the mistake in it, or over an unbroken one."""
    with copied() as tree:
        if broken:
            path = tree / mutant.file
            path.write_text(mutant.applied(path.read_text(encoding="utf-8")), encoding="utf-8")
        report = tree.parent / "report.xml"
        command = [
            sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:randomly", "-p", "no:cacheprovider",
            f"--basetemp={tree.parent / 't'}", f"--junitxml={report}", mutant.tests,
        ]  # fmt: skip
        # CI makes a failure of what is missing.
        env = {name: value for name, value in os.environ.items() if name != "CI"} | {"PYTHONPATH": str(tree)}
        began = time.monotonic()
        with (tree.parent / "output").open("wb") as output:
            process = subprocess.Popen(
                command, cwd=tree, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                code: int | None = process.wait(mutant.seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        verdict, by = ("invalid", f"timed out after {mutant.seconds} s") if code is None else judge(report, code)
        return Outcome(verdict, by, time.monotonic() - began)


def judge(report: Path, code: int) -> tuple[Verdict, str]:
    """(verdict, the test or the reason) from pytest's report in JUnit's form and its exit code."""
    try:
        cases = list(ElementTree.parse(report).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return "invalid", f"pytest ended with {code} and without a report"
    for case in cases:
        error = case.find("error")
        if error is not None and "collection" in error.get("message", ""):
            return "invalid", f"{case.get('name')} cannot be collected"
        if error is not None or case.find("failure") is not None:  # a fixture, too: a gang that trains, say
            return "caught", f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
    skips = [skip.get("message", "") for case in cases for skip in case.iter("skipped")]
    passed = len(cases) - len(skips)
    if not passed:
        return ("skipped", skips[0]) if skips else ("invalid", "no test was selected")
    return ("survived", f"{passed} passed") if code == 0 else ("invalid", f"pytest ended with {code}")


def _end_all_of(folder: Path) -> None:
    """Tests start ranks and supervisors in sessions of their own: they are known by the tree in their environment."""
    mark = str(folder).encode() + b"/"
    for _ in range(20):  # one that is being killed may just have started another
        found = [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if _belongs(entry, mark)]
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.05)


def _belongs(process: Path, mark: bytes) -> bool:
    try:
        return mark in (process / "environ").read_bytes() and int(process.name) != os.getpid()
    except OSError:
        return False  # gone, or another user's
