"""The Kubernetes backend: a PyTorchJob or TrainJob, its NetworkPolicy, and what the cluster says about them."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import Self

from lockstep.jobs.backend import Found, Lines, check_name
from lockstep.jobs.cluster import Checks, Cluster, Manifests
from lockstep.jobs.compare import missing_from
from lockstep.jobs.foreground import Streams
from lockstep.jobs.kubernetes import code, preparejob, related, render, rules, submission
from lockstep.jobs.kubernetes.answers import Listing
from lockstep.jobs.kubernetes.errors import ApiError, Gone, explained
from lockstep.jobs.kubernetes.kinds import KINDS
from lockstep.jobs.kubernetes.observe import brief, container_of, explain, hosts, newest, slim
from lockstep.jobs.kubernetes.pod import KUEUE_QUEUE
from lockstep.jobs.kubernetes.section import k8s
from lockstep.jobs.kubernetes.subject import Subject
from lockstep.jobs.lint import Rules
from lockstep.jobs.manifest import HASH, JOB, MANAGED, Manifest, get, spec_in, to_yaml
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
MANAGED_SELECTOR = ",".join(f"{key}={value}" for key, value in MANAGED.items())


Rows = list[Listed]  # named here, because `list` is a method below
Errors = list[ApiError]


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
        return render.kubernetes(spec)

    @classmethod
    def code_manifests(cls, spec: JobSpec, packed: bytes) -> Manifests:
        return code.maps(spec, code.RENDERED, packed, k8s(spec).namespace)

    @classmethod
    def rules(cls) -> Rules[Subject]:
        return rules.RULES

    @classmethod
    def preparation(cls, spec: JobSpec) -> tuple[str, object]:
        objects = preparejob.render(spec)
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
        version, plural = KINDS[kind]
        return f"/apis/{version}/namespaces/{self.namespace}/{plural}{f'/{name}' if name else ''}"

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
        if found.hash == spec.hash():  # else its pods have another label, which this policy does not select
            with explained(self.api.host):
                submission.keep(self.api, self.namespace, spec, found.record, found.spec)
        return super().attach(found, spec)

    def create(self, spec: JobSpec, old: Found | None) -> Submitted:
        with explained(self.api.host, k8s(spec).kind):
            if old is not None:
                self._delete(old.record, self._deletion_seconds(old.spec))
            live, made = submission.create(self.api, self.namespace, spec, partial(self._find, spec.name))
        return Submitted(spec.name, made, self._where(live))

    def prepare(self, spec: JobSpec) -> Submitted:
        """Creates the one-pod Job that writes the shards. Raises `UserError`."""
        (job,) = preparejob.render(spec)
        name = job["metadata"]["name"]
        with explained(self.api.host, "Job"):
            try:
                self.api.create(f"/apis/batch/v1/namespaces/{self.namespace}/jobs", job)
            except ApiError as error:
                if error.status != 409:
                    raise
                there = self.api.get(f"/apis/batch/v1/namespaces/{self.namespace}/jobs/{name}")
                made = get(there, "metadata", "labels", HASH)
                if made is not None and made != get(job, "metadata", "labels", HASH):
                    raise UserError(
                        f"the Job {name} prepares for another spec: delete it, or choose another name"
                    ) from None
                if made is None:
                    raise UserError(
                        f"the Job {name} exists, and lockstep did not make it: choose another name"
                    ) from None
                return Submitted(name, False, f"{self.namespace}/{name}")
        return Submitted(name, True, f"{self.namespace}/{name}")

    def observe(self, found: Found) -> Status:
        with explained(self.api.host):
            return self._observe(found.record, found.spec)

    def _observe(self, job: Manifest, spec: JobSpec | None) -> Status:
        name = str(get(job, "metadata", "name"))
        pods = self._pods(name)
        names = hosts(job)
        elastic = spec is not None and spec.elastic is not None
        ranks = spec.ranks if spec else 1
        found = explain(job, pods, [], None, names, ranks, elastic, time.time())
        if found.final or found.state == "running":
            return found
        workload = (
            related.workload(self.api, self.namespace, job) if get(job, "metadata", "labels", KUEUE_QUEUE) else None
        )
        pending = [get(pod, "metadata", "name") for pod in pods if get(pod, "status", "phase") == "Pending"]
        maker = related.maker(self.api, self.namespace, job) if len(pods) < len(names) else None
        about = [name, *([get(maker, "metadata", "name")] if maker else []), *pending[:3]]
        events = [event for each in about for event in related.events(self.api, self.namespace, str(each))]
        return explain(job, pods, events, workload, names, ranks, elastic, time.time(), maker)

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
            if job is not None:
                gone_since.clear()
                return brief(job) in FINAL
            gone_since.append(time.monotonic())
            return gone_since[-1] - gone_since[0] > min(self.lost_after, 30)

        return Reader(
            self.api, self.namespace, lambda: self._pods(found.name), partial(self._pod, found.record), over,
            min(self.interval, 2.0), container_of(found.record), self.lost_after,
        )  # fmt: skip

    def exec(self, found: Found, spec: JobSpec | None, rank: int, command: Lines, streams: Streams) -> int:
        from lockstep.jobs.kubernetes.exec import Rank

        place, run_dir = self._of_rank(found, spec, rank), spec.run_directory if spec is not None else ""
        with explained(self.api.host):
            pod, container = partial(self._pod, found.record), container_of(found.record)
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

    def cancel(self, name: str) -> Status:
        try:
            status = super().cancel(name)
        except Unreachable:
            raise
        except UserError:
            self._settle(name)  # of a submission that was interrupted before there was a job
            raise
        self._settle(name)
        return status

    def _settle(self, name: str) -> None:
        check_name(name)
        with contextlib.suppress(UserError), explained(self.api.host):
            code.settle(self.api, self.namespace, name, partial(self._find, name))

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
        name, uid = str(get(job, "metadata", "name")), get(job, "metadata", "uid")
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Foreground",
            "preconditions": {"uid": uid},
        }
        try:
            self.api.delete(self.path(str(job["kind"]), name), options)
        except ApiError as error:
            if error.status != 404:
                raise
        self._await_end(job, timeout)

    def _await_end(self, job: Manifest, timeout: float) -> None:
        """Waits until that very job is gone. Raises `UserError`."""
        name, uid = str(get(job, "metadata", "name")), get(job, "metadata", "uid")
        deadline = time.monotonic() + timeout
        while (left := self._find(name)) is not None and get(left, "metadata", "uid") == uid:
            if time.monotonic() > deadline:
                raise UserError(f"{name} is still there {timeout:g} s after its deletion: see its finalizers and pods")
            time.sleep(min(self.interval, 0.5))

    def list(self) -> list[Listed]:
        rows: Rows = []
        refused: Errors = []
        with explained(self.api.host):
            for kind in KINDS:
                try:
                    found = _all(
                        # From the server's watch cache, which answers all at once: pages are read from etcd, a quorum each.
                        self.api.pages(self.path(kind), labelSelector=MANAGED_SELECTOR, resourceVersion="0", limit=None)
                    )
                except ApiError as error:
                    if error.status not in (403, 404):
                        raise
                    refused += [error] if error.status == 403 else []
                    continue  # this kind is not installed, or not used by who asks
                for job in found:
                    nodes = spec_in(get(job, "metadata", "annotations")).get("nodes")
                    created = str(get(job, "metadata", "creationTimestamp") or "")
                    rows.append(
                        Listed(
                            get(job, "metadata", "name"), brief(job), nodes if isinstance(nodes, int) else 1, created
                        )
                    )
            if len(refused) == len(KINDS):
                raise refused[0]
        return sorted(rows, key=lambda row: row.name)

    def changes(self, found: Found, spec: JobSpec) -> Lines:
        *_, wanted = render.kubernetes(spec, code.submission_of(found.record) or code.RENDERED)
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
        refused: list[ApiError] = []
        for kind in KINDS:
            try:
                return {**self.api.get(self.path(kind, name)), "kind": kind}
            except ApiError as error:
                if error.status == 403:
                    refused.append(error)
                elif error.status != 404:
                    raise
        if len(refused) == len(KINDS):
            raise refused[0]  # with the rights of one kind alone, there is no job of the other one
        return None

    def _pods(self, name: str) -> Manifests:
        pages = self.api.pages(f"/api/v1/namespaces/{self.namespace}/pods", labelSelector=f"{JOB}={name}")
        return [slim(pod) for pod in pages]

    def _pod(self, job: Manifest, host: str) -> Manifest | None:
        """The pod of a host, alone: a job may have a thousand others."""
        name, path = str(get(job, "metadata", "name")), f"/api/v1/namespaces/{self.namespace}/pods"
        if job.get("kind") == "TrainJob":  # its pods' names end in something random, their index says which they are
            selector = f"{JOB}={name},batch.kubernetes.io/job-completion-index={host.rpartition('-')[2]}"
            return next(iter(newest(_all(self.api.pages(path, labelSelector=selector)))), None)
        try:
            pod = self.api.get(f"{path}/{host}")
        except ApiError as error:
            if error.status != 404:
                raise
            return None
        return pod if get(pod, "metadata", "labels", JOB) == name else None

    def _where(self, job: Manifest) -> str:
        return f"{job.get('kind', 'job')} {self.namespace}/{get(job, 'metadata', 'name')} at {self.api.host}"


def _all(pages: Iterator[Manifest]) -> Manifests:
    return list(pages)


BACKEND = KubernetesBackend
