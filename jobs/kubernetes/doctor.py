"""Checks of what keeps a job from running in a cluster: the rows of `doctor` and of `submit --dry-run`.

Every row says ok, missing, warning, or "cannot tell" if the rights to check are missing. Of a Secret only the metadata
is read, never the content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

from lockstep.training.contract import UserError

from ..lint import Finding
from ..manifest import Manifest, get, mappings
from ..spec.model import JobSpec
from ..status import Check, LoggedOut, Result
from . import render
from .api import Api, Listing, Shape
from .observe import ApiError, condition_of_type, of_each_kind
from .render import KINDS, KUEUE, kind_of, unpublished

METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
"""Media type of an answer with an object's metadata alone."""
RIGHTS = (
    ("list", "", "pods"), ("get", "", "pods"), ("get", "", "pods/log"), ("list", "", "events"),
    ("create", "networking.k8s.io", "networkpolicies"), ("get", "networking.k8s.io", "networkpolicies"),
)  # fmt: skip
"""(verb, group, resource), in addition to those on the kind of job that is used."""
CODE_RIGHTS = (("create", "", "configmaps"), ("list", "", "configmaps"))
"""Rights for a job with its own code."""
EXEC_RIGHTS = (("create", "", "pods/exec"), ("get", "", "pods/exec"))
"""Rights for `lockstep exec`, which no job needs."""
JOB_VERBS = ("create", "get", "list", "patch", "delete")
CONTROLLERS = {"PyTorchJob": "training-operator", "TrainJob": "trainer-controller-manager"}
"""Part of the name of each controller's image."""
Rows = Iterator[Check]


def findings_as_rows(findings: list[Finding]) -> list[Check]:
    """Returns rows of what `submit` would refuse or warn of. They need no cluster."""
    checks = [Check(item.id, "missing" if item.level == "error" else item.level, item.message) for item in findings]
    return checks or [Check("rules", "ok", "lint finds nothing in the job")]


class Doctor:
    """Queries of a cluster, for a job or without one. `rows` runs all queries, in order."""

    def __init__(self, api: Api, namespace: str, spec: JobSpec | None) -> None:
        self.api, self.namespace, self._given = api, namespace, spec

    @property
    def spec(self) -> JobSpec:
        """The spec of the job. Only the queries about a job use this property."""
        assert self._given is not None
        return self._given

    def cluster(self) -> list[Check]:
        """Returns a row for the cluster and a row for the user. Raises `UserError` if the cluster does not answer: then no query can."""
        version = self.api.get("/version", Shape).get("gitVersion", "?")
        return [Check("cluster", "ok", f"{self.api.host}, Kubernetes {version}"), *self._guarded("who", self._who)]

    def rows(self) -> list[Check]:
        """Returns the rows of all queries, in order. Raises `LoggedOut`."""
        queries = {
            "rights": self._rights, "custom resource": self._custom_resource, "operator": self._operator,
            "pod monitor": self._pod_monitor,
        }  # fmt: skip
        if self._given is not None:
            queries |= {
                "runtime": self._runtime, "image": self._image, "queue": self._queue, "nodes": self._nodes,
                "volumes": self._volumes, "pull secrets": self._pull_secrets, "start": self._start,
            }  # fmt: skip
        return [row for name, query in queries.items() for row in self._guarded(name, query)]

    @staticmethod
    def _guarded(name: str, query: Callable[[], Rows]) -> list[Check]:
        """Returns the rows of a query. Raises `LoggedOut`: then no query can answer."""
        rows: list[Check] = []
        try:
            rows.extend(query())
        except LoggedOut:
            raise
        except UserError as error:
            why = error.message if isinstance(error, ApiError) else str(error)
            where = (
                f"the server answered {error.status}: " if isinstance(error, ApiError) and error.status != 403 else ""
            )
            rows.append(Check(name, "cannot tell", where + why[:200]))
        return rows

    @cached_property
    def _kinds(self) -> list[str]:
        """The kind of the job; without a job, the kinds that the cluster serves and that the user may use."""
        if self._given is not None:
            return [kind_of(self._given)]
        served = of_each_kind(lambda kind: (kind, self._serves(kind)))
        return [kind for kind, there in served if there] or [*KINDS]

    def _serves(self, kind: str) -> bool:
        return self.api.find(render.path_of(self.namespace, kind), Listing, limit=1) is not None

    def _who(self) -> Rows:
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        answer = self.api.create("/apis/authentication.k8s.io/v1/selfsubjectreviews", body, Shape)
        yield Check("who", "ok", f"{get(answer, 'status', 'userInfo', 'username')}, namespace {self.namespace}")

    def _rights(self) -> Rows:
        review = {
            "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview", "spec": {"namespace": self.namespace},
        }  # fmt: skip
        path = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
        status = get(self.api.create(path, review, Shape), "status")
        rules = mappings(get(status, "resourceRules"))

        def denied(wanted: Iterable[tuple[str, str, str]]) -> str:
            return ", ".join(f"{verb} {name}" for verb, group, name in wanted if not _granted(rules, verb, group, name))

        wanted = [right for kind in self._kinds for right in rights(kind)]
        wanted += CODE_RIGHTS if self._given is not None and self._given.code is not None else ()
        wanted = list(dict.fromkeys(wanted))
        if missing := denied(wanted):
            sure = not get(status, "incomplete")  # an authorizer besides RBAC may grant rights that it does not list
            advice = f"may not {missing}: bind the Role of deploy/k8s/base/rbac.yaml"
            yield Check("rights", "missing" if sure else "cannot tell", advice)
        else:
            yield Check("rights", "ok", f"all {len(wanted)} that lockstep needs")
        if missing := denied(EXEC_RIGHTS):
            detail = f"may not {missing}: without it there is no `lockstep exec`; deploy/k8s/components/debug grants it"
            yield Check("exec", "note", detail)

    def _custom_resource(self) -> Rows:
        for kind in self._kinds:
            if self._serves(kind):
                yield Check("custom resource", "ok", f"{kind} {KINDS[kind][0]}")
            else:
                yield Check("custom resource", "missing", f"{kind} is not installed ({KINDS[kind][0]})")

    def _operator(self) -> Rows:
        deployments = [*self.api.pages("/apis/apps/v1/deployments")]
        for kind in self._kinds:
            containers = (
                (item, container)
                for item in deployments
                for container in mappings(get(item, "spec", "template", "spec", "containers"))
                if CONTROLLERS[kind] in str(container.get("image"))
            )
            item, container = next(containers, (None, {}))
            if item is None:
                yield Check("operator", "cannot tell", f"no deployment of an image named {CONTROLLERS[kind]}")
                continue
            ready = int(get(item, "status", "readyReplicas") or 0)
            yield Check("operator", "ok" if ready else "missing", f"{container['image']}, {ready} ready")
            if kind == "PyTorchJob":
                words = [str(word) for key in ("command", "args") for word in container.get(key) or []]
                gang = next((word.partition("=")[2] for word in words if word.startswith("--gang-scheduler-name")), "")
                off = "off (no --gang-scheduler-name): set k8s.queue, or pods may start one by one"
                yield Check("gang scheduling", "ok" if gang else "warning", gang or off)

    def _pod_monitor(self) -> Rows:
        path = f"/apis/monitoring.coreos.com/v1/namespaces/{self.namespace}/podmonitors"
        if self.api.find(path, Listing, limit=1) is not None:
            yield Check("pod monitor", "ok", "installed")
        else:
            detail = "the Prometheus operator is not installed: metrics are served, but nothing scrapes them"
            yield Check("pod monitor", "warning", detail)

    def _runtime(self) -> Rows:
        if kind_of(self.spec) != "TrainJob":
            return
        name = self.spec.k8s.runtime
        runtime = self.api.find(f"/apis/trainer.kubeflow.org/v1alpha1/clustertrainingruntimes/{name}")
        if runtime is None:
            missing = f"no ClusterTrainingRuntime {name}: apply deploy/k8s/overlays/trainer, or set k8s.runtime"
            yield Check("runtime", "missing", missing)
            return
        template = get(runtime, "spec", "template", "spec")
        nodes = [item for item in mappings(get(template, "replicatedJobs")) if item.get("name") == "node"]
        job = get(nodes, 0, "template", "spec")
        final = any(
            2 in (get(rule, "onExitCodes", "values") or []) and rule.get("action") == "FailJob"
            for rule in mappings(get(job, "podFailurePolicy", "rules"))
        )
        wanted = {
            "it retries wrong usage (no podFailurePolicy for exit code 2)": final,
            "its pods get a token": get(job, "template", "spec", "automountServiceAccountToken") is False,
            "finished jobs stay": get(template, "ttlSecondsAfterFinished") is not None,
        }
        lacks = ", ".join(text for text, there in wanted.items() if not there)
        yield Check("runtime", "warning" if lacks else "ok", f"{name}: {lacks}" if lacks else name)

    def _image(self) -> Rows:
        if problem := unpublished(self.spec):
            nodes = sum(1 for _ in self.api.pages("/api/v1/nodes"))
            detail = f"{problem} (the cluster has {nodes} nodes)"
            yield Check("image", "missing" if nodes > 1 else "warning", detail)

    @cached_property
    def _local_queue(self) -> tuple[Manifest | None, str]:
        """The queue of the job, and the version of Kueue's API that has it."""
        for version in KUEUE:
            path = f"/apis/{version}/namespaces/{self.namespace}/localqueues/{self.spec.k8s.queue}"
            if (local := self.api.find(path)) is not None:
                return local, version
        return None, ""

    @cached_property
    def _cluster_queue(self) -> tuple[Manifest, str, int]:
        """The ClusterQueue of the LocalQueue, its name, and its quota of the job's GPUs."""
        local, version = self._local_queue
        name = get(local, "spec", "clusterQueue")
        cluster: Manifest = self.api.get(f"/apis/{version}/clusterqueues/{name}")
        groups = mappings(get(cluster, "spec", "resourceGroups"))
        quota = sum(_amounts(group.get("flavors"), self.spec.k8s.gpu_resource, "nominalQuota") for group in groups)
        return cluster, str(name), quota

    def _queue(self) -> Rows:
        if (name := self.spec.k8s.queue) is None:
            return
        local, _ = self._local_queue
        if local is None:
            yield Check("queue", "missing", f"no LocalQueue {name} in {self.namespace}")
            return
        yield Check("queue", "ok", f"{name} → {get(local, 'spec', 'clusterQueue')}")
        cluster, of, quota = self._cluster_queue
        if wanted := self.spec.gpus * self.spec.nodes:
            # v1beta1 has `cohort`. The queue may borrow what other queues of the cohort do not use; this amount is not visible here.
            cohort = get(cluster, "spec", "cohortName") or get(cluster, "spec", "cohort")
            short: Result = "warning" if cohort else "missing"
            borrowed = f"; the rest would be borrowed from the cohort {cohort}" if cohort else ""
            fits = quota >= wanted
            detail = f"{quota} {self.spec.k8s.gpu_resource} in {of}, the job takes {wanted}"
            yield Check("quota", "ok" if fits else short, detail + ("" if fits else borrowed))

    @cached_property
    def _gpus_of_nodes(self) -> tuple[dict[str, int], int]:
        """Node → its GPUs, of the nodes that take pods; and the number of nodes that are not ready."""
        amounts, silent = {}, 0
        for node in self.api.pages("/api/v1/nodes"):
            amount = str(get(node, "status", "allocatable", self.spec.k8s.gpu_resource) or "0")
            ready = condition_of_type(node, "Ready")
            if ready and ready.get("status") != "True":
                silent += 1
            elif amount.isdecimal() and not get(node, "spec", "unschedulable"):
                amounts[str(get(node, "metadata", "name"))] = int(amount)
        return amounts, silent

    def _nodes(self) -> Rows:
        if not self.spec.gpus:
            return
        amounts, silent = self._gpus_of_nodes
        fit = sum(amount >= self.spec.gpus for amount in amounts.values())
        needed = self.spec.nodes if self.spec.k8s.spread == "required" else 1
        gpus = f"{self.spec.gpus} {self.spec.k8s.gpu_resource}"
        detail = f"{fit} of {len(amounts)} nodes have {gpus}, the job needs {needed}"
        away = f"; not ready: {silent} more" if silent else ""
        yield Check("nodes", "ok" if fit >= needed else "missing", detail + away)

    def _volumes(self) -> Rows:
        for volume in self.spec.volumes:
            claim = self.api.find(f"/api/v1/namespaces/{self.namespace}/persistentvolumeclaims/{volume.claim}")
            if claim is None:
                yield Check("volume", "missing", f"no claim {volume.claim} in {self.namespace}")
                continue
            modes = get(claim, "spec", "accessModes") or []
            sharing = {"ReadWriteMany", *(["ReadOnlyMany"] if volume.read_only else [])}
            detail = f"{volume.claim}: {', '.join(modes)}, {get(claim, 'status', 'phase')}"
            if self.spec.nodes == 1 or sharing & {*modes}:
                yield Check("volume", "ok", detail)
            else:
                yield Check("volume", "missing", f"{detail}: {self.spec.nodes} nodes need ReadWriteMany")

    def _pull_secrets(self) -> Rows:
        for name in self.spec.k8s.image_pull_secrets:
            if self.api.find(f"/api/v1/namespaces/{self.namespace}/secrets/{name}", accept=METADATA) is None:
                yield Check("pull secret", "missing", f"no Secret {name} in {self.namespace}")
            else:
                yield Check("pull secret", "ok", name)

    def _start(self) -> Rows:
        """Yields a row that says when the job starts: by the state of its queue, or else by the free GPUs of the nodes."""
        yield from self._admission() if self.spec.k8s.queue is not None else self._room()

    def _admission(self) -> Rows:
        (local, _), queue, resource = self._local_queue, self.spec.k8s.queue, self.spec.k8s.gpu_resource
        if local is None:
            return
        if (why := _inactive(local)) is not None:
            yield Check("start", "warning", f"the queue {queue} is not active: {why}")
            return
        if waiting := get(local, "status", "pendingWorkloads"):
            yield Check("start", "warning", f"{waiting} jobs wait in the queue {queue} before it")
            return
        cluster, of, quota = self._cluster_queue
        left = quota - _amounts(get(cluster, "status", "flavorsReservation"), resource, "total")
        wanted = self.spec.gpus * self.spec.nodes
        if (why := _inactive(cluster)) is not None:
            yield Check("start", "warning", f"the ClusterQueue {of} is not active: {why}")
        elif wanted > left:
            yield Check("start", "warning", f"{left} {resource} are left in {of}, the job takes {wanted}")
        else:
            yield Check("start", "ok", f"no workload waits in the queue {queue}, and its quota is not used up")

    def _room(self) -> Rows:
        spec, resource = self.spec, self.spec.k8s.gpu_resource
        if not spec.gpus:
            yield Check("start", "cannot tell", "which nodes have room, the scheduler says once the job is there")
            return
        free = dict(self._gpus_of_nodes[0])
        for pod in self.api.pages("/api/v1/pods"):
            node = get(pod, "spec", "nodeName")
            if node in free and get(pod, "status", "phase") not in ("Succeeded", "Failed"):
                taken = [get(one, "resources", "limits", resource) for one in mappings(get(pod, "spec", "containers"))]
                free[node] -= sum(int(amount) for amount in map(str, taken) if amount.isdecimal())
        alone = spec.k8s.spread == "required"
        fit = sum(amount >= spec.gpus if alone else max(0, amount) // spec.gpus for amount in free.values())
        detail = f"{fit} of {spec.nodes} pods find {spec.gpus} free {resource}"
        yield Check("start", "ok" if fit >= spec.nodes else "warning", detail)


def rights(kind: str) -> list[tuple[str, str, str]]:
    """Returns (verb, group, resource) of every request of lockstep for this kind of job."""
    version, plural = KINDS[kind]
    batch = [("get", "batch", "jobs")] if kind == "TrainJob" else []  # for the events of refused pods
    return [*((verb, version.partition("/")[0], plural) for verb in JOB_VERBS), *RIGHTS, *batch]


def _granted(rules: list[Manifest], verb: str, group: str, resource: str) -> bool:
    """Returns whether a rule grants the right for all objects."""
    wanted = {"verbs": {verb}, "apiGroups": {group}, "resources": {resource, f"*/{resource.partition('/')[2]}"}}
    return any(
        not rule.get("resourceNames") and all({*names, "*"} & {*(rule.get(key) or [])} for key, names in wanted.items())
        for rule in rules
    )


def _amounts(rows: object, resource: str, amount: str) -> int:
    """Returns the amount of a resource, over all flavors."""
    items = [item for flavor in mappings(rows) for item in mappings(flavor.get("resources"))]
    values = [str(item.get(amount, "")) for item in items if item.get("name") == resource]
    return sum(int(value) for value in values if value.isdecimal())


def _inactive(queue: Manifest) -> str | None:
    """Returns why Kueue admits nothing from the queue; None if it admits jobs."""
    active = condition_of_type(queue, "Active")
    return str(active.get("message")) if active.get("status") == "False" else None
