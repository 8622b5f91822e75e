"""The Kubernetes backend: a PyTorchJob or TrainJob, the objects that it owns, and their status in the cluster.

The backend creates the job first, suspended, then the objects that it owns; one patch then lets the job run. So no pod runs without its
NetworkPolicy and its code. No object lacks an owner: the cluster removes it with its job. Object names contain a word of the submission,
so objects of an earlier job of the name never collide. A submission that was cut off leaves a job with a mark (`INCOMPLETE`): the next
`submit` finishes the job, `cancel` removes it.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from lockstep.training import files
from lockstep.training.contract import UserError

from .. import records, snapshots
from ..backend import Cluster, JobRecord, Submission
from ..lint import errors
from ..logs import PREFIX
from ..manifest import HASH, JOB, MANAGED, Manifest, get, merge, spec_in
from ..process import Streams, exec_command
from ..spec.model import JobSpec, code_identity
from ..status import Check, JobSummary, Status, SubmitResult, Unreachable, note
from . import render
from .observe import (
    INCOMPLETE,
    ApiError,
    Failing,
    hosts,
    maker,
    newest,
    outdated,
    owned_by,
    seen_at,
    state_of,
    status_from_pods,
    stuck_reason,
)  # fmt: skip
from .render import CONTAINERS, KINDS, KUEUE, KUEUE_QUEUE, RULES, SUBMISSION

if TYPE_CHECKING:
    from .api import Api
    from .logs import Reader

DELETION_MARGIN = 90.0
"""Seconds after the pods' grace period within which a deleted job must be gone."""
MAX_PODS_ASKED = 3
"""Largest number of pods whose own events are queried. They say why a pod waits or is gone."""
STATUS_LINES = 1000
"""Number of the first pod's last lines in which the progress is searched. A run prints its progress once a minute."""
MANAGED_SELECTOR = ",".join(f"{key}={value}" for key, value in MANAGED.items())


class KubernetesBackend(Cluster):
    """A backend for PyTorchJobs and TrainJobs. See `Backend`.

    Args:
        interval: seconds between two queries.
        context: context of the kubeconfig, for kubectl; None: the current one.
        lost_after: seconds after which a job that is gone or on unknown nodes counts as lost, and after which a wait without answers ends.
    """

    name = "k8s"
    places: ClassVar = {"namespace": "k8s.namespace", "context": "k8s.context"}
    secrets_from = None
    rules = RULES
    survived = (UserError,)  # rights may be restored, too

    def __init__(
        self, api: Api, namespace: str, interval: float = 2.0, lost_after: float = 300.0, context: str | None = None
    ) -> None:
        self.api, self.namespace, self.interval, self.lost_after = api, namespace, interval, lost_after
        self.context, self.path = context, partial(render.path_of, namespace)
        self._policies = f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"
        self.scope = f" in namespace {namespace}"

    @classmethod
    def connect(cls, **place: str | None) -> KubernetesBackend:
        """Returns the backend from the kubeconfig (or the service account, inside a cluster). Raises `UserError`."""
        # The client takes longer to import than to render.
        from .api import Api, load_configuration

        context = place.get("context")
        load, default = load_configuration(context)
        return cls(Api(load), place.get("namespace") or default, context=context)

    @classmethod
    def manifests(cls, spec: JobSpec) -> list[Manifest]:
        return render.manifests(spec)

    @classmethod
    def render(cls, spec: JobSpec, runs: Sequence[JobSpec]) -> str:
        if spec.k8s.kind == "auto":
            kind = render.of_kind(spec).k8s.kind
            note(f"k8s.kind auto: rendered as {kind}, submit takes the kind that the cluster has")
        return super().render(spec, [*runs])

    @classmethod
    def doctor(cls, spec: JobSpec | None, **place: str | None) -> list[Check]:
        from .doctor import Doctor

        try:
            connected = cls.at(spec, **place)
            rows = Doctor(connected.api, connected.namespace, None).cluster()
            if spec is not None:
                with contextlib.suppress(UserError):  # the rows of the cluster report the error
                    spec = connected._with_kind(spec)
            return rows + Doctor(connected.api, connected.namespace, spec).rows()
        except UserError as error:
            return [Check("cluster", "missing", str(error))]

    def prepared(self, spec: JobSpec, runs: Sequence[JobSpec] = (), kind: str | None = None) -> Submission:
        own = self._with_kind(spec, kind)
        manifests = render.manifests(own, uuid.uuid4().hex[:8])
        return Submission(own, runs, manifests, RULES.apply(own, manifests))

    def prepared_all(self, specs: Sequence[JobSpec]) -> Sequence[Submission]:
        """Returns the submissions. New runs have the kind of the last run, whose name is the longest."""
        *others, last = specs
        decided = self.prepared(last)
        return [*(self.prepared(spec, kind=decided.spec.k8s.kind) for spec in others), decided]

    def drift(self, spec: JobSpec) -> list[str]:
        known = self.require(spec.name)
        return known.differences(render.of_kind(snapshots.resolve(spec)[0], known.handle["kind"]))

    def _with_kind(self, spec: JobSpec, new: str | None = None) -> JobSpec:
        """Resolves `k8s.kind: auto`: the kind of the job with this name, or else a kind that the cluster serves. Raises `UserError`.

        Args:
            new: kind of a new job if the cluster serves both; None: TrainJob if it can express the whole job.
        """
        if spec.k8s.kind != "auto":
            return spec
        jobs = dict(self.api.jobs(self.namespace, fieldSelector=f"metadata.name={spec.name}"))
        kinds = [kind for kind, same_name in jobs.items() if same_name] or [*jobs]
        if not kinds:
            raise UserError(f"the cluster has neither {' nor '.join(KINDS)}: see `lockstep doctor k8s`")
        if len(kinds) > 1:
            kinds = [new or ("TrainJob" if self._fits_a_trainjob(spec) else "PyTorchJob")]
        return render.of_kind(spec, kinds[0])

    def _fits_a_trainjob(self, spec: JobSpec) -> bool:
        """Returns whether the cluster's TrainJob can express the whole job: by the rules that a PyTorchJob keeps, and by the server's
        dry run."""
        broken, job = {}, {}
        for kind in KINDS:
            own = render.of_kind(spec, kind).model_copy(update={"code": None})
            policy, job[kind] = render.manifests(own)
            broken[kind] = errors(RULES.apply(own, [policy, job[kind]]))
        common = {item.id for item in broken["PyTorchJob"]}
        why = next((item.message for item in broken["TrainJob"] if item.id not in common), "")
        try:
            if not why:
                # A missing namespace and an existing job are no objection to the kind.
                self.api.create(self.path("TrainJob"), job["TrainJob"], missing=(404, 409), dryRun="All")
        except (ApiError, Failing) as error:
            message = error.message if isinstance(error, ApiError) else str(error)
            why = f"it refuses the job ({message}){'; Trainer 2.3 or later takes it' if outdated(message) else ''}"
        if why:
            note(f"k8s.kind auto: PyTorchJob, although the cluster also has TrainJob: {why}")
        return not why

    def find(self, name: str, submitting: bool = False) -> JobRecord | None:
        served = self.api.jobs(self.namespace, fieldSelector=f"metadata.name={name}")
        job = next((job for _, jobs in served for job in jobs), None)
        if job is None:
            return None
        plain, labels = spec_in(get(job, "metadata", "annotations")), get(job, "metadata", "labels")
        known = JobRecord(name, get(labels, HASH), plain, job, self._where(job), len(hosts(job)))
        if not submitting or not get(job, "metadata", "deletionTimestamp"):
            return known
        raise Unreachable(f"{name} is being deleted: submit it again when it is gone")

    def preflight(self, job: Submission) -> list[Check]:
        """Runs the server's dry run, and returns the rows of `doctor`."""
        from .doctor import Doctor

        policy, rendered = job.manifests
        for path, item in ((self._policies, policy), (self.path(rendered["kind"]), rendered)):
            self.api.create(path, item, missing=(409,), dryRun="All")  # 409: the job exists, and would be replaced
        return Doctor(self.api, self.namespace, job.spec).rows()

    def create(self, job: Submission, old: JobRecord | None) -> SubmitResult:
        """Creates the job and its objects. If another command sends the same spec at the same time, its job counts as the result."""
        spec, (policy, rendered) = job.spec, job.manifests
        submission = policy["metadata"]["name"].removeprefix(f"{spec.name}-")
        marks = {"annotations": {SUBMISSION: submission, INCOMPLETE: "true"}, "labels": {KUEUE_QUEUE: None}}
        if old is not None:
            self._delete(old)
        waiting = merge(rendered, {"metadata": marks, "spec": _suspend_patch(rendered, True)})
        try:
            live: Manifest | None = self.api.create(self.path(rendered["kind"]), waiting)
        except ApiError as error:
            if error.status not in (403, 409):  # a quota also refuses an object that exists
                raise
            known = self.find(spec.name)  # another process was faster, or the answer to our request was lost
            live = known.handle if known is not None else None
            if live is None and error.status == 403:
                raise
        if live is None or get(live, "metadata", "deletionTimestamp"):
            raise UserError(f"{spec.name} is being deleted by someone else: submit it again when it is gone")
        if get(live, "metadata", "labels", HASH) != spec.hash():
            raise UserError(f"{spec.name} was submitted by someone else just now, with another spec")
        made = get(live, "metadata", "annotations", SUBMISSION) == submission
        try:
            self._complete(spec, live, job.manifests if made else None)
        except UserError as error:
            if made and not isinstance(error, Unreachable):  # else the next submission finishes the job
                with contextlib.suppress(UserError):
                    self.api.delete(self.path(rendered["kind"], spec.name), _deletion(live))
            raise
        return SubmitResult(spec.name, made, self._where(live))

    def attach(self, job: Submission, known: JobRecord) -> SubmitResult:
        self._complete(known.spec, known.handle)
        return super().attach(job, known)

    def _complete(self, spec: JobSpec, live: Manifest, rendered: list[Manifest] | None = None) -> None:
        """Creates the objects of a job that waits for them, and lets the job run.

        Args:
            rendered: manifests of the submission that made the job; None: rendered again.

        Raises:
            UserError: the code is no longer stored here, or the server refuses an object.
        """
        if get(live, "metadata", "annotations", INCOMPLETE) is None:
            return
        submission = str(get(live, "metadata", "annotations", SUBMISSION))
        policy, job = rendered or render.manifests(spec, submission)
        # Without `blockOwnerDeletion`, which needs additional rights.
        name, uid = (get(live, "metadata", key) for key in ("name", "uid"))
        owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": name, "uid": uid}
        pieces = [(self._policies, policy)]
        if spec.code is not None:
            packed, maps = snapshots.packed(code_identity(spec)), f"/api/v1/namespaces/{self.namespace}/configmaps"
            if len(packed) != get(spec_in(get(live, "metadata", "annotations")), "code", "packed"):
                raise UserError(
                    f"the code of {spec.name} was packed on another machine: cancel the job and submit it again"
                )
            pieces += [(maps, item) for item in render.code_maps(spec, submission, packed)]
        for path, item in pieces:
            try:
                self.api.create(path, merge(item, {"metadata": {"ownerReferences": [owner]}}))
            except ApiError as error:  # the name belongs to this submission alone, so an earlier try made the object
                # A quota also refuses an object that exists. Content of ConfigMaps is never read.
                place, asks = f"{path}/{item['metadata']['name']}", error.status == 403 and item is policy
                if error.status != 409 and not (asks and self.api.find(place, missing=(403, 404)) is not None):
                    raise
        # With a queue (a patch may name it), Kueue lets the job run.
        queue = get(job, "metadata", "labels", KUEUE_QUEUE)
        done: Manifest = {"uid": uid, "annotations": {INCOMPLETE: None}}
        run: Manifest = {"metadata": {**done, "labels": {KUEUE_QUEUE: queue}}}
        if not queue:
            run = {"metadata": done, "spec": _suspend_patch(job, None)}
        self.api.patch(self.path(job["kind"], spec.name), run)

    def observe(self, known: JobRecord) -> Status:
        status = self._observe(known.handle, known.spec)
        return self._with_progress(known, status) if status.final else status

    def status(self, name: str) -> Status:
        """Returns the status with the run's progress. Reads the log for a running job, which takes longer than a query of its pods."""
        known = self.require(name)
        status = self.observe(known)
        return self._with_progress(known, status) if status.state == "running" else status

    def _with_progress(self, known: JobRecord, status: Status) -> Status:
        """Adds the progress that the run prints: its files are not visible outside."""
        with contextlib.suppress(UserError):  # the status without progress is enough
            reported = self._printed_status(known)
            if reported is not None:
                more = f", {records.progress(reported)}" if status.state == "running" else ""
                return replace(status, reason=f"{status.reason}{more}", **records.about_time(reported))
        return status

    def _printed_status(self, known: JobRecord) -> records.RunStatus | None:
        """Returns the newest status.json in the log of the first pod, whichever rank there printed it."""
        for line in reversed([*self._reader(known).lines(hosts(known.handle)[:1], None, False, STATUS_LINES)]):
            if '"event": "status"' in line:
                with contextlib.suppress(ValueError):
                    return records.RunStatus.parse(files.parsed(PREFIX.sub("", line, count=1).encode()))
        return None

    def _observe(self, job: Manifest, spec: JobSpec) -> Status:
        pods, names = self.pods(job), hosts(job)
        ranks, now, live = spec.ranks, self.api.now(), spec.live
        events = self._events(get(job, "metadata", "uid"), "uid") if state_of(job) != "succeeded" else []
        status = status_from_pods(job, pods, events, None, names, ranks, now, live=live)
        if status.final or status.state == "running":
            return status
        workload = self._workload(job) if get(job, "metadata", "labels", KUEUE_QUEUE) else None
        if len(pods) < len(names) and maker(job):
            events += self._events(maker(job), "name")
        pending = [get(pod, "metadata", "name") for pod in pods if get(pod, "status", "phase") == "Pending"]
        again = [part.name for part in status.ranks if part.restarts]
        missing = [name for name in names if len(pods) < len(names) <= MAX_PODS_ASKED and name not in again]
        for name in [*pending, *again, *missing][:MAX_PODS_ASKED]:  # also of a pod that is gone
            events += self._events(name, "name")
        return status_from_pods(job, pods, events, workload, names, ranks, now, live)

    def _events(self, about: Any, key: str) -> list[Manifest]:
        """Returns the events of an object by its uid, or of all objects that had this name; the latest last."""
        path = f"/api/v1/namespaces/{self.namespace}/events"
        return sorted(self.api.items(path, fieldSelector=f"involvedObject.{key}={about}"), key=seen_at)

    def _workload(self, job: Manifest) -> Manifest | None:
        """Returns the job's workload in Kueue's queue; None without Kueue."""
        from .api import Listing

        selector = f"kueue.x-k8s.io/job-uid={get(job, 'metadata', 'uid')}"
        for version in KUEUE:
            path = f"/apis/{version}/namespaces/{self.namespace}/workloads"
            listing = self.api.find(path, Listing, (403, 404), labelSelector=selector)
            if listing is not None:
                return next(iter(listing["items"] or []), None)
        return None

    def stream(self, known: JobRecord, rank: int | None, follow: bool, last: int | None) -> Iterator[str]:
        yield from self._reader(known).lines(_of_rank(known, rank), rank, follow, last)

    def _reader(self, known: JobRecord) -> Reader:
        from .logs import Reader

        return Reader(self, known)

    def exec(self, known: JobRecord, rank: int, command: list[str], streams: Streams) -> int:
        from .exec import in_pod

        (host,) = _of_rank(known, rank)
        pod = self.pod(known.handle, host)
        if pod is None:
            raise UserError(f"rank {rank} does not run: the pod {host} is gone")
        name, container = str(get(pod, "metadata", "name")), CONTAINERS[known.handle["kind"]]
        words = ["kubectl", "--namespace", self.namespace, *(["--context", self.context] if self.context else [])]
        words += ["exec", "--stdin", *(["--tty"] if streams.terminal else []), name, "--container", container, "--"]
        words += exec_command("python", rank, command, known.spec.run_directory)
        return in_pod(words, name, streams)

    def stop(self, known: JobRecord) -> Status:
        self._delete(known)
        return Status("cancelled", "cancelled; its pods had the grace period to save")

    def _delete(self, known: JobRecord) -> None:
        """Deletes the job and waits until the job with this uid and its pods are gone. Raises `UserError`, at once if only pods on dead
        nodes keep the job."""
        name, uid = known.name, get(known.handle, "metadata", "uid")
        self.api.delete(self.path(str(known.handle["kind"]), name), _deletion(known.handle))
        timeout = known.spec.grace_seconds + DELETION_MARGIN
        deadline = time.monotonic() + timeout
        while (left := self.find(name)) is not None and get(left.handle, "metadata", "uid") == uid:
            if why := stuck_reason(self.pods(known.handle), self.api.now()):
                raise Unreachable(f"{name} is deleted, and stays as long as its pods{why}")
            if time.monotonic() > deadline:
                raise UserError(f"{name} is still there {timeout:g} s after its deletion: see its finalizers and pods")
            time.sleep(min(self.interval, 0.5))

    def pods(self, job: Manifest) -> list[Manifest]:
        """Returns the job's own pods. It leaves out pods of an earlier job of this name, and pods that another user gave this label."""
        selector = f"{JOB}={get(job, 'metadata', 'name')}"
        pods = self.api.items(f"/api/v1/namespaces/{self.namespace}/pods", labelSelector=selector)
        return [pod for pod in pods if owned_by(pod, job)]

    def pod(self, job: Manifest, host: str) -> Manifest | None:
        """Returns the pod of a host, by a query for this pod alone: a job may have a thousand others."""
        name, path = str(get(job, "metadata", "name")), f"/api/v1/namespaces/{self.namespace}/pods"
        if job.get("kind") == "TrainJob":  # the pods' names end in a random text, and their index identifies them
            selector = f"{JOB}={name},batch.kubernetes.io/job-completion-index={host.rpartition('-')[2]}"
            pods = [pod for pod in self.api.items(path, labelSelector=selector) if owned_by(pod, job)]
            return next(iter(newest(pods)), None)
        pod: Manifest | None = self.api.find(f"{path}/{host}")
        return pod if pod is not None and owned_by(pod, job) else None

    def _where(self, job: Manifest) -> str:
        return f"{job.get('kind', 'job')} {self.namespace}/{get(job, 'metadata', 'name')} at {self.api.host}"

    def list(self) -> list[JobSummary]:
        # From the server's watch cache: another list would need a quorum read of etcd.
        jobs = self.api.jobs(self.namespace, labelSelector=MANAGED_SELECTOR, resourceVersion="0")
        return sorted((_row(job) for _, of_kind in jobs for job in of_kind), key=lambda row: row.name)


def _of_rank(known: JobRecord, rank: int | None) -> list[str]:
    """Returns the host that a rank is on, or all hosts."""
    names = hosts(known.handle)
    return names if rank is None else [names[rank // known.spec.ranks]]


def _row(job: Manifest) -> JobSummary:
    nodes = spec_in(get(job, "metadata", "annotations")).get("nodes")
    created = str(get(job, "metadata", "creationTimestamp") or "")
    return JobSummary(get(job, "metadata", "name"), state_of(job), nodes if isinstance(nodes, int) else 1, created)


def _suspend_patch(job: Manifest, value: bool | None) -> Manifest:
    """Returns the patch that sets whether a job is suspended; with None, the rendered value."""
    place = job["spec"] if job["kind"] == "TrainJob" else job["spec"]["runPolicy"]
    patch = {"suspend": bool(place.get("suspend")) if value is None else value}
    return patch if job["kind"] == "TrainJob" else {"runPolicy": patch}


def _deletion(item: Manifest) -> dict[str, Any]:
    """Returns the options that delete this very object, after all objects that belong to it."""
    options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}
    return {**options, "preconditions": {"uid": get(item, "metadata", "uid")}}


BACKEND = KubernetesBackend
