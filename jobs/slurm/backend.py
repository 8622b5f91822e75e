"""The SLURM backend: submitit writes the script, sbatch submits it, and SLURM itself reports the state.

With `slurm.host` the command line runs its command on the login node (`ssh`), and this machine queries nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import ClassVar

from lockstep.training import contract, files
from lockstep.training.contract import UserError
from lockstep.wire import submitit_api

from .. import process, records, snapshots
from ..backend import Cluster, JobRecord, Submission
from ..logs import follow as follow_logs
from ..manifest import Manifest
from ..process import Streams, exec_command
from ..records import SlurmJob
from ..spec.model import JobSpec, code_identity, preparation, preparation_name, prepares
from ..status import Check, JobSummary, Status, SubmitResult, Unreachable, warn
from . import doctor, observe, render, submission
from .observe import Evidence, Query
from .render import RULES

NOISE = re.compile(rb"submitit [A-Z]+ \([0-9]{4}-")
"""Beginning of submitit's own lines."""


class SlurmBackend(Cluster):
    """A backend on a machine of a SLURM cluster. See `Backend`.

    Args:
        interval: seconds between two queries of the controller.
        lost_after: seconds without an answer from the controller after which a wait ends.
    """

    name = "slurm"
    places: ClassVar = {"host": "slurm.host"}
    arrays = True
    rules = RULES

    def __init__(self, interval: float = 2.0, lost_after: float = 300.0) -> None:
        self.interval, self.lost_after = interval, lost_after
        self.folder = records.folder(self.name)
        # Of the cluster: every submission there, from any machine, waits for it.
        self.lock = partial(records.locked, self.folder, 60)

    @classmethod
    def login(cls, host: str | None) -> str | None:
        """Returns the login node that runs the command; None if this machine belongs to the cluster. The machine of a command that came
        over ssh does."""
        return None if render.FOLDER_VARIABLE in os.environ else host or os.environ.get(render.HOST_VARIABLE) or None

    @classmethod
    def connect(cls, **place: str | None) -> SlurmBackend:
        if (host := cls.login(place.get("host"))) is not None:
            raise UserError(f"slurm.host {host} is for the commands of lockstep: from Python, submit on that machine")
        return cls()

    @classmethod
    def manifests(cls, spec: JobSpec) -> list[Manifest]:
        return render.manifests(spec, render.submitit_folder(spec.name))

    @classmethod
    def render(cls, spec: JobSpec, runs: list[JobSpec]) -> str:
        """Returns the batch script."""
        (sent,) = render.manifests(spec, render.submitit_folder(spec.name), elements=len(runs))
        return str(sent["script"])

    @classmethod
    def preparation(cls, spec: JobSpec) -> JobSpec:
        return preparation(spec, render.interpreter(spec))

    @classmethod
    def doctor(cls, spec: JobSpec | None, **place: str | None) -> list[Check]:  # noqa: ARG003 - this machine is one of it
        """Returns the checks of the controller and of preemption, and for a job sbatch's own answer."""
        cluster = doctor.cluster()
        if cluster.result == "missing":
            return [cluster]
        checks = [cluster, doctor.preemption()]
        if spec is not None:
            try:
                checks.append(submission.preflight(spec.name, cls.manifests(spec)[0]["script"]))
            except Unreachable as error:
                checks.append(Check("start", "cannot tell", str(error)))
            except UserError as error:
                checks.append(Check("start", "missing", str(error)))
        return checks

    def prepared(self, spec: JobSpec, runs: Sequence[JobSpec] = ()) -> Submission:
        folder, after = render.submitit_folder(spec.name), self._preparation(spec)
        manifests = render.manifests(spec, folder, after, max(1, len(runs)))
        return Submission(spec, runs, manifests, RULES.apply(spec, manifests))

    def preflight(self, job: Submission) -> list[Check]:
        """Returns the check of preemption, and sbatch's own answer."""
        return [doctor.preemption(), submission.preflight(job.spec.name, job.manifests[0]["script"])]

    def create(self, job: Submission, old: JobRecord | None) -> SubmitResult:
        """Runs sbatch once, for a job or an array. The folder of `old` is removed when SLURM has the new job."""
        whole, runs, (sent,) = job.spec, job.runs or [job.spec], job.manifests
        if old is not None and old.spec.same_job(whole, self.name) and old.run_dir != sent["run_dir"]:
            raise UserError(
                f"{whole.name} has run in {old.run_dir}: submit it from the folder it was submitted from to resume it, or "
                "choose another --name to start over here"
            )
        if whole.code is not None:
            snapshots.unpacked(code_identity(whole))
        # The comment names this submission: another submission may have the same spec.
        comment = f"lockstep:{records.submission_id(whole.name)}"
        submissions = []
        for element, spec in enumerate(runs):
            record = SlurmJob(
                spec=records.RecordedSpec(**spec.record()), hash=spec.hash(), run_dir=render.run_directory(spec),
                submitit=str(render.submitit_folder(whole.name)), job_id=None,
                created=records.now(), since=time.time(),
                comment=comment, array_name=whole.name, element=element if len(runs) > 1 else None,
                job=records.submission_id(spec.name),
            )  # fmt: skip
            records.make_parents(Path(record.run_dir))  # a container mounts the folders above the runs
            task = render.training_task(spec, sent["after"] is not None, record.job)
            submissions.append((spec.name, record, submitit_api.payload(task, render.minutes(whole))))
        (_, first), *_ = submission.send(self.folder, sent["script"], submissions).items()
        return SubmitResult(whole.name, True, _where(first))

    def has_shards(self, spec: JobSpec) -> bool | None:
        return None if spec.shards_in_a_bucket else not spec.shards_missing_here

    def _preparation(self, spec: JobSpec) -> str | None:
        """Returns the id of a job under way that prepares this job's shards; None if there is none."""
        if spec.recipe is None or spec.shards is None:
            return None
        name = preparation_name(spec.name)
        if observe.ended(self.folder / name) is not None:
            return None
        known = self.find(name, submitting=True)
        if known is None or not prepares(known.plain.get("command")) or self.observe(known).final:
            return None
        return str(known.handle.job_id)

    def find(self, name: str, submitting: bool = False) -> JobRecord | None:
        record = records.job_record(self.folder, name, SlurmJob)
        if record is None:
            if submitting and (self.folder / name).exists():
                raise UserError(
                    f"{self.folder / name} does not belong to a job (a sweep, or other files): choose another --name"
                )
            return None
        if record.job_id is None:
            # The command that submitted was killed before it had the answer; the job may exist.
            number = observe.find_by_comment(record.array_name, record.comment)
            if number is not None:
                with records.keeping(self.folder):
                    submission.assign_job_id(Path(record.submitit), number)
                    record = record.numbered(number)
                    record.write(self.folder / name / records.JOB)
            elif submitting:
                if files.is_locked(self.folder / record.array_name / submission.SENDING):
                    raise Unreachable(f"{name} is being submitted at this moment: try again in a minute")
                # The caller holds the lock, so no other process is about to submit it.
                record = record.model_copy(update={"since": 0.0})
        return _known(name, record)

    def observe(self, known: JobRecord) -> Status:
        return self._observed(known, lambda job_id: observe.query(job_id)(job_id))

    def _observed(self, known: JobRecord, query: Query) -> Status:
        record, folder = known.handle, self.folder / known.name
        if record.job_id is None:
            return self._unnumbered(record)
        info, unanswered = observe.UNKNOWN, None
        try:
            info = query(record.job_id) or info
        except Unreachable as error:  # the job's files may say how the job ended
            unanswered = error
        outage = unanswered is not None and not isinstance(unanswered, observe.Forgotten)
        before = observe.ended(folder)
        if before is not None and observe.confirms(before, record, info):
            return before
        status = observe.status_from_slurm(Evidence(record, info, outage))
        if unanswered is not None and outage and not status.final:
            raise Unreachable(str(unanswered), status)
        if unanswered is not None and status.state == "lost":
            raise unanswered
        # SLURM forgets how a job has ended: without accounting in minutes. A user may have SLURM run the job again.
        with contextlib.suppress(OSError):
            if before is not None and not status.final:
                (folder / observe.ENDED).unlink()
            elif status.final and before != status:
                files.replace_json(folder / observe.ENDED, asdict(status))
        return status

    def _unnumbered(self, record: SlurmJob) -> Status:
        """Returns the status of a job without the number that sbatch answers, and that SLURM does not know by its comment."""
        is_new = time.time() - record.since < observe.SETTLE_SECONDS
        if is_new or files.is_locked(self.folder / record.array_name / submission.SENDING):
            return Status("pending", "is being submitted")
        return Status("lost", "the submission was interrupted before sbatch answered: submit it with --replace")

    def stop(self, known: JobRecord) -> Status:
        name = known.name
        if known.handle.job_id is None:
            with self.lock():  # after the lock, a submission under way has its number
                known = self.find(name, submitting=True) or self.require(name)
                status = self.observe(known)
            if status.final:
                return status
        record = known.handle
        job_id = str(record.job_id)
        try:
            record.file("cancelled").touch()  # from here on no rank asks for a requeue
        except OSError as error:
            warn(
                f"cannot note that {name} is cancelled ({error.strerror}): a rank that saves may still ask for a requeue"
            )
        grace = record.spec.grace_seconds + render.MARGIN_SECONDS
        deadline = time.monotonic() + grace
        signalled = False
        while not (status := self.status(name)).final and time.monotonic() < deadline:
            if status.state != "running":
                observe.run_ok("scancel", "--state=PENDING", job_id)
            # Without a step no process would get the signal.
            elif not signalled and f"{job_id}.0" in observe.output("squeue", "-hs", "-j", job_id):
                signalled = observe.run_ok("scancel", "--signal=TERM", job_id)
            time.sleep(min(self.interval, 0.5))
        if not status.final:
            observe.run_ok("scancel", job_id)
        return self.wait(name, 120)

    def stream(self, known: JobRecord, rank: int | None, follow: bool, last: int | None) -> Iterator[str]:
        record, spec = known.handle, known.handle.spec
        ranks = [rank] if rank is not None else range(known.world_size)
        tasks = range(spec.nodes) if spec.live else ranks
        logs = {task: record.file(f"{task}_log.out") for task in tasks}
        return follow_logs(
            logs, rank, spec.live, lambda: not follow or self.status(known.name).final, min(self.interval, 1.0), last, NOISE
        )  # fmt: skip

    def exec(self, known: JobRecord, rank: int, command: list[str], streams: Streams) -> int:
        """Runs the command as a step of the same job, on the rank's node, without further resources."""
        spec, record = JobSpec.recorded(known.name, known.plain), known.handle
        if spec.slurm.container is not None:
            raise UserError(
                f"{spec.name} runs in containers ({spec.slurm.container}), and SLURM lets no command into them"
            )
        job_id, hosts = observe.nodes(str(record.job_id))
        hosts = observe.by_rank(hosts, spec.live)
        python = render.interpreter(spec)
        if rank // spec.ranks >= len(hosts):
            raise UserError(f"{spec.name} has {len(hosts)} nodes, too few for rank {rank}")
        # Without a status srun forwards the first Ctrl-C to the command.
        step = ["srun", f"--jobid={job_id}", "--overlap", "--quiet", "--disable-status", "--nodes=1", "--ntasks=1"]
        step += [f"--nodelist={hosts[rank // spec.ranks]}", "--job-name=lockstep-exec"]
        # The job's mark in the environment says whose ranks to look for.
        inside = ["env", "-u", contract.ENV_LAUNCHER, f"{contract.ENV_JOB}={record.job}"]
        own = exec_command(python, rank, command, record.run_dir)

        terminal = ["--pty"] if streams.terminal else []
        env = {name: value for name, value in os.environ.items() if name != render.FOLDER_VARIABLE}
        code = process.run([*step, *terminal, *inside, *own], streams, env)
        if code:
            self.observe(known)  # raises `Unreachable`: then the code is not the command's
        return code

    def list(self) -> list[JobSummary]:
        jobs = [_known(*job) for job in records.job_records(self.folder, SlurmJob)]
        if not jobs:
            return []
        not_ended = [job.handle.job_id for job in jobs if observe.ended(self.folder / job.name) is None]
        query = observe.query(*[job_id for job_id in not_ended if job_id], all_of_user=True)

        def observe_one(job: JobRecord) -> Status:  # SLURM may know a job without a number by its comment
            return self._observed(job if job.handle.job_id is not None else self.require(job.name), query)

        return [*self._summaries(jobs, observe_one)]


def _known(name: str, record: SlurmJob) -> JobRecord:
    spec = record.spec.model_dump(exclude_unset=True)
    return JobRecord(name, record.hash, spec, record, _where(record), record.spec.nodes, record.run_dir, record.created)


def _where(record: SlurmJob) -> str:
    return f"SLURM job {record.job_id}, logs in {record.submitit}"


BACKEND = SlurmBackend
