"""The reference backend: a job as detached processes of this machine, which outlive the command that submitted them.

$LOCKSTEP_HOME/local/NAME/   job.json  running.json  ended.json  log.txt      (default ~/.local/state/lockstep)
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jobs import backend as base
from jobs import command as commands
from jobs import lock, private, records
from jobs.backend import Listed, Mode, Part, Status, Submitted
from jobs.local.supervise import ENDED, RUNNING, alive, here, living, note_end, start_ticks
from jobs.spec import file as specfile
from jobs.spec.model import JobSpec
from jobs.terminal import warn
from training import contract, files
from training.contract import UserError

JOB, SUPERVISOR = "job.json", "supervisor.json"
POLL_SECONDS = 0.1
SUBMISSION_SECONDS = 60
_RECORD: dict[str, Any] = {
    "spec": dict, "hash": str, "run_dir": str, "grace": (int, float), "created": str, "job": str, "host": str,
}  # fmt: skip
_OF_A_JOB = (contract.ENV_JOB, contract.ENV_LAUNCHER, contract.ENV_RESTARTS)
_PREFIX = re.compile(r"\[rank (\d+)\] ")


def home() -> Path:
    """Where this machine's jobs are kept."""
    return Path(os.environ.get("LOCKSTEP_HOME") or Path.home() / ".local/state/lockstep")


class LocalBackend:
    """See `base.Backend`."""

    name = "local"

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or home() / "local"

    def submit(self, spec: JobSpec, mode: Mode = "attach") -> Submitted:
        with lock.held(self.folder, 30):
            return self._submit(spec, mode)

    def _submit(self, spec: JobSpec, mode: Mode) -> Submitted:
        missing = [name for name in spec.secrets if name not in os.environ]
        if missing:  # before anything of an earlier job is taken away
            raise UserError(f"the job needs the secret {missing[0]}: set it in the environment to run on this machine")
        folder, earlier = self.folder / spec.name, ""
        if folder.exists() and not (folder / JOB).exists():
            self._clear(folder)
        if folder.exists():
            record, status = self._record(spec.name), self.status(spec.name)
            decided = base.decide(spec.name, mode, status, record["hash"], lambda: record["spec"], spec)
            if decided == "attach":
                return Submitted(spec.name, False, str(folder))
            if decided == "new":
                taken = {entry.name for entry in self.folder.iterdir()}
                spec = spec.model_copy(update={"name": base.next_name(spec.name, taken), "run_dir": None})
                folder = self.folder / spec.name
            else:
                shutil.rmtree(folder)
                if record["hash"] == spec.hash():
                    earlier = record["run_dir"]  # the same job goes on there, from whatever folder it is submitted
        run_dir = earlier or spec.run_directory_here
        folder.mkdir(mode=0o700)
        files.replace_json(
            folder / JOB,
            {
                "spec": spec.plain(), "hash": spec.hash(), "run_dir": run_dir, "command": self._command(spec, run_dir),
                "env": dict(spec.env), "time_limit": spec.deadline_seconds, "grace": spec.grace_seconds + 30,
                "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                "job": records.identity(spec.name), "host": here(),
            },
        )  # fmt: skip
        # Where a job submits this one, it is none of that one's processes.
        env = {name: value for name, value in os.environ.items() if name not in _OF_A_JOB}
        with (folder / "log.txt").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "jobs.local.supervise", str(folder)], env=env,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        files.replace_json(folder / SUPERVISOR, {"pid": process.pid, "ticks": start_ticks(process.pid)})
        # It is meant to outlive this process; where it does not, somebody has to take its exit code.
        threading.Thread(target=process.wait, daemon=True).start()
        return Submitted(spec.name, True, str(folder))

    @staticmethod
    def _clear(folder: Path) -> None:
        """A submission was broken off before its record was there: nothing has run. Raises `UserError` for anything else."""
        files.remove_stale(folder, (JOB,))
        try:
            folder.rmdir()
        except OSError:
            raise UserError(f"{folder} is there and holds no job: choose another name, or remove it") from None

    @staticmethod
    def _command(spec: JobSpec, run_dir: str) -> list[str]:
        if spec.shard_folder is not None and not Path(spec.shard_folder).exists():
            spec = spec.model_copy(update={"shards": None})  # a path of the cluster; here the data is made on the spot
        command = commands.launch(spec, run_dir, sys.executable)
        return [*command[:4], "--ranks", str(spec.nodes * spec.ranks), "--nodes", "1", *command[4:]]

    def status(self, name: str) -> Status:
        record = self._record(name)
        folder = self.folder / name
        spec = specfile.recorded(name, record["spec"])
        total = spec.nodes * spec.ranks
        # In the order of a job's life: what has begun or ended between two of these questions shows in the second one.
        being_submitted = self._being_submitted(folder)
        supervised = self._supervised(folder) or (not (folder / ENDED).exists() and bool(living(record["job"])))
        ended = records.read(folder / ENDED, records.ENDED)
        cancelled = (folder / "cancelled").exists()

        def answer(state: base.State, reason: str, code: int | None = None) -> Status:
            return Status(state, reason, [Part("this machine", list(range(total)), state)], code)

        if ended is not None and ended["job"] != record["job"]:
            ended = None  # of an earlier submission
        if ended is None and record["host"] != here():
            return answer("running", f"is {record['host'].split()[0]}'s: ask there")
        if ended is None and supervised:
            if (folder / RUNNING).exists():
                said = records.said(Path(record["run_dir"]), record["job"])
                step = f"step {said['step']}" if said else "starting"
                return answer("running", step)
            return answer("pending", "the launcher is starting")
        if ended is None and being_submitted:
            return answer("pending", "is being submitted")
        if ended is None:  # the supervisor was killed, too, so the first to find no rank any more notes the end
            ended = note_end(folder, record, None)
        code, reason = ended["code"], str(ended.get("reason") or "")
        if code is None:
            return answer(
                "lost", "the processes are gone and left no exit code: the machine restarted, or they were killed"
            )
        if code < 0:
            known = -code in signal.valid_signals()
            name = signal.Signals(-code).name if known else f"signal {-code}"
            code, reason = 128 - code, f"killed by {name}"
        if ended.get("timed_out"):
            return answer("timed_out", f"the time limit of {record['time_limit']} s is over", code)
        if code == contract.EXIT_DONE:
            return answer("succeeded", reason or "complete", code)
        if cancelled:
            return answer(
                "cancelled", "cancelled; the state is saved" if code == contract.EXIT_PREEMPTED else "cancelled", code
            )
        if code == contract.EXIT_PREEMPTED:
            return answer("preempted", reason or "saved; submit it again to go on", code)
        last = self._last_line(folder)
        return answer("failed", reason or f"exit code {code}{f': {last}' if last else ''}", code)

    @staticmethod
    def _supervised(folder: Path) -> bool:
        for file in (SUPERVISOR, RUNNING):
            process = records.process(folder / file)
            if process is not None and alive(process["pid"], process["ticks"]):
                return True
        return False

    @staticmethod
    def _being_submitted(folder: Path) -> bool:
        """Between its record and its supervisor; a submission that was broken off there is lost after a minute."""
        if (folder / SUPERVISOR).exists() or (folder / RUNNING).exists():
            return False
        try:
            return time.time() - (folder / JOB).stat().st_mtime < SUBMISSION_SECONDS
        except OSError:  # replaced meanwhile
            return False

    @staticmethod
    def _last_line(folder: Path) -> str:
        try:
            with (folder / "log.txt").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
                lines = file.read().decode(errors="replace").split("\n")
        except OSError:
            return ""
        found = [line for line in lines if "error" in line.lower()]
        return found[-1][:300] if found else ""

    def logs(self, name: str, rank: int | None = None, follow: bool = False) -> Iterator[str]:
        record = self._record(name)
        spec = specfile.recorded(name, record["spec"])
        total = spec.nodes * spec.ranks
        if rank is not None and not 0 <= rank < total:
            raise UserError(f"{name} has the ranks 0 … {total - 1}, got {rank}")
        return self._lines(name, rank, follow)

    def _lines(self, name: str, rank: int | None, follow: bool) -> Iterator[str]:
        with (self.folder / name / "log.txt").open(encoding="utf-8", errors="replace") as file:
            rest = ""
            while True:
                over = not follow or self.status(name).final  # asked before reading, so that nothing is missed
                while chunk := file.read(1 << 16):
                    *lines, rest = (rest + chunk).split("\n")
                    yield from (found for line in lines if (found := _of_rank(line, rank)) is not None)
                if over:
                    break
                time.sleep(POLL_SECONDS)
            if rest and (found := _of_rank(rest, rank)) is not None:
                yield found

    def wait(self, name: str, timeout: float, seen: base.Seen = base.unseen) -> Status:
        return base.poll(lambda: self.status(name), timeout, POLL_SECONDS, seen)

    def cancel(self, name: str) -> Status:
        record, folder = self._record(name), self.folder / name
        if self.status(name).final:
            return self.status(name)
        if record["host"] != here():
            raise UserError(f"{name} runs on {record['host'].split()[0]}: cancel it there")
        with contextlib.suppress(OSError):  # it says why it ended, no more: a full disk may not keep a job alive
            (folder / "cancelled").touch()
        deadline = time.monotonic() + record["grace"]
        signalled = False
        while not self.status(name).final and time.monotonic() < deadline:
            process = records.process(folder / RUNNING)
            if process is not None and not signalled:
                signalled = True
                if not _kill(process, signal.SIGTERM):  # its launcher is gone, and ranks of it live
                    for pid in living(record["job"]):
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGTERM)
            time.sleep(POLL_SECONDS)
        if not self.status(name).final:
            process = records.process(folder / RUNNING)
            if process is not None and alive(process["pid"], process["ticks"]):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process["pid"], signal.SIGKILL)
            for pid in living(record["job"]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return self.wait(name, 10)

    def list(self) -> list[Listed]:
        if not self.folder.exists():
            return []
        private.check(self.folder)
        rows = []
        for name in sorted(entry.name for entry in self.folder.iterdir() if (entry / JOB).exists()):
            try:
                record = self._record(name)
                rows.append(Listed(name, self.status(name).state, record["spec"].get("nodes", 1), record["created"]))
            except UserError as error:
                warn(str(error))
        return rows

    def live(self, name: str) -> dict[str, Any]:
        return self._record(name)["spec"]

    def drift(self, spec: JobSpec) -> base.Lines:  # noqa: ARG002 - nothing but this record exists
        return []

    def summary(self, name: str) -> dict[str, Any]:
        return base.summary_of(self, name, self._record(name)["run_dir"])

    def _record(self, name: str) -> dict[str, Any]:
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,62}", name):
            raise UserError(f"{name!r} is not a job's name (lower-case letters, digits and -)")
        if self.folder.exists():
            private.check(self.folder)
        record = files.read_json(self.folder / name / JOB)
        if record is None:
            raise UserError(f"there is no local job {name}: see `lockstep list local`")
        if not records.fits(record, _RECORD):
            raise UserError(f"{self.folder / name / JOB} is damaged, or of another version: remove its folder")
        return record


def _of_rank(line: str, rank: int | None) -> str | None:
    """The line, or None where it is another rank's. One rank's lines lose their prefix."""
    if rank is None:
        return line
    match = _PREFIX.match(line)
    return line[match.end() :] if match and int(match[1]) == rank else None


def _kill(process: dict[str, Any], number: int) -> bool:
    """Whether there was somebody to signal."""
    if not alive(process["pid"], process["ticks"]):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(process["pid"], number)
    return True
