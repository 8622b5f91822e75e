"""`Gang`: several forked ranks, and what a launcher does for them. `python`: one forked process."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tests.processes import ROOT, Result, clean_env, free_port
from tests.warm.process import Process, members, start

GRACE = 20.0
"""Seconds between the TERM that follows a rank's failure and the KILL, as the tests ask of the launcher."""
ERROR_SECONDS = 2.0
"""Between the error of one rank and the TERM to those that have not raised theirs, as under the launcher."""


class Gang:
    """Ranks on this machine, one for each list of words. As under the launcher one rank's failure ends the others, and
    their codes become one: 2 before 75 before 1; a single rank keeps its code. All write into one file."""

    def __init__(self, words: list[list[str]], env: dict[str, str], grace: float = GRACE, cwd: Path = ROOT) -> None:
        self.grace, self.words = grace, words
        self.output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - `running` closes it
        self.processes: list[Process] = []
        with contextlib.ExitStack() as stack:
            stack.callback(self.end)
            # Each write goes to the end of the file, from any process.
            shared = os.open(f"/proc/self/fd/{self.output.fileno()}", os.O_WRONLY | os.O_APPEND)
            stack.callback(os.close, shared)
            port = free_port()
            for rank, rank_words in enumerate(words):
                place = {
                    "RANK": rank, "WORLD_SIZE": len(words), "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": len(words),
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1,
                }  # fmt: skip
                variables = {**{name: str(value) for name, value in place.items()}, **env}  # what is asked for wins
                self.processes.append(start(rank_words, variables, shared, cwd=cwd))
            os.close(shared)
            stack.pop_all()

    def rank_pid(self, rank: int) -> int:
        return self.processes[rank].pid

    def send_signal(self, number: int) -> None:
        """Sends the signal to every rank, as the launcher does."""
        for process in self.processes:
            process.send_signal(number)

    def wait(self, timeout: float) -> Result:
        """Waits for the end of all ranks. After the timeout it kills them, and the test fails with their output."""
        next_at = killed_at = time.monotonic() + timeout
        failed: list[int] = []
        terminated = False
        # Polls all of them: `any` would stop at the first that runs.
        while None in [process.poll() for process in self.processes]:
            if not failed and (failed := [process.returncode for process in self.processes if process.returncode]):
                raised = all(code > 0 and code not in (2, 75) for code in failed)
                next_at = time.monotonic() + ERROR_SECONDS * raised
            if failed and not terminated and time.monotonic() >= next_at:
                terminated = True
                next_at = killed_at = time.monotonic() + self.grace
                self.send_signal(signal.SIGTERM)
            if time.monotonic() >= killed_at:
                assert failed, f"still running after {timeout} s: {self.words}\n{self.text()}"
                self.end()
            alive = [process for process in self.processes if process.returncode is None]
            select.select(alive, [], [], max(0.0, next_at - time.monotonic()) if alive else 0)
        codes = failed or [process.returncode for process in self.processes if process.returncode]
        if len(self.processes) == 1 and codes:
            return Result(codes[0], self.text())
        code = next((final for final in (2, 75) if final in codes), 1 if codes else 0)
        return Result(code, self.text())

    def text(self) -> str:
        self.output.seek(0)
        return self.output.read().decode(errors="backslashreplace")

    def pids(self) -> list[int]:
        """Returns the processes of the ranks, and those that they have started."""
        return [pid for process in self.processes for pid in members(process.pid)]

    def end(self) -> None:
        for process in self.processes:
            process.end()


@contextlib.contextmanager
def running(
    words: list[list[str]], env: dict[str, str] | None = None, grace: float = GRACE, cwd: Path = ROOT
) -> Iterator[Gang]:
    """A gang that is gone at the end, whatever happens."""
    gang = Gang(words, env or clean_env(), grace, cwd)
    try:
        yield gang
    finally:
        gang.end()
        gang.output.close()


def python(
    *words: str, env: dict[str, str] | None = None, timeout: float = 240, cwd: Path = ROOT, apart: bool = False
) -> Result:
    """`python WORDS` to its end. With `apart`, `output` holds standard output alone and `error` the rest."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as error:
        process = start(list(words), env or clean_env(), output.fileno(), error.fileno() if apart else None, cwd)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.end()
            output.seek(0)
            raise AssertionError(f"still running after {timeout} s: {words}\n{output.read().decode()}") from None
        finally:
            process.end()
        texts = []
        for stream in (output, error):
            stream.seek(0)
            texts.append(stream.read().decode(errors="backslashreplace"))
    assert process.returncode is not None
    return Result(process.returncode, *texts)
