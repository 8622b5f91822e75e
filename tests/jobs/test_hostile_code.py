"""`code:` of somebody who means harm: lint, render and submit end soon, in one line, or send what they list."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import product
from tests.jobs.helpers import lockstep, own_code

COMMANDS = (
    ["lint", "job.yaml", "--backend", "slurm"],
    ["render", "slurm", "job.yaml"],
    ["submit", "local", "job.yaml"],
)
BOUND = 60


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current one: names of sockets are short, and what is deep has no path."""
    found = own_code(tmp_path, monkeypatch)
    monkeypatch.chdir(found)
    return found


def _git(*folders: str) -> None:
    for name in folders or (".",):
        subprocess.run(["git", "init", "-q", name], check=True, capture_output=True)


def _deep() -> None:
    for _ in range(3000):
        os.mkdir("aaa")
        os.chdir("aaa")
    Path("x").touch()


def _socket() -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("s")


def _sparse() -> None:
    with Path("huge").open("wb") as file:
        file.truncate(1 << 40)


def _many(make: Callable[[Path], object], git: bool = False) -> None:
    for number in range(301):
        make(Path(f"n{number}"))
    if git:
        _git()


def _ignored_slowly() -> None:
    Path(".lockstepignore").write_text("*a*a*a*a*a*a*a*a*a*b\n")
    Path("a" * 250).touch()


def _no_text() -> None:
    Path(os.fsdecode(b"\xed\xb2\x80")).touch()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (_deep, "is not a path inside the code"), (lambda: _many(Path.mkdir), "has more than 300 files"),
        (lambda: _many(Path.touch, git=True), "has 303 files, more than 30"),
        (_ignored_slowly, ".lockstepignore has patterns that take"),
        (lambda: _git(".", *(f"r{number}" for number in range(6))), "holds more than 5 git repositories"),
        (_socket, "s is not a regular file"), (_sparse, "at most 64 MiB can be sent"), (_no_text, "is not UTF-8"),
        (lambda: Path(".env\n\x1b[2Jx").touch(), r".env\x0a\x1b[2Jx looks like"),
    ],
)  # fmt: skip
def test_it_is_refused_in_one_line_and_soon(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], object], told: str
) -> None:
    product.lower_limits_of_code(monkeypatch, seconds=1 if make is _ignored_slowly else 60)
    make()
    os.chdir(folder)
    try:
        for words in COMMANDS:
            began = time.monotonic()
            done = lockstep(folder, *words)
            assert time.monotonic() - began < BOUND
            assert (done.returncode, done.stdout) == (2, ""), done
            assert done.stderr.startswith("error: code: ") and done.stderr.count("\n") == 1 and told in done.stderr, (
                done
            )
        assert not (tmp_path / "home/code").exists() and not (tmp_path / "home/local").exists()
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True, cwd="/")  # Python's own recursion is not deep enough


def test_a_busy_machine_is_not_the_fault_of_the_patterns(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine tests failed at a load of 40."""
    product.lower_limits_of_code(monkeypatch, seconds=1)
    (slow := tmp_path / "python").write_text(f'#!/bin/sh\nsleep 1.2\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    (folder / ".lockstepignore").write_text("*.log\n")
    assert lockstep(folder, "lint", "job.yaml").returncode == 0


def test_a_name_cannot_write_a_line_of_the_list(folder: Path) -> None:
    (folder / "a\n        1  other.py\x1b[2J").touch()
    done = lockstep(folder, "render", "slurm", "job.yaml")
    assert done.returncode == 0, done
    assert len(re.findall("(?m)^ +[0-9]+  ", done.stderr)) == 3 and "\x1b" not in done.stderr + done.stdout, done
