"""The SLURM backend: submitit writes and sends the script, SLURM itself says how it goes.

Also for a driver of one's own on submitit alone:

    executor.submit(training_task(spec))        # results(): summary.json of rank 0
"""

from __future__ import annotations

import contextlib
import datetime
import re
import time
from collections.abc import Iterator
from pathlib import PurePath, PurePosixPath
from typing import Any, ClassVar

from lockstep.jobs import command as commands
from lockstep.jobs import records
from lockstep.jobs.backend import Found, Lines, Mode, Sent, Specs, check_name
from lockstep.jobs.cluster import Checks, Cluster, Manifests
from lockstep.jobs.foreground import Streams
from lockstep.jobs.lint import Rules
from lockstep.jobs.slurm import checks, facts, logs, observe, query, render, rules
from lockstep.jobs.slurm.exec import execute
from lockstep.jobs.slurm.folder import ENDED, JOB, SUBMITIT, Folder, Notes, as_ending, as_record, cancelled, text
from lockstep.jobs.slurm.section import slurm, without_host
from lockstep.jobs.slurm.send import adopt, send
from lockstep.jobs.slurm.task import TrainingTask
from lockstep.jobs.slurm.transport import opening
from lockstep.jobs.slurm.transport.base import Place, Transport, parsed, writing
from lockstep.jobs.slurm.transport.local import LOCAL
from lockstep.jobs.spec.model import JobSpec
from lockstep.jobs.status import Listed, Part, Status, Submitted, Unreachable
from lockstep.jobs.terminal import warn
from lockstep.training import contract
from lockstep.training.contract import UserError


def training_task(spec: JobSpec, prepared: bool = False, job: str = "", transport: Transport = LOCAL) -> TrainingTask:
    """The payload for one task of the job; plain values, importable on the nodes.

    Args:
        prepared: another job writes the shards before this one starts.
        job: identity of this submission.
        transport: where the job's paths are.
    """
    if spec.shard_folder is not None and not prepared and not transport.exists(spec.shard_folder):
        spec = spec.model_copy(update={"shards": None})  # not prepared: the data is made on the spot
    place = transport.place()
    run_dir = render.run_directory(spec, place)
    return TrainingTask(
        words=commands.rank(spec, run_dir, str(place.here)), run_dir=run_dir, ranks_per_node=spec.ranks,
        max_restarts=spec.max_restarts, metrics_port=spec.metrics_port,
        env=dict(spec.env) if spec.command is None else {**spec.env, contract.ENV_SESSION: commands.session_options(spec, run_dir)},
        job=job, code=commands.identity(spec) if spec.code is not None else "", code_folder=render.code_folder(spec, place),
    )  # fmt: skip


class SlurmBackend(Cluster):
    """See `Backend`.

    Args:
        folder: where the jobs are kept; the nodes must see it.
        interval: seconds between two questions to the controller.
        lost_after: seconds without an answer from the controller after which a job counts as lost.
    """

    name = "slurm"
    places: ClassVar = {"host": "slurm.host"}
    carries_code = True
    secrets_from = "set it in the environment, SLURM takes it along"

    def __init__(
        self, folder: PurePath | None = None, interval: float = 2.0, lost_after: float = 300.0,
        transport: Transport = LOCAL,
    ) -> None:  # fmt: skip
        self.transport, self.interval, self.lost_after = transport, interval, lost_after
        self.folder = transport.place().jobs if folder is None else transport.place().here / folder

    @classmethod
    def connect(cls, **place: str | None) -> SlurmBackend:
        return cls(transport=opening.opened(place.get("host")))

    @classmethod
    def manifests(cls, spec: JobSpec) -> Manifests:
        """No host is asked: what only one of its folders says is not known."""
        place = opening.STAND_IN if opening.chosen(slurm(spec).host) is not None else None
        return render.manifests(without_host(spec), _submitit(spec, place or LOCAL.place()), place)

    @classmethod
    def render(cls, spec: JobSpec, runs: Specs) -> tuple[str, object]:
        """The batch script, and the same with its payload as plain values. Asks `slurm.host` for its folders."""
        place = opening.opened(slurm(spec).host).place()
        spec, folder = without_host(spec), _submitit(spec, place)
        text = render.script(spec, folder, elements=len(runs), place=place)
        return text, {"script": text, "parameters": render.parameters(spec, folder, place=place)}

    @classmethod
    def rules(cls) -> Rules[rules.Subject]:
        return rules.RULES

    @classmethod
    def preparation(cls, spec: JobSpec) -> tuple[str, object]:
        place = opening.opened(slurm(spec).host).place()
        own = without_host(render.preparation(spec, place))
        script = render.script(own, _submitit(own, place), place=place)
        return script, {"script": script}

    @classmethod
    def doctor(cls, spec: JobSpec | None, **place: str | None) -> Checks:
        return checks.check(spec, place.get("host"))

    def with_code(self, specs: Specs) -> Specs:
        return super().with_code([without_host(spec) for spec in specs])

    def drift(self, spec: JobSpec) -> Lines:
        return super().drift(without_host(spec))

    def exclusive(self) -> contextlib.AbstractContextManager[None]:
        return self.transport.locked(self.folder, 60)

    def refuse(self, spec: JobSpec) -> None:
        known, folder = facts.look(spec, self.transport), self.folder / spec.name / SUBMITIT
        self.refuse_findings(
            spec, self.rules().apply(spec, render.manifests(spec, folder, self.transport.place(), known))
        )

    def create(self, spec: JobSpec, old: Found | None) -> Submitted:  # noqa: ARG002 - its folder goes when SLURM has the new one
        return self._send(spec, [spec])[0]

    def prepare(self, spec: JobSpec) -> Submitted:
        """Submits the job that writes the shards; jobs submitted while it is under way wait for it. Raises `UserError`."""
        own = render.preparation(spec, self.transport.place())
        if self.transport.exists(str(spec.shard_folder)):
            return Submitted(own.name, False, f"the shards are in {spec.shard_folder}")
        return self.submit(own, "replace")

    def _preparation(self, spec: JobSpec) -> str | None:
        """The id of a job under way that prepares this one's shards."""
        if spec.recipe is None or spec.shards is None:
            return None
        own = render.preparation(spec, self.transport.place())
        kept = self._kept(own.name)
        if kept.record() is None or kept.ended() is not None:
            return None
        found = self.require(own.name)
        return None if self.standing(found).final else str(found.record["job_id"])

    def sweep(self, name: str, specs: Specs, mode: Mode = "attach") -> Sent:
        """Submits the runs of a sweep as one job array. All of them must be new, or all the same as before."""
        specs = self.with_code(specs)
        whole = specs[0].model_copy(update={"name": name})
        self.refuse(whole)
        with self.exclusive():
            if self._kept(name).record() is not None:
                raise UserError(f"{name} is already the name of a job: choose another --name for the sweep")
            placed = [self.place(spec, mode) for spec in specs]
            new = [item[0] for item in placed if not isinstance(item, Submitted)]
            there = [item for item in placed if isinstance(item, Submitted)]
            if new and there:
                raise UserError(
                    f"{there[0].name} of this sweep is running already: wait for it, or choose another --name"
                )
            if not new:
                return there
            self.check_secrets(whole)
            return self._send(whole, new)

    def place(self, spec: JobSpec, mode: Mode) -> tuple[JobSpec, Found | None] | Submitted:
        folder = self.folder / spec.name
        if self.transport.exists(folder) and self._kept(spec.name).record() is None:
            raise UserError(f"{folder} does not belong to a job (a sweep, or other files): choose another --name")
        return super().place(spec, mode)

    def find(self, name: str) -> Found | None:
        check_name(name)
        record = self._kept(name).record()
        if record is None:
            return None
        self.transport.check(self.folder / name)
        if record["job_id"] is None:
            # The command that submitted was killed before it had the answer; the job may be there.
            known = query.mine(self.transport, record["array_name"], record["comment"])
            if known is not None:
                adopt(record, known, self.transport)
                record["job_id"] = known if record["element"] is None else f"{known}_{record['element']}"
                self._kept(name).write(record)
        return Found(name, record["hash"], record["spec"], record)

    def no_such(self, name: str) -> UserError:
        return UserError(f"there is no SLURM job {name}: see `lockstep list slurm`")

    def taken(self) -> set[str]:
        return set(self.transport.names(self.folder))

    def where(self, found: Found) -> str:
        return self._where(found.record)

    def standing(self, found: Found) -> Status:
        record = found.record
        if record["job_id"] is not None:
            return self.observe(found)
        # The script that submits goes on where its command is killed, and is seen by its folder.
        stage = re.compile(rf"\.{re.escape(record['array_name'])}\.[A-Za-z0-9]{{6}}")
        if observe.is_new(record) and any(map(stage.fullmatch, self.transport.names(self.folder))):
            raise Unreachable(f"{found.name} is being submitted at this moment: try again in a minute")
        return observe.BROKEN_OFF

    def gone_on(self, found: Found, spec: JobSpec) -> Found:
        if found.record["run_dir"] != render.run_directory(spec, self.transport.place()):
            raise UserError(
                f"{spec.name} has run in {found.record['run_dir']}: submit it from the folder it was submitted from, to "
                "resume it, or with --replace to start over here"
            )
        return found

    def _send(self, whole: JobSpec, specs: Specs) -> Sent:
        """One sbatch for all of them: a job, or an array."""
        place = self.transport.place()
        if whole.code is not None:
            self.transport.unpack(commands.identity(whole))
        written: dict[str, dict[str, Any]] = {}
        comment = f"lockstep:{records.identity(whole.name)}"  # of this submission: another one may be of the same spec
        for element, spec in enumerate(specs):
            written[spec.name] = {
                "spec": spec.record(), "hash": spec.hash(), "run_dir": render.run_directory(spec, place),
                "submitit": str(self.folder / whole.name / SUBMITIT), "job_id": None,
                "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                "since": time.time(), "comment": comment, "array_name": whole.name,
                "element": element if len(specs) > 1 else None, "job": records.identity(spec.name),
            }  # fmt: skip
        with writing(self.folder):  # a container mounts the folders above the runs
            self.transport.make_parents(*dict.fromkeys(str(record["run_dir"]) for record in written.values()))
        after = self._preparation(whole)
        tasks = [
            training_task(spec, after is not None, str(written[spec.name]["job"]), self.transport) for spec in specs
        ]
        ids = send(whole, place, self.folder, written, comment, tasks, after, self.transport)
        return [
            Submitted(name, True, self._where({**record, "job_id": job_id}))
            for (name, record), job_id in zip(written.items(), ids)
        ]

    def _kept(self, name: str) -> Folder:
        return Folder(self.folder / name, self.transport)

    def job_id(self, name: str) -> str:
        """SLURM's id of the job. Raises `UserError`."""
        return str(self.require(name).record["job_id"])

    def observe(self, found: Found) -> Status:
        record = found.record
        spec = JobSpec.recorded(found.name, found.plain)
        if record["job_id"] is None:
            return observe.BEING_SUBMITTED if observe.is_new(record) else observe.BROKEN_OFF
        forgotten: Unreachable | None = None
        try:
            known = query.look(self.transport, str(record["job_id"]))
        except query.Forgotten as error:  # what it has left may say how it ended
            known, forgotten = None, error
        notes = Notes(record, self.folder / found.name, self.transport)
        before, kept = notes.ended, self._kept(found.name)
        parts = [Part(**part) for part in before["ranks"]] if before is not None else []
        noted = max((part.restarts for part in parts), default=0)
        if known is None:
            stands = True
        else:  # by then every note of it is visible, also on a file system that is slow to show them
            settled = time.time() - (known.ended or record["since"]) >= observe.SETTLE_SECONDS
            stands = settled and query.final(known.state) and known.restarts <= noted
        if before is not None and stands:
            return Status(before["state"], before["reason"], parts, before["exit_code"])
        now, since = time.time(), record["since"]
        told = observe.explain(spec, known, notes.ends, notes.said, notes.cancelled, since, now, notes.saved)
        if forgotten is not None and told.state == "lost":
            raise forgotten
        plain = {key: value for key, value in told.plain().items() if key != "final"}
        with contextlib.suppress(OSError, Unreachable):
            if before is not None and not told.final:
                self.transport.remove(kept.path / ENDED)  # somebody had SLURM run it again
            elif told.final and before != plain:
                # A job that has ended stays as it ended. SLURM forgets, without accounting in minutes.
                self.transport.write(kept.path / ENDED, text(plain))
        return told

    def stop(self, found: Found) -> Status:
        name = found.name
        if found.record["job_id"] is None:
            with self.exclusive():  # a submission that is under way has its number then
                found = self.require(name)
                status = self.standing(found)
            if status.final:
                return status
        record = found.record
        job_id = str(record["job_id"])
        try:
            self.transport.touch(cancelled(record))  # from here on no rank asks for a requeue
        except OSError as error:
            warn(
                f"cannot note that {name} is cancelled ({error.strerror}): a rank that saves may still ask for a requeue"
            )
        grace = JobSpec.recorded(name, found.plain).grace_seconds + render.MARGIN_SECONDS
        deadline = time.monotonic() + grace
        signalled = False
        while not (status := self.status(name)).final and time.monotonic() < deadline:
            # Without a step nobody would hear the signal.
            if (
                status.state == "running"
                and not signalled
                and f"{job_id}.0" in query.answer(self.transport, "squeue", "-hs", "-j", job_id)
            ):
                signalled = query.order(self.transport, "scancel", "--signal=TERM", job_id)
            elif status.state != "running":
                query.order(self.transport, "scancel", "--state=PENDING", job_id)
            time.sleep(min(self.interval, 0.5))
        if not status.final:
            query.order(self.transport, "scancel", job_id)
        return self.wait(name, 120)

    def stream(self, found: Found, spec: JobSpec | None, rank: int | None, follow: bool) -> Iterator[str]:
        return self._lines(found, spec, rank, follow)

    def tail(self, found: Found, spec: JobSpec | None, rank: int | None, follow: bool, count: int) -> Iterator[str]:
        return self._lines(found, spec, rank, follow, count)

    def _lines(
        self, found: Found, spec: JobSpec | None, rank: int | None, follow: bool, last: int | None = None
    ) -> Iterator[str]:
        ranks = [rank] if rank is not None else list(range(self.world(found, spec)))
        interval = min(self.interval, 1.0)
        return logs.lines(
            self.transport, found.record, ranks, rank is None, lambda: not follow or self.status(found.name).final,
            interval, self.lost_after if follow else 0, last,
        )  # fmt: skip

    def exec(self, found: Found, spec: JobSpec | None, rank: int, command: Lines, streams: Streams) -> int:
        spec = spec or JobSpec.recorded(found.name, found.plain)
        return execute(self.transport, found.record, spec, rank, command, streams)

    def summary(self, name: str) -> dict[str, Any]:
        found = self.require(name)
        path = PurePosixPath(found.record["run_dir"]) / contract.SUMMARY_FILE
        value = self.transport.json(path)
        if not isinstance(value, dict):
            raise UserError(f"{path} is not there yet: {name} is {self.observe(found).state}")
        return value

    def list(self) -> list[Listed]:
        rows = []
        found = self.transport.files((self.folder, f"*/{JOB}"), (self.folder, f"*/{ENDED}"))
        entries = sorted(path.parent for path in found if path.name == JOB and not path.parent.name.startswith("."))
        alive = query.under_way(self.transport) if entries else set()
        for entry in entries:
            record = as_record(parsed(found[entry / JOB]))
            if record is None:
                warn(f"{entry / JOB} is damaged, or of another version: remove its folder")
                continue
            before = as_ending(parsed(found.get(entry / ENDED)))
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
        job_id = found.record["job_id"]
        if job_id is None:
            return []
        shown = query.answer(self.transport, "scontrol", "show", "job", "-o", job_id)
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


def _submitit(spec: JobSpec, place: Place) -> PurePath:
    return place.jobs / spec.name / SUBMITIT


BACKEND = SlurmBackend
