"""The Kubernetes backend: a PyTorchJob or TrainJob, its NetworkPolicy, and what the cluster says about them."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from typing_extensions import Self

from lockstep.jobs.backend import Found, Lines, check_name
from lockstep.jobs.cluster import Checks, Cluster, Manifests
from lockstep.jobs.kubernetes import render, rules, submission
from lockstep.jobs.kubernetes.answers import ApiError, Gone, Listing, explained
from lockstep.jobs.kubernetes.observe import belongs, brief, explain, hosts, newest, orphaned, seen_at, slim
from lockstep.jobs.kubernetes.render import RENDERED
from lockstep.jobs.kubernetes.section import CONTAINERS, KINDS, KUEUE, KUEUE_QUEUE, k8s
from lockstep.jobs.lint import Rules
from lockstep.jobs.manifest import HASH, JOB, MANAGED, Manifest, get, missing_from, spec_in, to_yaml
from lockstep.jobs.process import Streams
from lockstep.jobs.spec.model import JobSpec
from lockstep.jobs.status import FINAL, Listed, Status, Submitted, Unreachable
from lockstep.jobs.terminal import warn
from lockstep.training.contract import UserError

if TYPE_CHECKING:
    from lockstep.jobs.kubernetes.api import Api
    from lockstep.jobs.kubernetes.logs import Reader

DELETION_MARGIN = 90.0
"""Seconds above its pods' grace that a job which is being deleted may stay."""
SUMMARY_LINES = 1000
"""Of rank 0's last lines, among which a run says what it has reached."""
MOST_ASKED = 3
"""Pods whose own events are asked for: they say why a pod waits, or has gone."""
MANAGED_SELECTOR = ",".join(f"{key}={value}" for key, value in MANAGED.items())


Errors = list[ApiError]  # named here, because `list` is a method below
Answer = TypeVar("Answer")


class KubernetesBackend(Cluster):
    """See `Backend`.

    Args:
        interval: seconds between two looks where nothing has been announced.
        lost_after: seconds of 404, silence or unknown nodes after which a job that was seen counts as lost.
    """

    name = "k8s"
    carries_code = True
    places: ClassVar = {"namespace": "k8s.namespace", "context": "k8s.context"}
    secrets_from = None
    survived = (UserError,)  # rights may come back, too

    def __init__(self, api: Api, namespace: str, interval: float = 5.0, lost_after: float = 300.0) -> None:
        self.api, self.namespace, self.interval, self.lost_after = api, namespace, interval, lost_after

    @classmethod
    def connect(cls, **place: str | None) -> Self:
        """Reads the kubeconfig (or the service account, inside a cluster). Raises `UserError`."""
        # The client takes longer to import than to render.
        from lockstep.jobs.kubernetes.api import Api, load_configuration

        load, default = load_configuration(place.get("context"))
        return cls(Api(load), place.get("namespace") or default)

    @classmethod
    def manifests(cls, spec: JobSpec) -> Manifests:
        return render.manifests(spec)

    @classmethod
    def code_manifests(cls, spec: JobSpec, packed: bytes) -> Manifests:
        return render.code_maps(spec, RENDERED, packed)

    @classmethod
    def rules(cls) -> Rules[Any]:
        return rules.RULES

    @classmethod
    def preparation(cls, spec: JobSpec) -> tuple[str, object]:
        objects = [render.preparation(spec)]
        return to_yaml(objects), objects

    @classmethod
    def doctor(cls, spec: JobSpec | None, **place: str | None) -> Checks:
        from lockstep.jobs.kubernetes import checks

        try:
            connected = cls.connect(**place)
        except UserError as error:
            return checks.without_cluster(str(error), cls.lint(spec) if spec is not None else None)
        return checks.check(connected, spec, cls.lint(spec) if spec is not None else None)

    def path(self, kind: str, name: str = "") -> str:
        return submission.job_path(self.namespace, kind, name)

    def find(self, name: str) -> Found | None:
        check_name(name)
        with explained(self.api.host):
            job = self._find(name)
        if job is None:
            return None
        return Found(name, get(job, "metadata", "labels", HASH), spec_in(get(job, "metadata", "annotations")), job)

    def no_such(self, name: str) -> UserError:
        return UserError(f"there is no job {name} in namespace {self.namespace}: see `lockstep list k8s`")

    def settled(self, found: Found) -> Found | None:
        if not get(found.record, "metadata", "deletionTimestamp"):
            return found
        warn(f"{found.name} is being deleted: waiting until it is gone")
        with explained(self.api.host):
            self._await_end(found.record, self._deletion_seconds(found.spec))
        return self.find(found.name)

    def attach(self, found: Found, spec: JobSpec) -> Submitted:
        # By its own hash: its pods have that label. The same job may have another one, by settings of other backends.
        own = next((one for one in (spec, found.spec) if one is not None and one.hash() == found.hash), None)
        if own is not None:
            with explained(self.api.host):
                submission.complete(self.api, self.namespace, own, found.record)
        return super().attach(found, spec)

    def create(self, spec: JobSpec, old: Found | None) -> Submitted:
        with explained(self.api.host, k8s(spec).kind):
            if old is not None:
                self._delete(old.record, self._deletion_seconds(old.spec))
            live, made = submission.create(self.api, self.namespace, spec, partial(self._find, spec.name))
        return Submitted(spec.name, made, self._where(live))

    def prepare(self, spec: JobSpec) -> Submitted:
        """Creates the one-pod Job that writes the shards. Raises `UserError`."""
        job, path = render.preparation(spec), f"/apis/batch/v1/namespaces/{self.namespace}/jobs"
        name, made = job["metadata"]["name"], True
        with explained(self.api.host, "Job"):
            try:
                self.api.create(path, job)
            except ApiError as error:
                if error.status != 409:
                    raise
                made = False
                there = get(self.api.find(f"{path}/{name}"), "metadata", "labels", HASH)
                if there != get(job, "metadata", "labels", HASH):
                    whose = (
                        "exists, and lockstep did not make it:"
                        if there is None
                        else "prepares for another spec: delete it, or"
                    )
                    raise UserError(f"the Job {name} {whose} choose another name") from None
        return Submitted(name, made, f"{self.namespace}/{name}")

    def observe(self, found: Found) -> Status:
        with explained(self.api.host):
            return self._observe(found.record, found.spec)

    def _observe(self, job: Manifest, spec: JobSpec | None) -> Status:
        pods, names, elastic = self._pods(job), hosts(job), spec is not None and spec.elastic is not None
        ranks, now = spec.ranks if spec else 1, self.api.now()
        events = self._events(get(job, "metadata", "uid"), "uid") if brief(job) != "succeeded" else []
        found = explain(job, pods, events, None, names, ranks, elastic, now)
        if found.final or found.state == "running":
            return found
        workload = self._workload(job) if get(job, "metadata", "labels", KUEUE_QUEUE) else None
        maker = self._maker(job) if len(pods) < len(names) else None
        if maker is not None:
            events += self._events(get(maker, "metadata", "uid"), "uid")
        pending = [get(pod, "metadata", "name") for pod in pods if get(pod, "status", "phase") == "Pending"]
        again = [part.name for part in found.ranks if part.restarts]
        missing = [name for name in names if len(pods) < len(names) <= MOST_ASKED and name not in again]
        for name in [*pending, *again, *missing][:MOST_ASKED]:  # of a pod that is gone, too
            events += self._events(name, "name")
        return explain(job, pods, events, workload, names, ranks, elastic, now, maker)

    def _events(self, about: Any, key: str) -> Manifests:
        """Of an object by its uid, or of all that had this name; the latest last."""
        path = f"/api/v1/namespaces/{self.namespace}/events"
        return sorted(self.api.pages(path, fieldSelector=f"involvedObject.{key}={about}"), key=seen_at)

    def _maker(self, job: Manifest) -> Manifest | None:
        """The batch Job that makes the pods of a TrainJob; None where it is not there, not ours, or not ours to see."""
        if job.get("kind") != "TrainJob":
            return None
        name = get(job, "metadata", "name")
        try:
            found: Manifest = self.api.get(f"/apis/batch/v1/namespaces/{self.namespace}/jobs/{name}-node-0")
        except ApiError as error:
            if error.status not in (403, 404):
                raise
            return None
        return found if get(found, "spec", "template", "metadata", "labels", JOB) == name else None

    def _workload(self, job: Manifest) -> Manifest | None:
        """Where the job stands in Kueue's queue; None where Kueue is not there."""
        selector = f"kueue.x-k8s.io/job-uid={get(job, 'metadata', 'uid')}"
        for version in KUEUE:
            try:
                path = f"/apis/{version}/namespaces/{self.namespace}/workloads"
                return next(self.api.pages(path, labelSelector=selector), None)
            except ApiError as error:
                if error.status not in (403, 404):
                    raise
        return None

    def trouble(self, status: Status) -> str:
        return next((part.reason for part in status.ranks if part.state == "unknown"), "")

    def world(self, found: Found, spec: JobSpec | None) -> int:
        return len(hosts(found.record)) * (spec.ranks if spec else 1)

    def stream(self, found: Found, spec: JobSpec | None, rank: int | None, follow: bool) -> Iterator[str]:
        with explained(self.api.host):
            yield from self._reader(found).lines(self._of_rank(found, spec, rank), rank, follow)

    def tail(self, found: Found, spec: JobSpec | None, rank: int | None, follow: bool, count: int) -> Iterator[str]:
        with explained(self.api.host):
            yield from self._reader(found).tail(self._of_rank(found, spec, rank), rank, follow, count)

    @staticmethod
    def _of_rank(found: Found, spec: JobSpec | None, rank: int | None) -> Lines:
        """The hosts that a rank may be on: in an elastic job it may be on any of them, and its prefix tells."""
        names = hosts(found.record)
        return [names[rank // spec.ranks]] if rank is not None and spec is not None and not spec.elastic else names

    def _reader(self, found: Found) -> Reader:
        from lockstep.jobs.kubernetes.logs import Reader

        gone_since: list[float] = []

        def over() -> bool:
            job = self._find(found.name)
            # Else another one has the name.
            if job is not None and get(job, "metadata", "uid") == get(found.record, "metadata", "uid"):
                gone_since.clear()
                return brief(job) in FINAL
            gone_since.append(time.monotonic())
            return gone_since[-1] - gone_since[0] > min(self.lost_after, 30)

        return Reader(
            self.api, self.namespace, partial(self._pods, found.record), partial(self._pod, found.record), over,
            min(self.interval, 2.0), CONTAINERS[found.record["kind"]], self.lost_after,
        )  # fmt: skip

    def exec(self, found: Found, spec: JobSpec | None, rank: int, command: Lines, streams: Streams) -> int:
        from lockstep.jobs.kubernetes.exec import Rank

        place, run_dir = self._of_rank(found, spec, rank), spec.run_directory if spec is not None else ""
        with explained(self.api.host):
            pod, container = partial(self._pod, found.record), CONTAINERS[found.record["kind"]]
            return Rank(self.api, self.namespace, pod, container, place, rank).run(command, run_dir, streams)

    def within(self, seconds: float) -> contextlib.AbstractContextManager[None]:
        return self.api.within(seconds)

    def pause(self, found: Found | None, seconds: float) -> None:
        if found is None:  # the server has not answered yet
            time.sleep(min(seconds, self.interval))
        else:
            self._await_change(found.name, found.record, min(seconds, self.interval))

    def _await_change(self, name: str, known: Manifest, seconds: float) -> None:
        """Returns when the job is no longer as `known`, at the latest after `seconds`; a broken watch costs a short pause."""
        began = time.monotonic()
        try:
            path, selector = self.path(str(known["kind"])), f"metadata.name={name}"
            page = self.api.get(path, Listing, fieldSelector=selector)
            # Where it has changed since it was read: after the pause, for where reading fails for good.
            if get(page, "items", 0, "metadata", "resourceVersion") == get(known, "metadata", "resourceVersion"):
                version = str(get(page, "metadata", "resourceVersion"))
                for event in self.api.watch(path, version, seconds, fieldSelector=selector):
                    if event.get("type") != "BOOKMARK":
                        return
        except (ApiError, UserError, Gone):
            pass
        time.sleep(max(0.0, min(seconds - (time.monotonic() - began), self.interval / 5)))

    def stop(self, found: Found) -> Status:
        with explained(self.api.host):
            self._delete(found.record, self._deletion_seconds(found.spec))
        return Status("cancelled", "cancelled; its pods had the grace period to save")

    @staticmethod
    def _deletion_seconds(spec: JobSpec | None) -> float:
        """How long a deletion may take: the pods' grace, and some time for everybody."""
        return (spec.grace_seconds if spec else 60) + DELETION_MARGIN

    def _delete(self, job: Manifest, timeout: float) -> None:
        """Deletes the job and waits until it and its pods are gone."""
        try:
            self.api.delete(self.path(str(job["kind"]), str(get(job, "metadata", "name"))), submission.deletion(job))
        except ApiError as error:
            if error.status != 404:
                raise
        self._await_end(job, timeout)

    def _await_end(self, job: Manifest, timeout: float) -> None:
        """Waits until that very job is gone. Raises `UserError`, at once where only dead nodes' pods keep it."""
        name, uid = str(get(job, "metadata", "name")), get(job, "metadata", "uid")
        deadline = time.monotonic() + timeout
        while (left := self._find(name)) is not None and get(left, "metadata", "uid") == uid:
            if why := orphaned(self._pods(job), self.api.now()):
                raise Unreachable(f"{name} is deleted, and stays as long as its pods{why}")
            if time.monotonic() > deadline:
                raise UserError(f"{name} is still there {timeout:g} s after its deletion: see its finalizers and pods")
            time.sleep(min(self.interval, 0.5))

    def list(self) -> list[Listed]:
        with explained(self.api.host):
            # From the server's watch cache, which answers all at once: pages are read from etcd, a quorum each.
            query = {"labelSelector": MANAGED_SELECTOR, "resourceVersion": "0", "limit": None}
            jobs = self._of_each_kind(lambda kind: [*self.api.pages(self.path(kind), **query)])
            return sorted((_row(job) for found in jobs for job in found), key=lambda row: row.name)

    def changes(self, found: Found, spec: JobSpec) -> Lines:
        _, wanted = render.manifests(spec, submission.submission_of(found.record) or RENDERED)
        wanted = {key: wanted[key] for key in ("apiVersion", "spec")}
        return missing_from(wanted, found.record)

    def where(self, found: Found) -> str:
        return self._where(found.record)

    def summary(self, name: str) -> dict[str, Any]:
        last: dict[str, Any] | None = None
        for line in self.logs(name, 0, last=SUMMARY_LINES):  # of a long run's log, which may have a gigabyte
            if '"done"' in line:
                with contextlib.suppress(ValueError):
                    event = json.loads(line)
                    last = event if isinstance(event, dict) and event.get("event") == "done" else last
        if last is not None:
            return {key: value for key, value in last.items() if key not in ("event", "time", "attempt")}
        raise UserError(f"{name} has not written a summary: it is {self.status(name).state}, or its pods are gone")

    def _find(self, name: str) -> Manifest | None:
        found = self._of_each_kind(lambda kind: {**self.api.get(self.path(kind, name)), "kind": kind})
        return next(iter(found), None)

    def _of_each_kind(self, ask: Callable[[str], Answer]) -> Iterator[Answer]:
        """The answers for the kinds that are installed, and that who asks may use. Raises `ApiError` where there is no answer."""
        refused: Errors = []
        for kind in KINDS:
            try:
                yield ask(kind)
            except ApiError as error:
                if error.status not in (403, 404):
                    raise
                refused += [error] if error.status == 403 else []
        if len(refused) == len(KINDS):
            raise refused[0]

    def _pods(self, job: Manifest) -> Manifests:
        """The job's own, not those of an earlier job of the name, nor what somebody else has given its label."""
        selector = f"{JOB}={get(job, 'metadata', 'name')}"
        pages = self.api.pages(f"/api/v1/namespaces/{self.namespace}/pods", labelSelector=selector)
        return [slim(pod) for pod in pages if belongs(pod, job)]

    def _pod(self, job: Manifest, host: str) -> Manifest | None:
        """The pod of a host, alone: a job may have a thousand others."""
        name, path = str(get(job, "metadata", "name")), f"/api/v1/namespaces/{self.namespace}/pods"
        if job.get("kind") == "TrainJob":  # its pods' names end in something random, their index says which they are
            selector = f"{JOB}={name},batch.kubernetes.io/job-completion-index={host.rpartition('-')[2]}"
            pods = [pod for pod in self.api.pages(path, labelSelector=selector) if belongs(pod, job)]
            return next(iter(newest(pods)), None)
        pod: Manifest | None = self.api.find(f"{path}/{host}")
        return pod if pod is not None and belongs(pod, job) else None

    def _where(self, job: Manifest) -> str:
        return f"{job.get('kind', 'job')} {self.namespace}/{get(job, 'metadata', 'name')} at {self.api.host}"


def _row(job: Manifest) -> Listed:
    nodes = spec_in(get(job, "metadata", "annotations")).get("nodes")
    created = str(get(job, "metadata", "creationTimestamp") or "")
    return Listed(get(job, "metadata", "name"), brief(job), nodes if isinstance(nodes, int) else 1, created)


BACKEND = KubernetesBackend
