"""The run directory: opens and locks it, and writes the files that describe the run's state.

    run.yaml       the run's description: config, versions, data, world.
    status.json    the run's step, and how it ended.
    events.jsonl   events, a line each; listeners get the same events.
    time.jsonl     where the time went (`goodput.py`).
    summary.json   the final numbers of a complete run.
    checkpoints/   written by training/checkpoint/.

Only rank 0 has a `RunDirectory`.

The same command on the same directory resumes. `open` refuses a directory of another config, and changes nothing in it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import filelock
import torch
import yaml

from .. import config as configuration
from .. import contract, files
from ..config import RunSettings, settings
from ..contract import UserError, to_stderr
from ..limits import DISK_LOOK_SECONDS, DISK_SECONDS, LOCK_AFTER_RESTART_SECONDS, LOCK_SECONDS, RUN_FILE_SECONDS
from ..parallel.worker import Worker
from ..parallel.world import World


class Background:
    """A thread that runs disk tasks one after the other. Training, and the end of a run, wait for a disk no longer than a bound. After a
    timeout nothing waits for the disk until it answers.

    Args:
        name: name of the thread, a daemon: the process can end even if the disk never answers.
        late: called once when a task takes too long.
    """

    def __init__(self, name: str, late: Callable[[], None]) -> None:
        self._worker, self._late = Worker(name), late
        self._stopped = self._is_late = False

    def run(self, task: Callable[[], None], seconds: float = DISK_SECONDS) -> bool:
        """Queues a task, which must not raise, and waits for it. Returns whether all tasks are done in time.

        Args:
            seconds: longest wait; 0: none.
        """
        hangs = self._is_late and self._worker.is_busy
        done = self._worker.run(lambda: None if self._stopped else task())
        if seconds == 0 or hangs:
            return False
        while seconds > 0 and not done.done():
            began = time.monotonic()
            wait([done], min(seconds, DISK_LOOK_SECONDS))
            # A process that gets no CPU wakes late, and its disk is not to blame for that.
            seconds -= min(time.monotonic() - began, DISK_LOOK_SECONDS)
        self._is_late = not done.done()
        if self._is_late:
            self._late()
        return not self._is_late

    def stop(self) -> None:
        """Drops the tasks that have not begun."""
        self._stopped = True


class RunDirectory:
    """The directory of a run, locked for one attempt at it: from `open` to `close`."""

    def __init__(self, path: Path, lock: filelock.FileLock, saved: dict[str, Any] | None) -> None:
        self.path, self.saved = path, saved
        self._lock = lock
        self._warned = False
        self.disk = Background("run-directory", lambda: self._warn("the disk does not answer"))
        self.count_attempt()
        self.listeners: list[Callable[[dict[str, Any]], None]] = []
        """Functions that get every event from now on, as the mapping in the file, and each status as an event `status`. An error in a
        listener ends the run."""
        self.ranks: list[int] | None = None
        """[ranks now, ranks of the full group] after a loss that the others survived; None: no rank was lost."""
        self.goodput: Callable[[], dict[str, Any] | None] = lambda: None
        """Returns the entry `goodput` of status.json; None: nothing yet."""
        self.slow_rank: dict[str, Any] | None = None
        """The entry `slow_rank` of status.json (`SlowRank.verdict`)."""
        self.at_close: list[Callable[[], None]] = []
        """Functions that `close` calls, the last added first."""
        self.fresh_word: str | None = saved.get("fresh") if saved is not None else None
        """The word of `--fresh` with which the run was begun (`open`); None: no word."""

    @classmethod
    def open(
        cls, path: Path, config: RunSettings, fresh: bool | str, brings: Callable[[Path], None] = lambda _: None
    ) -> RunDirectory:
        """Locks the directory for this process, and creates it if there is none.

        Args:
            fresh: True moves an earlier run aside first. A word does so only if the run was not begun with the same
                word. Each job has its own word, so that its restarts resume the run of its first start.
            brings: fetches files of the run from a bucket into the locked directory. Raises `UserError`.

        Raises:
            UserError: the directory is in use, holds a run of another config, or cannot be written.
        """
        path = Path(os.path.realpath(path))
        with _usable(path), contextlib.ExitStack() as if_refused:
            if path.is_dir():  # before the first file is opened, which is that of the lock
                _refuse_links_of_others(path)
            if path.exists() and (fresh is True or (isinstance(fresh, str) and _begun_otherwise(path, fresh))):
                _move_aside(path)
            again = os.environ.get(contract.ENV_RESTARTS, "0") != "0"
            lock = _locked(path, LOCK_AFTER_RESTART_SECONDS if again else LOCK_SECONDS)
            if_refused.callback(lock.release)
            files.remove_stale(path, (contract.RUN_FILE, contract.STATUS_FILE, contract.SUMMARY_FILE))
            brings(path)
            saved = read_run(path) if (path / contract.RUN_FILE).exists() else None
            different = configuration.differences(saved["config"], config) if saved is not None else []
            if different:
                raise UserError(
                    f"{path} holds a run with another config ({'; '.join(different)}): "
                    "choose another --run-dir, undo the change, or start over with --fresh"
                )
            if saved is None and (path / contract.CHECKPOINTS).exists():
                raise UserError(f"{path} has checkpoints but no {contract.RUN_FILE}: restore it, or use --fresh")
            if_refused.pop_all()
        run = cls(path, lock, saved)
        with contextlib.suppress(OSError):  # of an attempt that was killed with those who watched it
            (path / contract.HANG_FILE).unlink(missing_ok=True)
        if isinstance(fresh, str):
            run.fresh_word = fresh
        return run

    @classmethod
    def take_over(cls, path: Path, attempt: int, failures: int) -> RunDirectory:
        """Opens the directory in place of a lost rank 0, for the rest of the attempt. Raises `UserError`."""
        path = Path(os.path.realpath(path))
        with _usable(path):
            run = cls(path, _locked(path, LOCK_AFTER_RESTART_SECONDS), read_run(path))
        run.attempt, run.failures = attempt, failures
        return run

    def last_events(self) -> list[dict[str, Any]]:
        """Returns the last events of events.jsonl that are readable."""
        events = []
        with contextlib.suppress(OSError), files.regular(self.path / contract.EVENTS_FILE) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
            for line in file.read().splitlines():
                with contextlib.suppress(ValueError):
                    if isinstance(event := files.parsed(line), dict):
                        events.append(event)
        return events

    def count_attempt(self) -> None:
        """Sets the number of this attempt and of the failures so far, from status.json of the attempt before."""
        status = files.read_json(self.path / contract.STATUS_FILE)
        before = (
            {name: value for name, value in status.items() if type(value) is int} if isinstance(status, dict) else {}
        )
        self.attempt: int = before.get("attempt", 0) + 1
        # The code of a killed attempt is null.
        failed = "attempt" in before and before.get("code", contract.EXIT_FAILED) == contract.EXIT_FAILED
        self.failures: int = max(0, before.get("failures", 0)) + failed
        self.step_before: int = before.get("step", 0)

    @property
    def checkpoints(self) -> Path:
        return self.path / contract.CHECKPOINTS

    def describe(self, config: RunSettings, world: World, facts: dict[str, Any], threads: str) -> None:
        """Writes run.yaml. Raises `UserError` if the directory cannot be written.

        Args:
            facts: `global_batch_size` and `data` (name and checksum), if the run knows them.
        """
        value = {
            "config": configuration.to_dict(config),
            "global_batch_size": facts.get("global_batch_size"),
            "data": facts.get("data") or {},
            "versions": versions(),
            "threads": threads,
            "git_revision": os.environ.get(contract.ENV_REVISION, ""),
            "world": {
                "size": world.size,
                "nodes": world.nodes,
                "launcher": world.launcher,
                "device": str(world.device),
            },
            **({"fresh": self.fresh_word} if self.fresh_word else {}),
            "environment": {name: os.environ[name] for name in contract.RUN_ENVIRONMENT if name in os.environ},
        }
        path, refused = self.path / contract.RUN_FILE, [f"the disk has not answered for {RUN_FILE_SECONDS:.0f} s"]

        def write() -> None:
            try:
                files.replace(path, yaml.safe_dump(value, sort_keys=False, allow_unicode=True).encode())
                refused.clear()
            except OSError as error:
                refused[:] = [str(error.strerror)]

        self.disk.run(write, seconds=RUN_FILE_SECONDS)
        if refused:
            raise UserError(f"cannot write {path}: {refused[0]}")

    def event(self, kind: str, **values: Any) -> None:
        """Appends a line to events.jsonl, and passes the same event to the listeners.

        A disk that refuses or hangs does not end the run: one warning reports it. If a kill has cut off the last line, a new line begins.
        """
        entry = {"event": kind, "time": round(time.time(), 3), "attempt": self.attempt, **values}
        self._write(contract.EVENTS_FILE, lambda path: files.append(path, entry))
        for listener in self.listeners:
            listener(entry)

    def time(self, line: dict[str, Any], waits: bool) -> None:
        """Appends a line to time.jsonl (`goodput.py`). `waits`: whether to wait until it is written."""
        self._write(contract.TIME_FILE, lambda path: files.append(path, line), DISK_SECONDS if waits else 0.0)

    def status(self, code: int | None, reason: str, step: int) -> None:
        """Replaces status.json, which backends trust above exit codes. `code` None: running."""
        restart = os.environ.get(contract.ENV_RESTARTS, "")
        further = {
            "job": os.environ.get(contract.ENV_JOB) or None,
            # The number of this start of the job, by the launcher's count.
            "restart": int(restart) if restart.isdigit() else None,
            "ranks": self.ranks,
            "goodput": self.goodput(),
            "slow_rank": self.slow_rank,
        }
        status = {
            "code": code, "reason": reason, "step": step, "attempt": self.attempt, "failures": self.failures,
            **{name: value for name, value in further.items() if value is not None},
        }  # fmt: skip
        self._write(contract.STATUS_FILE, lambda path: files.replace_json(path, status))
        for listener in self.listeners:
            listener({"event": "status", "time": round(time.time(), 3), **status})

    def summary(self, values: dict[str, Any]) -> None:
        """Replaces summary.json."""
        self._write(contract.SUMMARY_FILE, lambda path: files.replace_json(path, values))

    def _write(self, name: str, write: Callable[[Path], None], seconds: float = DISK_SECONDS) -> None:
        def guarded() -> None:
            try:
                write(self.path / name)
            except OSError as error:
                self._warn(f"cannot write {name}: {error.strerror}")

        self.disk.run(guarded, seconds)

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            to_stderr(f"warning: {self.path}: {message}; the run continues")

    def close(self) -> None:
        """Calls the functions in `at_close`, and releases the lock."""
        while self.at_close:
            self.at_close.pop()()
        self.disk.stop()
        self._lock.release()


def read_run(path: Path) -> dict[str, Any]:
    """Returns run.yaml of a run directory, with `config` as settings. Raises `UserError` if it is missing or malformed."""
    file = path / contract.RUN_FILE
    value = settings.read_yaml(file)
    batch, data = value.get("global_batch_size"), value.get("data")
    config = value.get("config")
    known = isinstance(batch, int) or (batch is None and isinstance(config, dict) and "script" in config)
    if not isinstance(config, dict) or not known or not isinstance(data, dict):
        raise UserError(f"{file} is malformed: restore it, or start over in another run directory")
    return {**value, "config": configuration.of_run(config, str(file))}


@contextlib.contextmanager
def _usable(path: Path) -> Iterator[None]:
    """Turns errors of the disk and of the lock in the block into `UserError`."""
    try:
        str(path).encode()  # it is a label of the metrics
        yield
    except UnicodeEncodeError:
        raise UserError(f"{path} is not UTF-8: choose another --run-dir") from None
    except filelock.Timeout:
        raise UserError(f"{path} is in use by another run: wait for it, or choose another --run-dir") from None
    except OSError as error:
        raise UserError(f"cannot use the run directory {path}: {error.strerror}") from None


def _locked(path: Path, seconds: float) -> filelock.FileLock:
    """Locks the directory. Raises `filelock.Timeout`, also if another start renames the directory meanwhile, and `OSError`."""
    path.mkdir(parents=True, exist_ok=True)
    waited_for = path.stat().st_ino
    lock = filelock.FileLock(path / contract.LOCK_FILE, timeout=seconds)
    lock.acquire()
    if not path.exists() or path.stat().st_ino != waited_for:
        lock.release()
        raise filelock.Timeout(str(path))
    return lock


LAST_BYTES = 1 << 17
"""Bytes at the end of events.jsonl that a replacement of rank 0 reads."""


def _refuse_links_of_others(path: Path) -> None:
    """Refuses links of other users, which could lead a run's writes elsewhere. Links of the user, or of root, are allowed."""
    for entry in os.scandir(path):
        stat = entry.stat(follow_symlinks=False)
        if entry.is_symlink() and not files.is_meant_link(stat):
            raise UserError(
                f"{entry.path} is a link of user {stat.st_uid} to {os.readlink(entry.path)}: remove it, or choose another --run-dir"
            )


def _begun_otherwise(path: Path, word: str) -> bool:
    if not (path / contract.RUN_FILE).exists():
        return (path / contract.CHECKPOINTS).exists()
    try:
        return settings.read_yaml(path / contract.RUN_FILE).get("fresh") != word
    except UserError:  # damaged: this start cannot resume it
        return True


def _move_aside(path: Path) -> None:
    """Renames the folder of a run that is not in use. Raises `UserError` for a folder without a run."""
    if any(path.iterdir()) and not any((path / name).exists() for name in (contract.RUN_FILE, contract.CHECKPOINTS)):
        raise UserError(
            f"{path} does not hold a run of Lockstep, so --fresh does not move it: choose another --run-dir"
        )
    lock = _locked(path, LOCK_SECONDS)
    try:
        targets = (path.with_name(f"{path.name}.old-{number}") for number in itertools.count(1))
        target = next(target for target in targets if not target.exists())
        path.rename(target)
    finally:
        lock.release()
    to_stderr(f"moved the earlier run to {target}")


def versions() -> dict[str, str]:
    return {
        "lockstep": contract.VERSION, "torch": str(torch.__version__), "python": platform.python_version(),
        "cuda": torch.version.cuda or "", "platform": platform.platform(),
    }  # fmt: skip
