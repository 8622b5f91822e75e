"""Pre-flight checks: what would keep a job from running is found before it waits in a queue.

Every check says ok, missing, warning, or "cannot tell" where the rights to look are not there. No Secret's content is
ever asked for: only its metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from lockstep.training.contract import UserError

from ..lint import Finding
from ..manifest import Manifest, get, mappings
from ..spec.model import JobSpec
from ..status import Check, LoggedOut, Result
from .answers import METADATA, ApiError, Listing, Shape
from .render import KINDS, KUEUE, kind_of
from .rules import unpublished

if TYPE_CHECKING:
    from .api import Api


class Reached(Protocol):
    """A namespace of a cluster that answers."""

    api: Api
    namespace: str

    def path(self, kind: str, name: str = "") -> str: ...


RIGHTS = (
    ("list", "", "pods"), ("get", "", "pods"), ("get", "", "pods/log"), ("list", "", "events"),
    ("create", "networking.k8s.io", "networkpolicies"), ("get", "networking.k8s.io", "networkpolicies"),
)  # fmt: skip
"""(verb, group, resource), beside those on the kind of job that is used."""
CODE_RIGHTS = tuple((verb, "", "configmaps") for verb in ("create", "list"))
"""For a job with code of one's own."""
EXEC_RIGHTS = (("create", "", "pods/exec"), ("get", "", "pods/exec"))
"""For `lockstep exec`, which no job needs."""
JOB_VERBS = ("create", "get", "list", "patch", "delete")
CONTROLLERS = {"PyTorchJob": "training-operator", "TrainJob": "trainer-controller-manager"}
"""Part of the name of each controller's image."""


def without_cluster(reason: str, findings: list[Finding] | None) -> list[Check]:
    """What can be checked where no cluster answers."""
    return [Check("cluster", "missing", reason), *_rules(findings)]


def _rules(findings: list[Finding] | None) -> list[Check]:
    """What `submit` would refuse or warn of, which no cluster is needed for; nothing without a job."""
    if findings is None:
        return []
    checks = [Check(item.id, "missing" if item.level == "error" else item.level, item.message) for item in findings]
    return checks or [Check("rules", "ok", "lint finds nothing in the job")]


def check(backend: Reached, spec: JobSpec | None, findings: list[Finding] | None) -> list[Check]:
    """The checks in order; the first failure to reach the cluster ends them."""
    try:
        version = backend.api.get("/version", Shape).get("gitVersion", "?")
        found = [Check("cluster", "ok", f"{backend.api.host}, Kubernetes {version}"), *_guarded("who", _who(backend))]
    except (UserError, ApiError) as error:
        return without_cluster(str(error), findings)
    looks: dict[str, Callable[..., Iterator[Check]]] = {
        "rights": _rights, "custom resource": _custom_resource, "operator": _operator, "pod monitor": _pod_monitor,
    }  # fmt: skip
    if spec is not None:
        looks |= {
            "runtime": _runtime, "image": _image, "queue": _queue, "nodes": _nodes, "volumes": _volumes,
            "pull secrets": _pull_secrets,
        }  # fmt: skip
    for name, look in looks.items():
        found += _guarded(name, look(backend, spec))
    return [*found, *_rules(findings)]


def outlook(backend: Reached, spec: JobSpec) -> list[Check]:
    """What a job would meet that the server takes. Raises `UserError`, `ApiError`."""
    looks = {"runtime": _runtime, "queue": _queue, "nodes": _nodes, "volumes": _volumes, "pull secrets": _pull_secrets}
    return [row for name, look in {**looks, "start": _start}.items() for row in _guarded(name, look(backend, spec))]


def _guarded(name: str, rows: Iterator[Check]) -> list[Check]:
    """Raises `LoggedOut`: then nothing can be told."""
    found: list[Check] = []
    try:
        found.extend(rows)
    except LoggedOut:
        raise
    except (UserError, ApiError) as error:
        said = f"the server answered {error.status}: " if isinstance(error, ApiError) and error.status != 403 else ""
        found.append(Check(name, "cannot tell", f"{said}{' '.join(str(error).split())[:200]}"))
    return found


def _who(backend: Reached) -> Iterator[Check]:
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    answer = backend.api.create("/apis/authentication.k8s.io/v1/selfsubjectreviews", body, Shape)
    yield Check("who", "ok", f"{get(answer, 'status', 'userInfo', 'username')}, namespace {backend.namespace}")


def rights(kind: str) -> list[tuple[str, str, str]]:
    """(verb, group, resource) of all that lockstep calls for this kind of job."""
    version, plural = KINDS[kind]
    batch = [("get", "batch", "jobs")] if kind == "TrainJob" else []  # what its pods are refused for
    return [*((verb, version.partition("/")[0], plural) for verb in JOB_VERBS), *RIGHTS, *batch]


def _kind(spec: JobSpec | None) -> str:
    return kind_of(spec) if spec else "PyTorchJob"


def _rights(backend: Reached, spec: JobSpec | None) -> Iterator[Check]:
    body = {
        "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview", "spec": {"namespace": backend.namespace},
    }  # fmt: skip
    status = get(backend.api.create("/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", body, Shape), "status")
    rules = mappings(get(status, "resourceRules"))

    def denied(wanted: Iterable[tuple[str, str, str]]) -> str:
        return ", ".join(f"{verb} {name}" for verb, group, name in wanted if not _granted(rules, verb, group, name))

    wanted = rights(_kind(spec))
    wanted += CODE_RIGHTS if spec is not None and spec.code is not None else ()
    if missing := denied(wanted):
        sure = not get(status, "incomplete")  # an authorizer besides RBAC may grant what it does not list
        advice = f"may not {missing}: bind the Role of deploy/k8s/base/rbac.yaml"
        yield Check("rights", "missing" if sure else "cannot tell", advice)
    else:
        yield Check("rights", "ok", f"all {len(wanted)} that lockstep needs")
    if missing := denied(EXEC_RIGHTS):
        detail = f"may not {missing}: without it there is no `lockstep exec`; deploy/k8s/components/debug grants it"
        yield Check("exec", "note", detail)


def _granted(rules: list[Manifest], verb: str, group: str, resource: str) -> bool:
    """Whether a rule allows it for all objects."""
    wanted = {"verbs": {verb}, "apiGroups": {group}, "resources": {resource, f"*/{resource.partition('/')[2]}"}}
    return any(
        not rule.get("resourceNames") and all({*names, "*"} & {*(rule.get(key) or [])} for key, names in wanted.items())
        for rule in rules
    )


def _custom_resource(backend: Reached, spec: JobSpec | None) -> Iterator[Check]:
    kind = _kind(spec)
    if backend.api.find(backend.path(kind), Listing, limit=1) is None:
        yield Check("custom resource", "missing", f"{kind} is not installed ({KINDS[kind][0]})")
    else:
        yield Check("custom resource", "ok", f"{kind} {KINDS[kind][0]}")


def _operator(backend: Reached, spec: JobSpec | None) -> Iterator[Check]:
    kind = _kind(spec)
    controller = CONTROLLERS[kind]
    for item in backend.api.pages("/apis/apps/v1/deployments"):
        for container in mappings(get(item, "spec", "template", "spec", "containers")):
            if controller not in str(container.get("image")):
                continue
            ready = int(get(item, "status", "readyReplicas") or 0)
            state: Result = "ok" if ready else "missing"
            yield Check("operator", state, f"{container['image']}, {ready} ready")
            if kind == "TrainJob":
                return
            words = [str(word) for key in ("command", "args") for word in container.get(key) or []]
            gang = next((word.partition("=")[2] for word in words if word.startswith("--gang-scheduler-name")), "")
            if gang:
                yield Check("gang scheduling", "ok", gang)
            else:
                yield Check(
                    "gang scheduling",
                    "warning",
                    "off (no --gang-scheduler-name): set k8s.queue, or pods may start one by one",
                )
            return
    yield Check("operator", "cannot tell", f"no deployment of an image named {controller}")


def _runtime(backend: Reached, spec: JobSpec) -> Iterator[Check]:
    if kind_of(spec) != "TrainJob":
        return
    name = spec.k8s.runtime
    runtime = backend.api.find(f"/apis/trainer.kubeflow.org/v1alpha1/clustertrainingruntimes/{name}")
    if runtime is None:
        missing = f"no ClusterTrainingRuntime {name}: apply deploy/k8s/overlays/trainer, or set k8s.runtime"
        yield Check("runtime", "missing", missing)
        return
    nodes = [
        item
        for item in mappings(get(runtime, "spec", "template", "spec", "replicatedJobs"))
        if item.get("name") == "node"
    ]
    job = get(nodes, 0, "template", "spec")
    rules = mappings(get(job, "podFailurePolicy", "rules"))
    final = any(2 in (get(rule, "onExitCodes", "values") or []) and rule.get("action") == "FailJob" for rule in rules)
    lacks = [
        text
        for text, there in (
            ("it retries wrong usage (no podFailurePolicy for exit code 2)", final),
            ("its pods get a token", get(job, "template", "spec", "automountServiceAccountToken") is False),
            ("finished jobs stay", get(runtime, "spec", "template", "spec", "ttlSecondsAfterFinished") is not None),
        )
        if not there
    ]
    yield Check("runtime", "warning" if lacks else "ok", f"{name}{': ' if lacks else ''}{', '.join(lacks)}")


def _image(backend: Reached, spec: JobSpec) -> Iterator[Check]:
    if not (problem := unpublished(spec)):
        return
    nodes = sum(1 for _ in backend.api.pages("/api/v1/nodes"))
    yield Check("image", "missing" if nodes > 1 else "warning", f"{problem} (the cluster has {nodes} nodes)")


def _pod_monitor(backend: Reached, spec: JobSpec | None) -> Iterator[Check]:  # noqa: ARG001 - every check is asked with both
    path = f"/apis/monitoring.coreos.com/v1/namespaces/{backend.namespace}/podmonitors"
    if backend.api.find(path, Listing, limit=1) is not None:
        yield Check("pod monitor", "ok", "installed")
        return
    detail = "the Prometheus operator is not installed: metrics are served, but nothing scrapes them"
    yield Check("pod monitor", "warning", detail)


def _local_queue(backend: Reached, name: str | None) -> tuple[Manifest | None, str]:
    """The queue, and the version of the API that has it."""
    for version in KUEUE:
        path = f"/apis/{version}/namespaces/{backend.namespace}/localqueues/{name}"
        if (local := backend.api.find(path)) is not None:
            return local, version
    return None, ""


def _amounts(rows: object, resource: str, amount: str) -> int:
    """Of a resource, over all flavors."""
    found = [item for flavor in mappings(rows) for item in mappings(flavor.get("resources"))]
    values = [str(item.get(amount, "")) for item in found if item.get("name") == resource]
    return sum(int(value) for value in values if value.isdecimal())


def _quota(cluster: Manifest, resource: str) -> int:
    groups = mappings(get(cluster, "spec", "resourceGroups"))
    return sum(_amounts(group.get("flavors"), resource, "nominalQuota") for group in groups)


def _queue(backend: Reached, spec: JobSpec) -> Iterator[Check]:
    if spec.k8s.queue is None:
        return
    name = spec.k8s.queue
    local, version = _local_queue(backend, name)
    if local is None:
        yield Check("queue", "missing", f"no LocalQueue {name} in {backend.namespace}")
        return
    of = get(local, "spec", "clusterQueue")
    yield Check("queue", "ok", f"{name} → {of}")
    cluster = backend.api.get(f"/apis/{version}/clusterqueues/{of}")
    wanted, quota = spec.gpus * spec.nodes, _quota(cluster, spec.k8s.gpu_resource)
    if wanted:
        # v1beta1 says `cohort`. What others of it do not use, the queue may borrow: how much cannot be seen here.
        cohort = get(cluster, "spec", "cohortName") or get(cluster, "spec", "cohort")
        short: Result = "warning" if cohort else "missing"
        borrowed = f"; the rest would be borrowed from the cohort {cohort}" if cohort else ""
        fits = quota >= wanted
        detail = f"{quota} {spec.k8s.gpu_resource} in {of}, the job takes {wanted}"
        yield Check("quota", "ok" if fits else short, detail + ("" if fits else borrowed))


def _gpus_of_nodes(backend: Reached, spec: JobSpec) -> tuple[dict[str, int], int]:
    """Node → its GPUs, of those that take pods; and how many are not ready."""
    amounts, silent = {}, 0
    for node in backend.api.pages("/api/v1/nodes"):
        ready = [item for item in mappings(get(node, "status", "conditions")) if item.get("type") == "Ready"]
        amount = str(get(node, "status", "allocatable", spec.k8s.gpu_resource) or "0")
        if ready and ready[0].get("status") != "True":
            silent += 1
        elif amount.isdecimal() and not get(node, "spec", "unschedulable"):
            amounts[str(get(node, "metadata", "name"))] = int(amount)
    return amounts, silent


def _nodes(backend: Reached, spec: JobSpec) -> Iterator[Check]:
    if not spec.gpus:
        return
    amounts, silent = _gpus_of_nodes(backend, spec)
    fit = sum(amount >= spec.gpus for amount in amounts.values())
    needed = spec.nodes if spec.k8s.spread == "required" else 1
    detail = f"{fit} of {len(amounts)} nodes have {spec.gpus} {spec.k8s.gpu_resource}, the job needs {needed}"
    away = f"; not ready: {silent} more" if silent else ""
    yield Check("nodes", "ok" if fit >= needed else "missing", detail + away)


def _start(backend: Reached, spec: JobSpec) -> Iterator[Check]:
    """When: with a queue its state says, without one what the nodes have free."""
    yield from _admission(backend, spec) if spec.k8s.queue is not None else _room(backend, spec)


def _admission(backend: Reached, spec: JobSpec) -> Iterator[Check]:
    local, version = _local_queue(backend, spec.k8s.queue)
    of, resource, wanted = get(local, "spec", "clusterQueue"), spec.k8s.gpu_resource, spec.gpus * spec.nodes
    if (why := _inactive(local)) is not None:
        yield Check("start", "warning", f"the queue {spec.k8s.queue} is not active: {why}")
    elif waiting := get(local, "status", "pendingWorkloads"):
        yield Check("start", "warning", f"{waiting} jobs wait in the queue {spec.k8s.queue} before it")
    elif local is not None:
        cluster = backend.api.get(f"/apis/{version}/clusterqueues/{of}")
        left = _quota(cluster, resource) - _amounts(get(cluster, "status", "flavorsReservation"), resource, "total")
        if (why := _inactive(cluster)) is not None:
            yield Check("start", "warning", f"the ClusterQueue {of} is not active: {why}")
        elif wanted > left:
            yield Check("start", "warning", f"{left} {resource} are left in {of}, the job takes {wanted}")
        else:
            yield Check("start", "ok", f"nobody waits in the queue {spec.k8s.queue}, and its quota is not used up")


def _inactive(queue: Manifest | None) -> str | None:
    """Why Kueue admits nothing from it; None where it does."""
    active = [item for item in mappings(get(queue, "status", "conditions")) if item.get("type") == "Active"]
    return str(active[0].get("message")) if active and active[0].get("status") == "False" else None


def _room(backend: Reached, spec: JobSpec) -> Iterator[Check]:
    if not spec.gpus:
        yield Check("start", "cannot tell", "which nodes have room, the scheduler says once the job is there")
        return
    free, resource = _gpus_of_nodes(backend, spec)[0], spec.k8s.gpu_resource
    for pod in backend.api.pages("/api/v1/pods"):
        node = get(pod, "spec", "nodeName")
        if node in free and get(pod, "status", "phase") not in ("Succeeded", "Failed"):
            taken = [get(one, "resources", "limits", resource) for one in mappings(get(pod, "spec", "containers"))]
            free[node] -= sum(int(amount) for amount in map(str, taken) if amount.isdecimal())
    alone = spec.k8s.spread == "required"
    fit = sum(amount >= spec.gpus if alone else max(0, amount) // spec.gpus for amount in free.values())
    detail = f"{fit} of {spec.nodes} pods find {spec.gpus} free {resource}"
    yield Check("start", "ok" if fit >= spec.nodes else "warning", detail)


def _volumes(backend: Reached, spec: JobSpec) -> Iterator[Check]:
    for volume in spec.volumes:
        claim = backend.api.find(f"/api/v1/namespaces/{backend.namespace}/persistentvolumeclaims/{volume.claim}")
        if claim is None:
            yield Check("volume", "missing", f"no claim {volume.claim} in {backend.namespace}")
            continue
        modes = get(claim, "spec", "accessModes") or []
        shared = bool({"ReadWriteMany", "ReadOnlyMany"} & set(modes)) if volume.read_only else "ReadWriteMany" in modes
        detail = f"{volume.claim}: {', '.join(modes)}, {get(claim, 'status', 'phase')}"
        if shared or spec.nodes == 1:
            yield Check("volume", "ok", detail)
        else:
            yield Check("volume", "missing", f"{detail}: {spec.nodes} nodes need ReadWriteMany")


def _pull_secrets(backend: Reached, spec: JobSpec) -> Iterator[Check]:
    for name in spec.k8s.image_pull_secrets:
        if backend.api.find(f"/api/v1/namespaces/{backend.namespace}/secrets/{name}", accept=METADATA) is None:
            yield Check("pull secret", "missing", f"no Secret {name} in {backend.namespace}")
        else:
            yield Check("pull secret", "ok", name)
