"""Runs tests over a copy of the working tree that has one mistake in it, and says whether they noticed."""

from __future__ import annotations

import contextlib
import os
import re
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

from tests.mutants.table import ROOT, Mutant

Verdict = Literal["caught", "survived", "invalid"]
_SHOWN = 160


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one selection of tests. `by` is the test that failed, or why nothing can be said."""

    verdict: Verdict
    by: str
    said: str = ""
    """The assertion that failed."""
    seconds: float = 0.0


@contextlib.contextmanager
def copied(root: Path = ROOT) -> Iterator[Path]:
    """A copy of the working tree: what git tracks, and what it does not ignore. Nothing in it is a link to the original."""
    folder = Path(tempfile.mkdtemp(prefix="mutant-")).resolve()
    try:
        folder.chmod(0o755)  # daemons of other users are started from it
        listed = subprocess.run(
            ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            capture_output=True, check=True,
        )  # fmt: skip
        for name in filter(None, listed.stdout.decode().split("\0")):
            source, target = root / name, folder / "tree" / name
            if source.is_file() and not source.is_symlink():  # not one that was removed and is still in the index
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        yield folder / "tree"
    finally:
        _end_all_of(folder)
        _unmount(folder)
        shutil.rmtree(folder, ignore_errors=True)


def run(mutant: Mutant, root: Path = ROOT) -> Outcome:
    """Breaks a copy of the tree and runs the mutant's tests over it."""
    with copied(root) as tree:
        path = tree / mutant.file
        try:
            path.write_text(mutant.applied(path.read_text(encoding="utf-8")), encoding="utf-8")
        except (OSError, ValueError) as error:
            return Outcome("invalid", str(error))
        return run_tests(tree, mutant.tests, mutant.seconds, mutant.hangs)


def run_clean(tests: tuple[str, ...], seconds: int, root: Path = ROOT) -> Outcome:
    """The same tests over an unbroken copy: they have to pass, or what they catch proves nothing."""
    with copied(root) as tree:
        return run_tests(tree, tests, seconds)


def run_tests(tree: Path, tests: tuple[str, ...], seconds: int, hangs: bool = False) -> Outcome:
    """Runs pytest in `tree`, and ends whatever it leaves."""
    report = tree.parent / "report.xml"
    command = [
        sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:randomly", "-p", "no:cacheprovider",
        f"--basetemp={tree.parent / 't'}", f"--junitxml={report}", *tests,
    ]  # fmt: skip
    env = {
        name: value for name, value in os.environ.items() if name != "CI"
    }  # which makes a failure of what is missing
    began = time.monotonic()
    with (tree.parent / "output").open("w+b") as output:
        process = subprocess.Popen(
            command, cwd=tree, env={**env, "PYTHONPATH": str(tree)}, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        took = time.monotonic() - began
        if code is None:
            said = f"timed out after {seconds} s"
            return Outcome("caught" if hangs else "invalid", said, seconds=took)
        output.seek(0)
        verdict, by, said = judge(report, code, output.read().decode(errors="replace"))
    return Outcome(verdict, by, said.replace(f"{tree.parent}/", ""), took)


def judge(report: Path, code: int, output: str) -> tuple[Verdict, str, str]:
    """(verdict, the test or the reason, the assertion) from pytest's report in JUnit's form and its exit code."""
    try:
        cases = list(ElementTree.parse(report).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        last = output.strip().splitlines()[-1:] or ["no output"]
        return "invalid", f"pytest ended with {code} and without a report: {last[0][:_SHOWN]}", ""
    passed = skipped = 0
    for case in cases:
        failure, error = case.find("failure"), case.find("error")
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        if failure is not None:
            return "caught", name, assertion(failure)
        if error is not None and "collection" in error.get("message", ""):
            return "invalid", f"{case.get('name')} cannot be collected: {assertion(error)}", ""
        if error is not None:  # a fixture does what the test is about: a gang that trains, say
            return "caught", f"{name} (a fixture of it)", assertion(error)
        skipped += case.find("skipped") is not None
        passed += case.find("skipped") is None
    if not passed:
        return "invalid", f"all {skipped} tests were skipped" if skipped else "no test was selected", ""
    return ("survived", f"{passed} passed", "") if code == 0 else ("invalid", f"pytest ended with {code}", "")


def assertion(failure: ElementTree.Element) -> str:
    """The line that tells most: the assertion itself where there is one, else the first line of the error."""
    errors = [line[1:].strip() for line in (failure.text or "").splitlines() if re.match(r"E\s", line)]
    asserted = [line for line in errors if re.match(r"(AssertionError: )?assert ", line)]
    told = asserted or errors or (failure.get("message") or "").splitlines() or ["?"]
    line = (asserted[-1] if asserted else told[0]).removeprefix("AssertionError: ")
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 1]}…"


def _end(process: subprocess.Popen[bytes]) -> None:
    """The tests' whole process group, whether they have ended or not."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


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


def _unmount(folder: Path) -> None:
    """File systems that a test which was ended has left mounted."""
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        where = line.split(" ")[4]
        if where.startswith(f"{folder}/"):
            subprocess.run(["umount", "-l", where], check=False)


def _belongs(process: Path, mark: bytes) -> bool:
    try:
        return mark in (process / "environ").read_bytes() and int(process.name) != os.getpid()
    except OSError:
        return False  # gone, or another user's
