"""`code:` of somebody who means harm: lint, render and submit end soon, in one line, or send what they list."""

from __future__ import annotations

import itertools
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.jobs.code import listing, patterns
from tests.jobs.helpers import lockstep

COMMANDS = [
    ["lint", "job.yaml", "--backend", "slurm"],
    ["render", "slurm", "job.yaml"],
    ["submit", "local", "job.yaml"],
]
BOUND = 20


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path / "home"))
    found = tmp_path / "own"
    found.mkdir()
    (found / "job.yaml").write_text("name: own\ncommand: [python, train.py]\ncode: .\n")
    (found / "train.py").write_text("x")
    return found


def _git(folder: Path) -> None:
    subprocess.run(["git", "init", "-q", str(folder)], check=True, capture_output=True)


def _deep(folder: Path) -> None:
    here = os.getcwd()
    try:
        os.chdir(folder)
        for _ in range(3000):
            os.mkdir("aaa")
            os.chdir("aaa")
        Path("x").touch()
    finally:
        os.chdir(here)


def _folders(folder: Path) -> None:
    for number in range(301):
        (folder / f"d{number}").mkdir()


def _files(folder: Path) -> None:
    for number in range(301):
        (folder / f"f{number}").touch()


def _stars(folder: Path) -> None:
    (folder / ".lockstepignore").write_text("*a*a*a*a*a*a*a*a*a*b\n")
    (folder / ("a" * 250)).touch()


def _patterns(folder: Path) -> None:
    (folder / ".lockstepignore").write_text("".join(f"x{number}*y\n" for number in range(80_000)))


def _repositories(folder: Path) -> None:
    _git(folder)
    for number in range(6):
        _git(folder / f"r{number}")


def _socket(folder: Path) -> None:
    here = os.getcwd()
    try:
        os.chdir(folder)  # the name of a socket is short
        with socket.socket(socket.AF_UNIX) as made:
            made.bind("s")
    finally:
        os.chdir(here)


def _sparse(folder: Path) -> None:
    with (folder / "huge").open("wb") as file:
        file.truncate(1 << 40)


def _surrogate(folder: Path) -> None:
    (folder / os.fsdecode(b"\xed\xb2\x80")).touch()


def _escape(folder: Path) -> None:
    (folder / ".env\n\x1b[2Jx").touch()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (_deep, "is not a path inside the code"), (_folders, "has more than 300 files"), (_files, "has more than 300 files"),
        (lambda folder: (_files(folder), _git(folder)), "has 303 files, more than 30"),
        (_stars, ".lockstepignore has patterns that take"), (_patterns, ".lockstepignore has patterns that take"),
        (_repositories, "holds more than 5 git repositories"), (_socket, "s is not a regular file"),
        (lambda folder: os.mkfifo(folder / "p"), "p is not a regular file"), (_sparse, "at most 64 MiB can be sent"),
        (_surrogate, "is not UTF-8"), (lambda folder: (_surrogate(folder), _git(folder)), "is not UTF-8"),
        (_escape, r".env\x0a\x1b[2Jx looks like"),
    ],
)  # fmt: skip
def test_it_is_refused_in_one_line_and_soon(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object], told: str
) -> None:
    monkeypatch.setattr(listing, "MAX_FILES", 30)
    monkeypatch.setattr(listing, "_MAX_REPOSITORIES", 5)
    monkeypatch.setattr(patterns, "SECONDS", 1)
    make(folder)
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
        subprocess.run(["rm", "-rf", str(folder)], check=True)  # Python's own recursion is not deep enough


def test_a_name_cannot_write_a_line_of_the_list(folder: Path) -> None:
    (folder / "a\n        1  other.py\x1b[2J").touch()
    done = lockstep(folder, "render", "slurm", "job.yaml")
    assert done.returncode == 0, done
    assert len(re.findall("(?m)^ +[0-9]+  ", done.stderr)) == 3 and "\x1b" not in done.stderr + done.stdout, done


def test_a_file_that_grows_without_end_is_refused_or_is_of_one_moment(folder: Path) -> None:
    over = threading.Event()

    def grow() -> None:
        with (folder / "log.txt").open("ab", buffering=0) as file:
            for number in itertools.count():
                file.write(b"%d\n" % number)
                if over.wait(0.0005):
                    return

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        for _ in range(3):
            done = lockstep(folder, "render", "slurm", "job.yaml")
            changed = "error: code: log.txt was changed while it was read" in done.stderr
            assert (done.returncode, changed) in ((2, True), (0, False)), done
    finally:
        over.set()
        writer.join()
