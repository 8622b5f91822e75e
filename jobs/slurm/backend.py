"""The SLURM backend: submitit writes and sends the script, SLURM itself says how it goes.

Also for a driver of one's own on submitit alone:

    executor.submit(training_task(spec))        # results(): summary.json of rank 0
"""

from __future__ import annotations

import contextlib
import datetime
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jobs import command as commands
from jobs import lock, records
from jobs.backend import Found, Lines, Mode, Sent, Specs, check_name
from jobs.checks.rule import Rules
from jobs.cluster import Checks, Cluster, Manifests
from jobs.code import store
from jobs.foreground import Streams
from jobs.private import check, make
from jobs.slurm import beside, checks, logs, observe, query, render, rules
from jobs.slurm.folder import ENDED, SUBMITIT, Folder, cancelled, ends, home, saved
from jobs.slurm.query import ask
from jobs.slurm.section import slurm
from jobs.slurm.send import send
from jobs.slurm.task import TrainingTask
from jobs.spec.model import JobSpec
from jobs.status import Listed, Part, Status, Submitted, Unreachable
from jobs.terminal import warn
from training import files
from training.contract import UserError


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
        words=commands.rank(spec, run_dir, str(Path.cwd())), run_dir=run_dir, ranks_per_node=spec.ranks,
        max_restarts=spec.max_restarts, metrics_port=spec.metrics_port, env=dict(spec.env),
        job=job, code=commands.identity(spec) if spec.code is not None else "", code_folder=render.code_folder(spec),
    )  # fmt: skip


class SlurmBackend(Cluster):
    """See `Backend`.

    Args:
        folder: where the jobs are kept; the nodes must see it.
        interval: seconds between two questions to the controller.
        lost_after: seconds without an answer from the controller after which a job counts as lost.
    """

    name = "slurm"
    carries_code = True
    secrets_from = "set it in the environment, SLURM takes it along"

    def __init__(self, folder: Path | None = None, interval: float = 2.0, lost_after: float = 300.0) -> None:
        self.folder, self.interval, self.lost_after = (folder or home()).absolute(), interval, lost_after

    @classmethod
    def manifests(cls, spec: JobSpec) -> Manifests:
        return render.manifests(spec, home() / spec.name / SUBMITIT)

    @classmethod
    def render(cls, spec: JobSpec, runs: Specs) -> tuple[str, object]:
        """The batch script, and the same with its payload as plain values."""
        folder = home() / spec.name / SUBMITIT
        text = render.script(spec, folder, elements=len(runs))
        return text, {"script": text, "parameters": render.parameters(spec, folder)}

    @classmethod
    def rules(cls) -> Rules[rules.Subject]:
        return rules.RULES

    @classmethod
    def preparation(cls, spec: JobSpec) -> tuple[str, object]:
        own = render.preparation(spec)
        script = render.script(own, home() / own.name / SUBMITIT)
        return script, {"script": script}

    @classmethod
    def doctor(cls, spec: JobSpec | None, **place: str | None) -> Checks:  # noqa: ARG003 - the cluster is this machine's
        return checks.check(spec)

    def exclusive(self) -> contextlib.AbstractContextManager[None]:
        return lock.held(self.folder, 60)

    def refuse(self, spec: JobSpec) -> None:
        self.refuse_findings(spec, self.rules().apply(spec, render.manifests(spec, self.folder / spec.name / SUBMITIT)))

    def create(self, spec: JobSpec, old: Found | None) -> Submitted:  # noqa: ARG002 - its folder goes when SLURM has the new one
        return self._send(spec, [spec])[0]

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
        specs = self.with_code(specs)
        whole = specs[0].model_copy(update={"name": name})
        self.refuse(whole)
        with self.exclusive():
            if Folder(self.folder / name).record() is not None:
                raise UserError(f"{name} is a job of its own: choose another --name for the sweep")
            placed = [self.place(spec, mode) for spec in specs]
            new = [item[0] for item in placed if not isinstance(item, Submitted)]
            there = [item for item in placed if isinstance(item, Submitted)]
            if new and there:
                raise UserError(
                    f"{there[0].name} of this sweep is under way already: wait for it, or choose another --name"
                )
            if not new:
                return there
            self.check_secrets(whole)
            return self._send(whole, new)

    def place(self, spec: JobSpec, mode: Mode) -> tuple[JobSpec, Found | None] | Submitted:
        folder = self.folder / spec.name
        if folder.exists() and Folder(folder).record() is None:
            raise UserError(f"{folder} belongs to a sweep, or to nothing of ours: choose another --name")
        return super().place(spec, mode)

    def find(self, name: str) -> Found | None:
        check_name(name)
        record = Folder(self.folder / name).record()
        if record is None:
            return None
        check(self.folder / name)
        if record["job_id"] is None:
            # The command that submitted was killed before it had the answer; the job may be there.
            known = query.mine(record["array_name"], record["comment"])
            if known is not None:
                record["job_id"] = known if record["element"] is None else f"{known}_{record['element']}"
                Folder(self.folder / name).write(record)
        return Found(name, record["hash"], record["spec"], record)

    def no_such(self, name: str) -> UserError:
        return UserError(f"there is no SLURM job {name}: see `lockstep list slurm`")

    def taken(self) -> set[str]:
        return {entry.name for entry in self.folder.iterdir()}

    def where(self, found: Found) -> str:
        return self._where(found.record)

    def standing(self, found: Found) -> Status:
        return self.observe(found) if found.record["job_id"] is not None else _BROKEN_OFF

    def gone_on(self, found: Found, spec: JobSpec) -> Found:
        if found.record["run_dir"] != spec.run_directory_here:
            raise UserError(
                f"{spec.name} has run in {found.record['run_dir']}: submit it from the folder it was submitted from, to "
                "go on there, or with --replace, to start anew here"
            )
        return found

    def _send(self, whole: JobSpec, specs: Specs) -> Sent:
        """One sbatch for all of them: a job, or an array."""
        submitit_folder = self.folder / whole.name / SUBMITIT
        with _aside([self.folder / name for name in {whole.name, *(spec.name for spec in specs)}]):
            return self._write_and_send(whole, specs, make(make(submitit_folder.parent) / SUBMITIT))

    def _write_and_send(self, whole: JobSpec, specs: Specs, submitit_folder: Path) -> Sent:
        written = []
        if whole.code is not None:
            store.unpacked(commands.identity(whole))
        for element, spec in enumerate(specs):
            run_dir = spec.run_directory_here
            Path(run_dir).parent.mkdir(parents=True, exist_ok=True)  # a container mounts it
            written.append(
                {
                    "spec": spec.record(), "hash": spec.hash(), "run_dir": run_dir, "submitit": str(submitit_folder),
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
        return str(self.require(name).record["job_id"])

    def observe(self, found: Found) -> Status:
        record = found.record
        spec = JobSpec.recorded(found.name, found.plain)
        if record["job_id"] is None:
            sending = time.time() - record["since"] < observe.SETTLE_SECONDS
            return Status("pending", "is being submitted") if sending else _BROKEN_OFF
        known = query.look(str(record["job_id"]))
        kept = Folder(self.folder / found.name)
        before = kept.ended()
        parts = [Part(**part) for part in before["ranks"]] if before is not None else []
        noted = max((part.restarts for part in parts), default=0)
        if known is None:
            stands = True
        else:  # by then every note of it is visible, also on a file system that is slow to show them
            settled = time.time() - (known.ended or record["since"]) >= observe.SETTLE_SECONDS
            stands = settled and query.final(known.state) and known.restarts <= noted
        if before is not None and stands:
            return Status(before["state"], before["reason"], parts, before["exit_code"])
        told = observe.explain(
            spec,
            known,
            ends(record),
            records.said(Path(record["run_dir"]), record["job"]),
            cancelled(record).exists(),
            record["since"],
            time.time(),
            saved(record),
        )
        plain = {key: value for key, value in told.plain().items() if key != "final"}
        with contextlib.suppress(OSError):
            if not told.final:
                (kept.path / ENDED).unlink(missing_ok=True)  # somebody had SLURM run it again
            elif (
                before != plain
            ):  # a job that has ended stays as it ended. SLURM forgets, without accounting in minutes
                files.replace_json(kept.path / ENDED, plain)
        return told

    def stop(self, found: Found) -> Status:
        name, record = found.name, found.record
        job_id = str(record["job_id"])
        try:
            cancelled(record).touch()  # from here on no rank asks for a requeue
        except OSError as error:
            warn(f"cannot note that {name} is cancelled ({error.strerror}): a rank that saves may ask for a requeue")
        grace = JobSpec.recorded(name, found.plain).grace_seconds + render.MARGIN_SECONDS
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

    def stream(self, found: Found, spec: JobSpec | None, rank: int | None, follow: bool) -> Iterator[str]:
        return self._lines(found, spec, rank, follow)

    def tail(self, found: Found, spec: JobSpec | None, rank: int | None, follow: bool, count: int) -> Iterator[str]:
        return self._lines(found, spec, rank, follow, count)

    def _lines(
        self, found: Found, spec: JobSpec | None, rank: int | None, follow: bool, last: int | None = None
    ) -> Iterator[str]:
        ranks = [rank] if rank is not None else list(range(self.world(found, spec)))
        over, interval = (lambda: not follow or self.status(found.name).final), min(self.interval, 1.0)
        return logs.lines(found.record, ranks, rank is None, over, interval, last)

    def exec(self, found: Found, spec: JobSpec | None, rank: int, command: Lines, streams: Streams) -> int:
        return beside.run(found.record, spec or JobSpec.recorded(found.name, found.plain), rank, command, streams)

    def list(self) -> list[Listed]:
        rows = []
        entries = sorted(self.folder.iterdir()) if self.folder.exists() else []
        alive = query.under_way() if entries else set()
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

    def changes(self, found: Found, spec: JobSpec) -> Lines:
        """What `scontrol update` has changed in the waiting or running job."""
        job_id = str(found.record["job_id"])
        shown = ask("scontrol", "show", "job", "-o", job_id).stdout
        wanted = {
            "JobName": found.record["array_name"],
            "Partition": slurm(spec).partition,
            "Account": slurm(spec).account,
        }
        lines: Lines = []
        for key, value in wanted.items():
            match = re.search(rf"(?:^|\s){key}=(\S*)", shown)
            if value is not None and match is not None and match[1] != value:
                lines.append(f"{key}: {value} → {match[1]}")
        return lines

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


BACKEND = SlurmBackend
