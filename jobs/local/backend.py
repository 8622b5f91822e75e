"""The reference backend: a job as detached processes of this machine, which outlive the command that submitted them.

$LOCKSTEP_HOME/local/NAME/   job.json  running.json  ended.json  log.txt      (default ~/.local/state/lockstep)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from itertools import starmap
from pathlib import Path

from lockstep.training import contract, extras, files
from lockstep.training.contract import UserError

from .. import records, snapshots
from ..backend import Backend, JobRecord, Submission
from ..logs import follow as follow_logs
from ..logs import last_error
from ..manifest import seconds, size_in_bytes
from ..process import Streams, exec_command, run, signal_name
from ..spec.model import GRACE_MARGIN, JobSpec, code_identity, launch_command
from ..status import Check, JobSummary, NodeStatus, State, Status, SubmitResult
from . import supervise
from .supervise import ENDED, RUNNING, alive, end_of, here, start_ticks

SUPERVISOR = "supervisor.json"
LOG = "log.txt"


class LocalBackend(Backend):
    """A backend whose jobs are detached processes of this machine. See `Backend`."""

    name = "local"
    interval = 0.1

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or records.folder(self.name)
        self.lock = partial(records.locked, self.folder, 30)

    def find(self, name: str, submitting: bool = False) -> JobRecord | None:  # noqa: ARG002 - no job is taken away by others
        record = records.job_record(self.folder, name, records.LocalJob)
        return None if record is None else self._known(name, record)

    def _known(self, name: str, record: records.LocalJob) -> JobRecord:
        nodes, where = record.spec.get("nodes", 1), str(self.folder / name)
        return JobRecord(name, record.hash, record.spec, record, where, nodes, record.run_dir, record.created)

    def preflight(self, job: Submission) -> list[Check]:
        """Returns checks. The job starts at once, because nothing is reserved here. It may ask for more than the machine has."""
        extras.require("torch")
        spec, cores = job.spec, os.cpu_count() or 1
        ranks, wanted = spec.nodes * spec.ranks, spec.nodes * size_in_bytes(spec.memory)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        checks = [
            Check("cpus", "ok" if ranks <= cores else "warning", f"{ranks} ranks on {cores} cores"),
            Check("memory", "ok" if wanted <= memory else "warning", f"{wanted >> 20} of {memory >> 20} MiB"),
        ]
        if spec.gpus:
            gpus, needed = len(list(Path("/dev").glob("nvidia[0-9]*"))), spec.nodes * spec.gpus
            checks.append(Check("gpus", "ok" if needed <= gpus else "missing", f"{needed} of {gpus}"))
        run_dir = Path(spec.run_directory_here)
        place = next(folder for folder in (run_dir, *run_dir.parents) if os.path.lexists(folder))
        if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
            checks.append(Check("run_dir", "missing", f"{place} is not a folder that this user may write to"))
        return [*checks, Check("start", "ok", "at once")]

    def create(self, job: Submission, old: JobRecord | None) -> SubmitResult:
        extras.require("torch")  # the launcher needs torch, also for a `command:`
        spec, folder = job.spec, self.folder / job.spec.name
        # The same job resumes in its run directory, from whatever folder it is submitted.
        run_dir = old.handle.run_dir if old is not None and old.hash == spec.hash() else spec.run_directory_here
        records.make_parents(Path(run_dir))
        if spec.code is not None:
            snapshots.unpacked(code_identity(spec))
        if old is not None:
            shutil.rmtree(folder)
        elif folder.exists():
            _clear(folder)
        folder.mkdir(mode=0o700)
        record = records.LocalJob(
            spec=spec.record(), hash=spec.hash(), run_dir=run_dir, command=self._command(spec, run_dir), env=dict(spec.env),
            time_limit=seconds(spec.time_limit), grace=spec.grace_seconds + GRACE_MARGIN,
            created=records.now(), job=records.submission_id(spec.name), host=here(),
        )  # fmt: skip
        # If another job submits this job, this job's processes do not belong to the other one.
        env = {name: value for name, value in os.environ.items() if name not in contract.OF_A_JOB}
        with (folder / LOG).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", supervise.MODULE, str(folder)], env=env,
                stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        # The job has a supervisor before it has a record, and starts when both are there: the supervisor waits for its input.
        records.Process(pid=process.pid, ticks=start_ticks(process.pid)).write(folder / SUPERVISOR)
        record.write(folder / records.JOB)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:  # a supervisor that is gone is seen by `observe`
            process.stdin.write(b"start")
        # The supervisor is meant to outlive this process. If it ends earlier, this thread collects its exit code.
        threading.Thread(target=process.wait, daemon=True).start()
        return SubmitResult(spec.name, True, str(folder))

    @staticmethod
    def _command(spec: JobSpec, run_dir: str) -> list[str]:
        if spec.shards_missing_here:
            spec = spec.model_copy(update={"shards": None})  # a path of the cluster; here the job creates the data
        code = snapshots.folder_of(spec)
        command = launch_command(spec, run_dir, sys.executable, code=code, here=str(Path.cwd()))
        return [*command[:4], "--ranks", str(spec.nodes * spec.ranks), "--nodes", "1", *command[4:]]

    def observe(self, known: JobRecord) -> Status:
        record, folder = known.handle, self.folder / known.name
        total = known.world_size
        # In the order of a job's life: a change between two of these queries is visible in the second one.
        supervised = _alive(folder, SUPERVISOR) is not None
        ended = records.LocalEnd.read(folder / ENDED)
        cancelled = (folder / "cancelled").exists()

        reported = records.reported(Path(record.run_dir), record.job)

        def answer(state: State, reason: str, code: int | None = None) -> Status:
            node = NodeStatus("this machine", list(range(total)), state, restarts=records.restarts(reported))
            return Status(state, reason, [node], code, **records.about_time(reported))

        if ended is None or ended.job != record.job:  # the end of an earlier submission does not count
            if record.host != here():
                return answer("running", f"runs on {record.host.partition(' ')[0]}: ask there")
            if supervised and (folder / RUNNING).exists():
                return answer("running", records.progress(reported))
            if supervised:
                return answer("pending", "the launcher is starting")
            ended = end_of(record.run_dir, record.job, None)  # the supervisor was killed, and with it the launcher
        code, reason = ended.code, ended.reason
        if code is None and cancelled:
            return answer("cancelled", "cancelled")
        if code is None:
            return answer(
                "lost", "the processes are gone and left no exit code: the machine restarted, or they were killed"
            )
        if code < 0:
            code, reason = 128 - code, f"killed by {signal_name(-code)}"
        if ended.timed_out:
            return answer("timed_out", f"the time limit of {record.time_limit} s is over", code)
        if code == contract.EXIT_DONE:
            return answer("succeeded", reason or "complete", code)
        if cancelled:
            # Without a reason no run reported a save: the signal came before its ranks, or the run saves no state.
            saved = code == contract.EXIT_PREEMPTED and reason
            return answer("cancelled", "cancelled; the state is saved" if saved else "cancelled", code)
        if code == contract.EXIT_PREEMPTED:
            return answer("preempted", reason or "ended by a signal; submit it again", code)
        last = last_error(folder / LOG)
        return answer("failed", reason or f"exit code {code}{f': {last}' if last else ''}", code)

    def stream(self, known: JobRecord, rank: int | None, follow: bool, last: int | None) -> Iterator[str]:
        path = self.folder / known.name / LOG
        with files.reading(path):
            files.regular(path).close()
        return follow_logs({0: path}, rank, True, lambda: not follow or self.status(known.name).final, self.interval, last)  # fmt: skip

    def exec(self, known: JobRecord, rank: int, command: list[str], streams: Streams) -> int:
        record = known.handle
        _check_here(known, "run the command there")
        launcher = _alive(self.folder / known.name, RUNNING)
        marks = {contract.ENV_JOB: record.job, contract.ENV_LAUNCHER: str(launcher)}
        words = exec_command(sys.executable, rank, command, record.run_dir)
        return run(words, streams, {**os.environ, **marks})

    def stop(self, known: JobRecord) -> Status:
        record, folder = known.handle, self.folder / known.name
        _check_here(known, "cancel it there")
        with contextlib.suppress(OSError):  # the file only gives the reason: a full disk must not keep a job alive
            (folder / "cancelled").touch()
        if (supervisor := _alive(folder, SUPERVISOR)) is not None:
            supervise.send([supervisor], signal.SIGTERM)
        # The supervisor kills, after the grace.
        status = self.wait(known.name, record.grace + 2 * supervise.KILL_SECONDS)
        if not status.final:
            raise UserError(
                f"{known.name} has not ended: the kernel holds its processes, often for a disk or a GPU. Once they are gone, "
                f"`lockstep status local {known.name}` says so"
            )
        return status

    def list(self) -> list[JobSummary]:
        return [*self._summaries(starmap(self._known, records.job_records(self.folder, records.LocalJob)))]


def _clear(folder: Path) -> None:
    """Removes the folder of a submission that was interrupted before its record was written. Raises `UserError` for any other folder."""
    files.remove_stale(folder, (records.JOB, SUPERVISOR))
    for name in (SUPERVISOR, LOG):
        (folder / name).unlink(missing_ok=True)
    try:
        folder.rmdir()
    except OSError:
        raise UserError(f"{folder} exists and does not hold a job: choose another name, or remove it") from None


def _alive(folder: Path, file: str) -> int | None:
    """Returns the process of a record; None if the process does not live, or there is no such record."""
    known = records.Process.read(folder / file)
    return known.pid if known is not None and alive(known.pid, known.ticks) else None


def _check_here(known: JobRecord, advice: str) -> None:
    """Raises `UserError` for a job of another machine."""
    if known.handle.host != here():
        raise UserError(f"{known.name} runs on {known.handle.host.partition(' ')[0]}: {advice}")


BACKEND = LocalBackend
