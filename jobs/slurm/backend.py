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

from jobs import backend as base
from jobs import command as commands
from jobs import lock, records
from jobs.backend import Listed, Mode, Status, Submitted
from jobs.checks import lint
from jobs.private import check, make
from jobs.slurm import observe as slurm_explain
from jobs.slurm import query as slurm_query
from jobs.slurm import render
from jobs.slurm.folder import ENDED, SUBMITIT, Folder, cancelled, ends, home
from jobs.slurm.logs import lines
from jobs.slurm.query import Unreachable, ask
from jobs.slurm.send import send
from jobs.slurm.task import TrainingTask
from jobs.spec import file as specfile
from jobs.spec.model import JobSpec
from jobs.terminal import warn
from training import files
from training.contract import UserError

Specs = list[JobSpec]  # named here, because `list` is a method below
Sent = list[Submitted]


def training_task(spec: JobSpec, prepared: bool = False, job: str = "") -> TrainingTask:
    """The payload for one task of the job; plain values, importable on the nodes.

    Args:
        prepared: another job writes the shards before this one starts.
        job: identity of this submission.
    """
    if spec.shard_folder is not None and not prepared and not Path(spec.shard_folder).exists():
        spec = spec.model_copy(update={"shards": None})  # not prepared: the data is made on the spot
    run_dir = spec.run_directory_here
    return TrainingTask(
        words=commands.rank(spec, run_dir), run_dir=run_dir, ranks_per_node=spec.ranks,
        max_restarts=spec.max_restarts, metrics_port=spec.metrics_port, env=dict(spec.env),
        job=job,
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
        with lock.held(self.folder, 60):
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
        with lock.held(self.folder, 60):
            if Folder(self.folder / name).record() is not None:
                raise UserError(f"{name} is a job of its own: choose another --name for the sweep")
            placed = [self._place(spec, mode) for spec in specs]
            new = [spec for spec in placed if isinstance(spec, JobSpec)]
            if new and len(new) < len(placed):
                there = next(item.name for item in placed if isinstance(item, Submitted))
                raise UserError(f"{there} of this sweep is under way already: wait for it, or choose another --name")
            if not new:
                return [item for item in placed if isinstance(item, Submitted)]
            return self._send(new[0].model_copy(update={"name": name}), new)

    def _place(self, spec: JobSpec, mode: Mode) -> JobSpec | Submitted:
        """The spec to submit, or the same job where it is there already."""
        if not (self.folder / spec.name).exists():
            return spec
        if Folder(self.folder / spec.name).record() is None:
            raise UserError(
                f"{self.folder / spec.name} belongs to a sweep, or to nothing of ours: choose another --name"
            )
        record = self._record(spec.name)
        status = self.status(spec.name) if record["job_id"] is not None else _BROKEN_OFF  # nobody else is sending now
        decided = base.decide(spec.name, mode, status, record["hash"], lambda: record["spec"], spec)
        if decided == "new":
            taken = {entry.name for entry in self.folder.iterdir()}
            return spec.model_copy(update={"name": base.next_name(spec.name, taken), "run_dir": None})
        if decided == "attach":
            return Submitted(spec.name, False, self._where(record))
        if mode == "attach" and record["run_dir"] != spec.run_directory_here:
            raise UserError(
                f"{spec.name} has run in {record['run_dir']}: submit it from the folder it was submitted from, to go on "
                "there, or with --replace, to start anew here"
            )
        return spec

    def _send(self, whole: JobSpec, specs: Specs) -> Sent:
        """One sbatch for all of them: a job, or an array."""
        for spec in specs:
            missing = [name for name in spec.secrets if name not in os.environ]
            if missing:
                raise UserError(
                    f"the job needs the secret {missing[0]}: set it in the environment, SLURM takes it along"
                )
        submitit_folder = self.folder / whole.name / SUBMITIT
        found = lint.errors(lint.lint(whole, render.manifests(whole, submitit_folder)))
        if found:
            more = f" (and {len(found) - 1} more: see `lockstep lint --backend slurm`)" if len(found) > 1 else ""
            raise UserError(f"{whole.name}: {found[0]}{more}")
        with _aside([self.folder / name for name in {whole.name, *(spec.name for spec in specs)}]):
            return self._write_and_send(whole, specs, make(make(submitit_folder.parent) / SUBMITIT))

    def _write_and_send(self, whole: JobSpec, specs: Specs, submitit_folder: Path) -> Sent:
        written = []
        for element, spec in enumerate(specs):
            run_dir = spec.run_directory_here
            Path(run_dir).parent.mkdir(parents=True, exist_ok=True)  # a container mounts it
            written.append(
                {
                    "spec": spec.plain(), "hash": spec.hash(), "run_dir": run_dir, "submitit": str(submitit_folder),
                    "job_id": None, "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                    "since": time.time(), "comment": f"lockstep:{whole.hash()}", "array_name": whole.name,
                    "element": element if len(specs) > 1 else None,
                    "job": records.identity(spec.name),
                }
            )  # fmt: skip
            Folder(make(self.folder / spec.name)).write(written[-1])
        after = self._preparation(whole)
        ids = send(
            whole,
            submitit_folder,
            [training_task(spec, after is not None, str(record["job"])) for spec, record in zip(specs, written)],
            after,
        )
        for spec, record, job_id in zip(specs, written, ids):
            Folder(self.folder / spec.name).write({**record, "job_id": job_id})
        return [
            Submitted(spec.name, True, self._where({**record, "job_id": job_id}))
            for spec, record, job_id in zip(specs, written, ids)
        ]

    def job_id(self, name: str) -> str:
        """SLURM's id of the job. Raises `UserError`."""
        return str(self._record(name)["job_id"])

    def status(self, name: str) -> Status:
        record = self._record(name)
        spec = specfile.recorded(name, record["spec"])
        if record["job_id"] is None:
            sending = time.time() - record["since"] < slurm_explain.SETTLE_SECONDS
            return Status("pending", "is being submitted") if sending else _BROKEN_OFF
        found = slurm_query.look(str(record["job_id"]))
        kept = Folder(self.folder / name)
        before = kept.ended()
        parts = [base.Part(**part) for part in before["ranks"]] if before is not None else []
        noted = max((part.restarts for part in parts), default=0)
        if found is None:
            stands = True
        else:  # by then every note of it is visible, also on a file system that is slow to show them
            settled = time.time() - (found.ended or record["since"]) >= slurm_explain.SETTLE_SECONDS
            stands = settled and slurm_query.final(found.state) and found.restarts <= noted
        if before is not None and stands:
            return Status(before["state"], before["reason"], parts, before["exit_code"])
        told = slurm_explain.explain(
            spec,
            found,
            ends(record),
            records.said(Path(record["run_dir"]), record["job"]),
            cancelled(record).exists(),
            record["since"],
            time.time(),
        )
        plain = {key: value for key, value in told.plain().items() if key != "final"}
        with contextlib.suppress(OSError):
            if told.final:  # once: a job that has ended stays as it ended. SLURM forgets, without accounting in minutes
                files.replace_json(kept.path / ENDED, plain)
            elif not told.final:
                (kept.path / ENDED).unlink(missing_ok=True)  # somebody had SLURM run it again
        return told

    def wait(self, name: str, timeout: float, seen: base.Seen = base.unseen) -> Status:
        self._record(name)  # a name that never was is the caller's mistake, not a lost job
        silent_since: float | None = None

        def now() -> Status:
            nonlocal silent_since
            try:
                found, silent_since = self.status(name), None
            except Unreachable as error:
                silent_since = silent_since or time.monotonic()
                gone = time.monotonic() - silent_since >= self.lost_after
                return Status("lost" if gone else "running", f"{error}{f' for {self.lost_after:g} s' if gone else ''}")
            return found

        return base.poll(now, timeout, self.interval, seen)

    def cancel(self, name: str) -> Status:
        record = self._record(name)
        status = self.status(name)
        if status.final:
            return status
        job_id = str(record["job_id"])
        try:
            cancelled(record).touch()  # from here on no rank asks for a requeue
        except OSError as error:
            warn(f"cannot note that {name} is cancelled ({error.strerror}): a rank that saves may ask for a requeue")
        grace = specfile.recorded(name, record["spec"]).grace_seconds + render.MARGIN_SECONDS
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
        spec = specfile.recorded(name, record["spec"])
        total = spec.nodes * spec.ranks
        if rank is not None and not 0 <= rank < total:
            raise UserError(f"{name} has the ranks 0 … {total - 1}, got {rank}")
        ranks = [rank] if rank is not None else list(range(total))
        interval = min(self.interval, 1.0)
        return lines(record, ranks, rank is None, lambda: not follow or self.status(name).final, interval)

    def list(self) -> list[Listed]:
        rows = []
        entries = sorted(self.folder.iterdir()) if self.folder.exists() else []
        alive = slurm_query.under_way() if entries else set()
        for entry in entries:
            record = Folder(entry).record()
            if record is None or entry.name.startswith("."):
                continue
            before = Folder(entry).ended()
            ended = before is not None and str(record["job_id"]).split("_")[0] not in alive
            try:
                state = before["state"] if before is not None and ended else self.status(entry.name).state
            except Unreachable:
                raise
            except UserError as error:
                warn(str(error))
                continue
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
        return base.summary_of(self, name, self._record(name)["run_dir"])

    def _record(self, name: str) -> dict[str, Any]:
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,62}", name):
            raise UserError(f"{name!r} is not a job's name (lower-case letters, digits and -)")
        record = Folder(self.folder / name).record()
        if record is None:
            raise UserError(f"there is no SLURM job {name}: see `lockstep list slurm`")
        check(self.folder / name)
        if record["job_id"] is None:
            # The command that submitted was killed before it had the answer; the job may be there.
            found = slurm_query.mine(record["array_name"], record["comment"])
            if found is not None:
                record["job_id"] = found if record["element"] is None else f"{found}_{record['element']}"
                Folder(self.folder / name).write(record)
        return record

    @staticmethod
    def _where(record: dict[str, Any]) -> str:
        return f"SLURM job {record['job_id']}, logs in {record['submitit']}"


_BROKEN_OFF = Status("lost", "the submission was broken off before sbatch answered: submit it with --replace")


@contextlib.contextmanager
def _aside(places: list[Path]) -> Iterator[None]:
    """What lies at `places` is gone when the block succeeds, and back when it does not. Raises `UserError`."""
    moved = {place: place.with_name(f".{place.name}.replaced") for place in places if place.exists()}
    try:
        for place, away in moved.items():
            shutil.rmtree(away, ignore_errors=True)
            place.rename(away)
        yield
    except BaseException as error:
        for place in places:
            shutil.rmtree(place, ignore_errors=True)
        for place, away in moved.items():
            away.rename(place)
        if isinstance(error, OSError):
            raise UserError(f"cannot keep the job in {places[0].parent}: {error.strerror}; set LOCKSTEP_HOME") from None
        raise
    for away in moved.values():
        shutil.rmtree(away, ignore_errors=True)
