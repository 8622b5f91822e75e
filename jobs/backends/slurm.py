"""The SLURM backend: submitit writes and sends the script, SLURM itself says how it goes.

Also for a driver of one's own on submitit alone:

    executor.submit(training_task(spec))        # results(): summary.json of rank 0
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock

from jobs import lint
from jobs.backends import base, slurm_explain, slurm_query
from jobs.backends.base import Listed, Mode, Status, Submitted
from jobs.backends.slurm_folder import ENDED, SUBMITIT, Folder, cancelled, check, ends, home, log, make
from jobs.backends.slurm_query import Unreachable, ask
from jobs.backends.slurm_task import TrainingTask
from jobs.render import command as commands
from jobs.render import slurm as render
from jobs.spec import JobSpec
from training import contract, files
from training.contract import UserError

_NOISE = re.compile(r"submitit [A-Z]+ \(\d{4}-")
Specs = list[JobSpec]  # named here, because `list` is a method below
Sent = list[Submitted]


def training_task(spec: JobSpec, prepared: bool = False) -> TrainingTask:
    """The payload for one task of the job; plain values, importable on the nodes.

    Args:
        prepared: another job writes the shards before this one starts.
    """
    if spec.shard_folder is not None and not prepared and not Path(spec.shard_folder).exists():
        spec = spec.model_copy(update={"shards": None})  # not prepared: the data is made on the spot
    run_dir = render.run_directory(spec)
    return TrainingTask(
        words=commands.rank(spec, run_dir), run_dir=run_dir, ranks_per_node=spec.ranks,
        max_restarts=spec.max_restarts, metrics_port=spec.metrics_port, env=dict(spec.env),
    )  # fmt: skip


class SlurmBackend:
    """See `base.Backend`.

    Args:
        folder: where the jobs are kept; the nodes must see it.
        interval: seconds between two questions to the controller.
        lost_after: seconds without an answer from the controller after which a job counts as lost.
    """

    name = "slurm"

    def __init__(self, folder: Path | None = None, interval: float = 2.0, lost_after: float = 300.0) -> None:
        self.folder, self.interval, self.lost_after = (folder or home()).absolute(), interval, lost_after

    def submit(self, spec: JobSpec, mode: Mode = "attach") -> Submitted:
        with self._locked():
            placed = self._place(spec, mode)
            return placed if isinstance(placed, Submitted) else self._send(placed, [placed])[0]

    def prepare(self, spec: JobSpec) -> Submitted:
        """Submits the job that writes the shards; jobs submitted while it is under way wait for it. Raises `UserError`."""
        own = render.preparation(spec)
        if Path(str(spec.shard_folder)).exists():
            return Submitted(own.name, False, f"the shards are in {spec.shard_folder}")
        return self.submit(own, "replace")

    def _preparation(self, spec: JobSpec) -> str | None:
        """The id of a job under way that prepares this one's shards."""
        if spec.recipe is None or spec.shards is None:
            return None
        own = render.preparation(spec)
        kept = Folder(self.folder / own.name)
        if kept.record() is None or kept.ended() is not None or self.status(own.name).final:
            return None
        return self.job_id(own.name)

    def sweep(self, name: str, specs: Specs, mode: Mode = "attach") -> Sent:
        """Submits the runs of a sweep as one job array. All of them must be new, or all the same as before."""
        with self._locked():
            placed = [self._place(spec, mode) for spec in specs]
            new = [spec for spec in placed if isinstance(spec, JobSpec)]
            if new and len(new) < len(placed):
                there = next(item.name for item in placed if isinstance(item, Submitted))
                raise UserError(f"{there} of this sweep is under way already: wait for it, or choose another --name")
            if not new:
                return [item for item in placed if isinstance(item, Submitted)]
            return self._send(new[0].model_copy(update={"name": name}), new)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        make(self.folder)
        try:
            with filelock.FileLock(self.folder / ".lock", timeout=60):
                yield
        except filelock.Timeout:
            raise UserError(f"{self.folder} is locked by another lockstep command: wait for it") from None

    def _place(self, spec: JobSpec, mode: Mode) -> JobSpec | Submitted:
        """The spec to submit, or the same job where it is there already."""
        if not (self.folder / spec.name).exists():
            return spec
        if Folder(self.folder / spec.name).record() is None:
            raise UserError(
                f"{self.folder / spec.name} belongs to a sweep, or to nothing of ours: choose another --name"
            )
        record = self._record(spec.name)
        status = self.status(spec.name)
        if mode == "new":
            taken = {entry.name for entry in self.folder.iterdir()}
            return spec.model_copy(update={"name": base.next_name(spec.name, taken), "run_dir": None})
        if mode == "replace" and status.final:
            shutil.rmtree(self.folder / spec.name)
            return spec
        if record["hash"] != spec.hash():
            raise base.refuse_other(spec.name, record["spec"], spec.plain())
        if status.final:
            raise base.refuse_finished(spec.name, status)
        return Submitted(spec.name, False, self._where(record))

    def _send(self, whole: JobSpec, specs: Specs) -> Sent:
        """One sbatch for all of them: a job, or an array."""
        for spec in specs:
            missing = [name for name in spec.secrets if name not in os.environ]
            if missing:
                raise UserError(
                    f"the job needs the secret {missing[0]}: set it in the environment, SLURM takes it along"
                )
        place = make(self.folder / whole.name)
        submitit_folder = make(place / SUBMITIT)
        found = lint.errors(lint.lint(whole, render.manifests(whole, submitit_folder)))
        if found:
            shutil.rmtree(place)
            more = f" (and {len(found) - 1} more: see `lockstep lint --backend slurm`)" if len(found) > 1 else ""
            raise UserError(f"{whole.name}: {found[0]}{more}")
        records = []
        for spec in specs:
            run_dir = render.run_directory(spec)
            before = files.read_json(Path(run_dir) / contract.STATUS_FILE)
            records.append(
                {
                    "spec": spec.plain(), "hash": spec.hash(), "run_dir": run_dir, "submitit": str(submitit_folder),
                    "job_id": None, "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                    "since": time.time(), "comment": f"lockstep:{whole.hash()}", "array_name": whole.name,
                    "earlier_attempts": before.get("attempt", 0) if isinstance(before, dict) else 0,
                }
            )  # fmt: skip
            Folder(make(self.folder / spec.name)).write(records[-1])
        try:
            after = self._preparation(whole)
            tasks = [training_task(spec, after is not None) for spec in specs]
            ids = _sbatch(whole, submitit_folder, tasks, after)
        except UserError:
            for name in {whole.name, *(spec.name for spec in specs)}:
                shutil.rmtree(self.folder / name, ignore_errors=True)
            raise
        for spec, record, job_id in zip(specs, records, ids):
            Folder(self.folder / spec.name).write({**record, "job_id": job_id})
        return [
            Submitted(spec.name, True, self._where({**record, "job_id": job_id}))
            for spec, record, job_id in zip(specs, records, ids)
        ]

    def job_id(self, name: str) -> str:
        """SLURM's id of the job. Raises `UserError`."""
        return str(self._record(name)["job_id"])

    def status(self, name: str) -> Status:
        record = self._record(name)
        spec = JobSpec.model_validate(record["spec"])
        if record["job_id"] is None:
            return Status("lost", "the submission was broken off before sbatch answered: submit it with --replace")
        found = slurm_query.look(str(record["job_id"]))
        kept = Folder(self.folder / name)
        if found is None and (before := kept.ended()) is not None:
            parts = [base.Part(**part) for part in before["ranks"]]
            return Status(before["state"], before["reason"], parts, before["exit_code"])
        told = slurm_explain.explain(
            spec, found, ends(record), self._said(record), cancelled(record).exists(), record["since"], time.time()
        )
        plain = {key: value for key, value in told.plain().items() if key != "final"}
        if told.final and kept.ended() != plain:
            with contextlib.suppress(OSError):
                files.replace_json(kept.path / ENDED, plain)  # SLURM forgets; without accounting within minutes
        return told

    def wait(self, name: str, timeout: float) -> Status:
        deadline = time.monotonic() + timeout
        self._record(name)  # a name that never was is the caller's mistake, not a lost job
        silent_since: float | None = None
        while True:
            try:
                found, silent_since = self.status(name), None
            except Unreachable as error:
                silent_since = silent_since or time.monotonic()
                gone = time.monotonic() - silent_since >= self.lost_after
                found = Status("lost" if gone else "running", f"{error}{f' for {self.lost_after:g} s' if gone else ''}")
            left = deadline - time.monotonic()
            if found.final or left <= 0:
                return found
            time.sleep(min(self.interval, left))

    def cancel(self, name: str) -> Status:
        record = self._record(name)
        status = self.status(name)
        if status.final:
            return status
        job_id = str(record["job_id"])
        cancelled(record).touch()  # from here on no rank asks for a requeue
        grace = JobSpec.model_validate(record["spec"]).grace_seconds + render.MARGIN_SECONDS
        deadline = time.monotonic() + grace
        signalled = False
        while not (status := self.status(name)).final and time.monotonic() < deadline:
            if (
                status.state == "running"
                and not signalled
                and f"{job_id}.0" in ask("squeue", "-hs", "-j", job_id).stdout
            ):
                signalled = (
                    ask("scancel", "--signal=TERM", job_id).returncode == 0
                )  # without a step nobody would hear it
            elif status.state != "running":
                ask("scancel", "--state=PENDING", job_id)
            time.sleep(min(self.interval, 0.5))
        if not status.final:
            ask("scancel", job_id)
        return self.wait(name, 120)

    def logs(self, name: str, rank: int | None = None, follow: bool = False) -> Iterator[str]:
        record = self._record(name)
        spec = JobSpec.model_validate(record["spec"])
        total = spec.nodes * spec.ranks
        if rank is not None and not 0 <= rank < total:
            raise UserError(f"{name} has the ranks 0 … {total - 1}, got {rank}")
        return self._lines(name, record, [rank] if rank is not None else list(range(total)), rank is None, follow)

    def _lines(
        self, name: str, record: dict[str, Any], ranks: list[int], prefix: bool, follow: bool
    ) -> Iterator[str]:  # fmt: skip
        read = dict.fromkeys(ranks, 0)
        rests = dict.fromkeys(ranks, b"")
        while True:
            try:
                over = not follow or self.status(name).final  # asked before reading, so that nothing is missed
            except Unreachable:
                over = False
            for rank in ranks:
                more = _since(log(record, rank), read[rank])
                read[rank] += len(more)
                *lines, rests[rank] = (rests[rank] + more).split(b"\n")
                if over and rests[rank]:
                    lines.append(rests[rank])
                for line in (raw.decode(errors="replace") for raw in lines):
                    if not _NOISE.match(line):
                        yield f"[rank {rank}] {line}" if prefix else line
            if over:
                return
            time.sleep(min(self.interval, 1.0))

    def list(self) -> list[Listed]:
        rows = []
        for entry in sorted(self.folder.iterdir()) if self.folder.exists() else []:
            record = Folder(entry).record()
            if record is None:
                continue
            before = Folder(entry).ended()
            state = before["state"] if before is not None else self.status(entry.name).state
            rows.append(Listed(entry.name, state, record["spec"].get("nodes", 1), record["created"]))
        return rows

    def live(self, name: str) -> dict[str, Any]:
        return self._record(name)["spec"]

    def drift(self, spec: JobSpec) -> base.Lines:
        """What `scontrol update` has changed in the waiting or running job."""
        job_id = self.job_id(spec.name)
        shown = ask("scontrol", "show", "job", "-o", job_id).stdout
        wanted = {
            "JobName": self._record(spec.name)["array_name"],
            "Partition": spec.slurm.partition,
            "Account": spec.slurm.account,
        }
        found = []
        for key, value in wanted.items():
            match = re.search(rf"(?:^|\s){key}=(\S*)", shown)
            if value is not None and match is not None and match[1] != value:
                found.append(f"{key}: {value} → {match[1]}")
        return found

    def summary(self, name: str) -> dict[str, Any]:
        path = Path(self._record(name)["run_dir"]) / contract.SUMMARY_FILE
        value = files.read_json(path)
        if not isinstance(value, dict):
            raise UserError(f"{path} is not there yet: {name} is {self.status(name).state}")
        return value

    def _said(self, record: dict[str, Any]) -> dict[str, Any] | None:
        """status.json of this job, which is trusted above exit codes; not one of an earlier job."""
        said = files.read_json(Path(record["run_dir"]) / contract.STATUS_FILE)
        if not isinstance(said, dict) or not isinstance(said.get("attempt"), int):
            return None
        return said if said["attempt"] > record["earlier_attempts"] else None

    def _record(self, name: str) -> dict[str, Any]:
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,62}", name):
            raise UserError(f"{name!r} is not a job's name (lower-case letters, digits and -)")
        record = Folder(self.folder / name).record()
        if record is None:
            raise UserError(f"there is no SLURM job {name}: see `lockstep list slurm`")
        check(self.folder / name)
        if record["job_id"] is None and record["array_name"] == name:
            # The command that submitted was killed before it had the answer; the job may be there.
            found = slurm_query.mine(name, record["comment"])
            if found is not None:
                record["job_id"] = found
                Folder(self.folder / name).write(record)
        return record

    @staticmethod
    def _where(record: dict[str, Any]) -> str:
        return f"SLURM job {record['job_id']}, logs in {record['submitit']}"


def _since(path: Path, offset: int) -> bytes:
    """What a file has got since `offset`; nothing while it is not there."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read()
    except OSError:
        return b""


def _sbatch(spec: JobSpec, folder: Path, tasks: list[TrainingTask], after: str | None) -> list[str]:
    """Submits and returns the job's ids, one a task. Raises `UserError` with what sbatch says."""
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise UserError(
            "sbatch is not installed here: submit from a node of a SLURM cluster, see `lockstep doctor slurm`"
        )
    import submitit
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    executor = submitit.AutoExecutor(folder=folder, cluster="slurm", slurm_python=render.python(spec, folder))
    executor.update_parameters(**render.parameters(spec, folder, after))
    with _clean_environment():
        try:
            if len(tasks) == 1:
                return [executor.submit(tasks[0]).job_id]
            return [job.job_id for job in executor.submit_array(tasks)]
        except (FailedJobError, FailedSubmissionError) as error:
            told = [line for line in str(error).splitlines() if "error:" in line] or [slurm_query.one_line(str(error))]
            text = "; ".join(line.split("error:", 1)[-1].strip() for line in told)
            raise UserError(f"SLURM refuses {spec.name}: {slurm_query.one_line(text)}") from None


@contextlib.contextmanager
def _clean_environment() -> Iterator[None]:
    """sbatch reads SBATCH_* above the script, and an outer job's SLURM_* would contradict the new one's."""
    away = {
        name: value for name, value in os.environ.items()
        if name.startswith(("SBATCH_", "SLURM_")) and name not in ("SLURM_CONF", "SLURM_CLUSTERS", "SBATCH_ACCOUNT")
    }  # fmt: skip
    for name in away:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(away)
