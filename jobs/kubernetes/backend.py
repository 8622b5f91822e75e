"""The Kubernetes backend: a PyTorchJob or TrainJob, its NetworkPolicy, and what the cluster says about them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from jobs import backend as base
from jobs.backend import Listed, Mode, Status, Submitted
from jobs.checks import lint
from jobs.kubernetes import render
from jobs.kubernetes.api import Api, ApiError, Gone, load_configuration
from jobs.kubernetes.logs import Reader
from jobs.kubernetes.observe import brief, explain
from jobs.kubernetes.pod import CONTAINER, KUEUE_QUEUE
from jobs.kubernetes.pytorchjob import has_master
from jobs.manifest import HASH, JOB, MANAGED, SPEC, Manifest, get
from jobs.spec.model import JobSpec
from training.contract import UserError

KINDS = {
    "PyTorchJob": ("kubeflow.org/v1", "pytorchjobs"),
    "TrainJob": ("trainer.kubeflow.org/v1alpha1", "trainjobs"),
}
INSTALL = {"PyTorchJob": "the Kubeflow training-operator", "TrainJob": "Kubeflow Trainer"}
MANAGED_SELECTOR = ",".join(f"{key}={value}" for key, value in MANAGED.items())


Manifests = list[Manifest]  # named here, because `list` is a method below
Names = list[str]


class KubernetesBackend:
    """See `base.Backend`.

    Args:
        interval: seconds between two looks where nothing has been announced.
        lost_after: seconds of 404, silence or unknown nodes after which a job that was seen counts as lost.
    """

    name = "k8s"

    def __init__(self, api: Api, namespace: str, interval: float = 5.0, lost_after: float = 300.0) -> None:
        self.api, self.namespace, self.interval, self.lost_after = api, namespace, interval, lost_after

    @classmethod
    def connect(cls, namespace: str | None = None, context: str | None = None) -> KubernetesBackend:
        """Reads the kubeconfig (or the service account, inside a cluster). Raises `UserError`."""
        load, default = load_configuration(context)
        return cls(Api(load), namespace or default)

    def path(self, kind: str, name: str = "") -> str:
        version, plural = KINDS[kind]
        return f"/apis/{version}/namespaces/{self.namespace}/{plural}{f'/{name}' if name else ''}"

    def submit(self, spec: JobSpec, mode: Mode = "attach") -> Submitted:
        found = lint.errors(lint.lint(spec, render.kubernetes(spec)))
        if found:
            more = f" (and {len(found) - 1} more: see `lockstep lint`)" if len(found) > 1 else ""
            raise UserError(f"{spec.name}: {found[0]}{more}")
        with self._explained(spec.k8s.kind):
            live = self._find(spec.name)
            if live is not None:
                was = get(live, "metadata", "labels", HASH)
                if was is None and mode != "new":
                    raise UserError(f"{spec.name} exists, and lockstep did not make it: choose another name")
                decided = base.decide(spec.name, mode, self._status(live), was, lambda: self._spec_of(live), spec)
                if decided == "attach":
                    return Submitted(spec.name, False, self._where(live))
                if decided == "new":
                    taken = {item.name for item in self.list()}
                    name = base.next_name(spec.name, taken)
                    return self._create(spec.model_copy(update={"name": name, "run_dir": None}))
                self._delete(live, 120)
            return self._create(spec)

    def _create(self, spec: JobSpec) -> Submitted:
        policy, job = render.kubernetes(spec)
        path = self.path(spec.k8s.kind)
        policies = f"/apis/networking.k8s.io/v1/namespaces/{self.namespace}/networkpolicies"
        self.api.create(path, job, dryRun="All")  # what the server refuses leaves nothing behind
        try:
            self.api.create(policies, policy)
        except ApiError as error:
            if error.status != 409:
                raise
            self.api.patch(
                f"{policies}/{spec.name}",
                {"spec": policy["spec"], "metadata": {"labels": policy["metadata"]["labels"]}},
            )
        try:
            live = self.api.create(path, job)
        except ApiError as error:
            if error.status != 409:
                raise
            live = self._find(spec.name)  # somebody was faster, or our answer was lost on the way
            if live is None or get(live, "metadata", "labels", HASH) != spec.hash():
                raise UserError(f"{spec.name} was submitted by somebody else just now, with another spec") from None
        owner = {
            "apiVersion": KINDS[spec.k8s.kind][0], "kind": spec.k8s.kind, "name": spec.name,
            "uid": get(live, "metadata", "uid"),
        }  # fmt: skip
        # The cluster then removes the policy together with the job.
        self.api.patch(f"{policies}/{spec.name}", {"metadata": {"ownerReferences": [owner]}})
        return Submitted(spec.name, True, self._where(live))

    def prepare(self, spec: JobSpec) -> Submitted:
        """Creates the one-pod Job that writes the shards. Raises `UserError`."""
        from jobs.kubernetes import preparejob

        (job,) = preparejob.render(spec)
        name = job["metadata"]["name"]
        with self._explained("Job"):
            try:
                self.api.create(f"/apis/batch/v1/namespaces/{self.namespace}/jobs", job)
            except ApiError as error:
                if error.status != 409:
                    raise
                return Submitted(name, False, f"{self.namespace}/{name}")
        return Submitted(name, True, f"{self.namespace}/{name}")

    def status(self, name: str) -> Status:
        with self._explained():
            return self._status(self._require(name))

    def _status(self, job: Manifest) -> Status:
        spec, name = self._parsed(job), str(get(job, "metadata", "name"))
        pods = self._pods(name)
        hosts = self._hosts(spec, job)
        elastic = spec is not None and spec.elastic is not None
        ranks = spec.ranks if spec else 1
        found = explain(job, pods, [], None, hosts, ranks, elastic)
        if found.final or found.state == "running":
            return found
        workload = self._workload(job) if get(job, "metadata", "labels", KUEUE_QUEUE) else None
        pending = [get(pod, "metadata", "name") for pod in pods if get(pod, "status", "phase") == "Pending"]
        events = [event for about in [name, *pending[:3]] for event in self._events(str(about))]
        return explain(job, pods, events, workload, hosts, ranks, elastic)

    def logs(self, name: str, rank: int | None = None, follow: bool = False) -> Iterator[str]:
        with self._explained():
            job = self._require(name)
        spec = self._parsed(job)
        hosts = self._hosts(spec, job)
        total = len(hosts) * (spec.ranks if spec else 1)
        if rank is not None and rank >= total:
            raise UserError(f"{name} has the ranks 0 … {total - 1}, got {rank}")
        if rank is not None and spec is not None and not spec.elastic:
            hosts = [hosts[rank // spec.ranks]]  # elsewhere the rank may be on any of them: its prefix tells
        gone_since: list[float] = []

        def over() -> bool:
            found = self._find(name)
            if found is not None:
                gone_since.clear()
                return brief(found) in base.FINAL
            gone_since.append(time.monotonic())
            return gone_since[-1] - gone_since[0] > min(self.lost_after, 30)

        container = CONTAINER if job.get("kind") == "PyTorchJob" else "node"
        reader = Reader(self.api, self.namespace, lambda: self._pods(name), over, min(self.interval, 2.0), container)
        return self._guarded(reader.lines(hosts, rank, follow))

    def _guarded(self, lines: Iterator[str]) -> Iterator[str]:
        with self._explained():
            yield from lines

    def wait(self, name: str, timeout: float, seen: base.Seen = base.unseen) -> Status:
        deadline = time.monotonic() + timeout
        with self._explained():
            known = self._require(name)  # a name that never was is the caller's mistake, not a lost job
            found = self._status(known)
        seen(found)
        bad_since: float | None = None
        while not found.final and (left := deadline - time.monotonic()) > 0:
            self._await_change(name, known, min(left, self.interval))
            problem = ""
            try:
                job = self._find(name)
                if job is None:
                    problem = "it is gone from the cluster"
                else:
                    known, found = job, self._status(job)
                    unknown = [part.name for part in found.ranks if part.state == "unknown"]
                    problem = f"the node of {unknown[0]} does not answer" if unknown else ""
            except (UserError, ApiError) as error:
                problem = str(error)
            bad_since = None if not problem else (bad_since or time.monotonic())
            if bad_since is not None and time.monotonic() - bad_since >= self.lost_after:
                found = Status("lost", f"{problem} (for {self.lost_after:g} s)", found.ranks)
                seen(found)
                return found
            seen(replace(found, reason=problem) if problem else found)
        return found

    def _await_change(self, name: str, known: Manifest, seconds: float) -> None:
        """Returns when the job is no longer as `known`, at the latest after `seconds`; a broken watch costs a short pause."""
        began = time.monotonic()
        try:
            for kind in KINDS:
                page = self.api.get(self.path(kind), fieldSelector=f"metadata.name={name}")
                if page.get("items"):
                    found = get(page, "items", 0, "metadata", "resourceVersion")
                    if found != get(known, "metadata", "resourceVersion"):
                        break  # since it was read; after the pause, for where reading fails for good
                    version = str(get(page, "metadata", "resourceVersion"))
                    selector = f"metadata.name={name}"
                    for event in self.api.watch(self.path(kind), version, seconds, fieldSelector=selector):
                        if event.get("type") != "BOOKMARK":
                            return
                    break
        except (ApiError, UserError, Gone):
            pass
        time.sleep(max(0.0, min(seconds - (time.monotonic() - began), self.interval / 5)))

    def cancel(self, name: str) -> Status:
        with self._explained():
            job = self._require(name)
            status = self._status(job)
            if status.final:
                return status
            spec = self._parsed(job)
            self._delete(job, (spec.grace_seconds if spec else 60) + 90)
        return Status("cancelled", "cancelled; its pods had their grace to save")

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
        deadline = time.monotonic() + timeout
        while (left := self._find(name)) is not None and get(left, "metadata", "uid") == uid:
            if time.monotonic() > deadline:
                raise UserError(f"{name} is still there {timeout:g} s after its deletion: see its finalizers and pods")
            time.sleep(min(self.interval, 0.5))

    def list(self) -> list[Listed]:
        rows = []
        with self._explained():
            for kind in KINDS:
                try:
                    found = _all(self.api.pages(self.path(kind), labelSelector=MANAGED_SELECTOR))
                except ApiError as error:
                    if error.status != 404:
                        raise
                    continue  # this kind is not installed
                for job in found:
                    spec = self._spec_of(job)
                    created = str(get(job, "metadata", "creationTimestamp") or "")
                    rows.append(Listed(get(job, "metadata", "name"), brief(job), spec.get("nodes", 1), created))
        return sorted(rows, key=lambda row: row.name)

    def live(self, name: str) -> dict[str, Any]:
        with self._explained():
            return self._spec_of(self._require(name))

    def drift(self, spec: JobSpec) -> base.Lines:
        with self._explained():
            live = self._require(spec.name)
        *_, wanted = render.kubernetes(spec)
        wanted = {key: wanted[key] for key in ("apiVersion", "spec")}
        return base.missing_from(wanted, live)

    def summary(self, name: str) -> dict[str, Any]:
        for line in reversed([*self.logs(name, 0)]):
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and event.get("event") == "done":
                return {key: value for key, value in event.items() if key not in ("event", "time", "attempt")}
        raise UserError(f"{name} has not written a summary: it is {self.status(name).state}, or its pods are gone")

    def _find(self, name: str) -> Manifest | None:
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,62}", name):
            raise UserError(f"{name!r} is not a job's name (lower-case letters, digits and -)")
        for kind in KINDS:
            try:
                found = self.api.get(self.path(kind, name))
            except ApiError as error:
                if error.status != 404:
                    raise
                continue
            return {"kind": kind, **found}
        return None

    def _require(self, name: str) -> Manifest:
        found = self._find(name)
        if found is None:
            raise UserError(f"there is no job {name} in namespace {self.namespace}: see `lockstep list k8s`")
        return found

    def _pods(self, name: str) -> Manifests:
        return _all(self.api.pages(f"/api/v1/namespaces/{self.namespace}/pods", labelSelector=f"{JOB}={name}"))

    def _events(self, about: str) -> Manifests:
        path = f"/api/v1/namespaces/{self.namespace}/events"
        found = _all(self.api.pages(path, fieldSelector=f"involvedObject.name={about}"))
        return sorted(found, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))

    def _workload(self, job: Manifest) -> Manifest | None:
        selector = f"kueue.x-k8s.io/job-uid={get(job, 'metadata', 'uid')}"
        for version in ("v1beta2", "v1beta1"):
            try:
                path = f"/apis/kueue.x-k8s.io/{version}/namespaces/{self.namespace}/workloads"
                return next(self.api.pages(path, labelSelector=selector), None)
            except ApiError as error:
                if error.status not in (403, 404):
                    raise
        return None

    @staticmethod
    def _spec_of(job: Manifest) -> dict[str, Any]:
        try:
            value = json.loads(get(job, "metadata", "annotations", SPEC) or "{}")
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    def _parsed(self, job: Manifest) -> JobSpec | None:
        """The spec the job was made from; None where the annotation is gone, or from another version."""
        try:
            return JobSpec.model_validate(self._spec_of(job))
        except ValueError:
            return None

    @staticmethod
    def _hosts(spec: JobSpec | None, job: Manifest) -> Names:
        """Host names in the order of ranks: the rendezvous sorts its nodes by their names, as text."""
        name = get(job, "metadata", "name")
        if job.get("kind") == "TrainJob":
            count = get(job, "spec", "trainer", "numNodes") or 1
            return sorted(f"{name}-node-0-{index}" for index in range(count))
        workers = get(job, "spec", "pytorchReplicaSpecs", "Worker", "replicas") or 0
        hosts = [f"{name}-worker-{index}" for index in range(workers)]
        if spec is None or has_master(spec):
            hosts.append(f"{name}-master-0")
        return sorted(hosts)

    def _where(self, job: Manifest) -> str:
        return f"{job.get('kind', 'job')} {self.namespace}/{get(job, 'metadata', 'name')} at {self.api.host}"

    def _explained(self, kind: str = "") -> _Explained:
        return _Explained(self, kind)


def _all(pages: Iterator[Manifest]) -> Manifests:
    return list(pages)


class _Explained:
    """Turns the server's refusals into one line that says what to do."""

    def __init__(self, backend: KubernetesBackend, kind: str) -> None:
        self.backend, self.kind = backend, kind

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Gone):
            raise UserError(f"{self.backend.api.host} dropped the version it was asked for: try again") from None
        if not isinstance(error, ApiError):
            return
        message = " ".join(str(error).split())
        if error.status == 403:
            raise UserError(f"not allowed: {message}; ask for the rights in deploy/k8s/base/rbac.yaml") from None
        if error.status == 404 and self.kind in INSTALL and "namespace" not in message:
            raise UserError(
                f"the cluster knows no {self.kind}: install {INSTALL[self.kind]}, see `lockstep doctor k8s`"
            ) from None
        raise UserError(f"the cluster refuses ({error.status} {error.reason}): {message}") from None
