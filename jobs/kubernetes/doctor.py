"""Checks of what keeps a job from running in a cluster: the rows of `doctor` and of `submit --dry-run`.

Every row says ok, missing, warning, or "cannot tell" if the rights to check are missing. It asks only what the rights in
`deploy/k8s/base` allow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property

from lockstep.training.contract import UserError

from ..manifest import Manifest, get, mappings
from ..spec.model import JobSpec
from ..status import Check, LoggedOut
from .api import Api, Listing, Shape
from .observe import condition
from .render import KINDS, KUEUE, of_kind, path_of

RIGHTS = (
    ("list", "", "pods"), ("get", "", "pods"), ("get", "", "pods/log"), ("list", "", "events"),
    ("create", "networking.k8s.io", "networkpolicies"), ("get", "networking.k8s.io", "networkpolicies"),
)  # fmt: skip
"""(verb, group, resource), in addition to those on the kind of job that is used."""
CODE_RIGHTS = (("create", "", "configmaps"),)
"""Right for a job with its own code."""
EXEC_RIGHTS = (("create", "", "pods/exec"), ("get", "", "pods/exec"))
"""Rights for `lockstep exec`, which no job needs."""
JOB_VERBS = ("create", "get", "list", "patch", "delete")
Rows = Iterator[Check]


class Doctor:
    """Queries of a cluster, for a job or without one. `rows` runs all queries, in order."""

    def __init__(self, api: Api, namespace: str, spec: JobSpec | None) -> None:
        self.api, self.namespace, self.spec = api, namespace, spec

    def cluster(self) -> list[Check]:
        """Returns a row for the cluster and a row for the user. Raises `UserError` if the cluster does not answer: then no query can."""
        version = self.api.get("/version", Shape).get("gitVersion", "?")
        return [Check("cluster", "ok", f"{self.api.host}, Kubernetes {version}"), *_guarded("who", self._who())]

    def rows(self) -> list[Check]:
        """Returns the rows of all queries, in order. Raises `LoggedOut`."""
        queries = {"rights": self._rights(), "custom resource": self._custom_resource()}
        if self.spec is not None:
            queries |= {"volumes": self._volumes(self.spec), "queue": self._queue(self.spec)}
        return [row for name, query in queries.items() for row in _guarded(name, query)]

    @cached_property
    def _kinds(self) -> list[str]:
        """The kind of the job; without a job, the kinds that the cluster serves and that the user may use."""
        if self.spec is not None:
            return [of_kind(self.spec).k8s.kind]
        return [kind for kind, _ in self.api.jobs(self.namespace, limit=1)] or [*KINDS]

    def _who(self) -> Rows:
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        answer = self.api.create("/apis/authentication.k8s.io/v1/selfsubjectreviews", body, Shape)
        yield Check("who", "ok", f"{get(answer, 'status', 'userInfo', 'username')}, namespace {self.namespace}")

    def _rights(self) -> Rows:
        version = "authorization.k8s.io/v1"
        review = {"apiVersion": version, "kind": "SelfSubjectRulesReview", "spec": {"namespace": self.namespace}}
        status = get(self.api.create(f"/apis/{version}/selfsubjectrulesreviews", review, Shape), "status")
        rules = mappings(get(status, "resourceRules"))

        def denied(wanted: Iterable[tuple[str, str, str]]) -> str:
            return ", ".join(f"{verb} {name}" for verb, group, name in wanted if not _granted(rules, verb, group, name))

        wanted = [right for kind in self._kinds for right in rights(kind)]
        wanted += CODE_RIGHTS if self.spec is not None and self.spec.code is not None else ()
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
            if self.api.find(path_of(self.namespace, kind), Listing, limit=1) is not None:
                yield Check("custom resource", "ok", f"{kind} {KINDS[kind][0]}")
            else:
                yield Check("custom resource", "missing", f"{kind} is not installed ({KINDS[kind][0]})")

    def _volumes(self, spec: JobSpec) -> Rows:
        for volume in spec.volumes:
            claim = self.api.find(f"/api/v1/namespaces/{self.namespace}/persistentvolumeclaims/{volume.claim}")
            if claim is None:
                yield Check("volume", "missing", f"no claim {volume.claim} in {self.namespace}")
                continue
            modes = get(claim, "spec", "accessModes") or []
            sharing = {"ReadWriteMany", *(["ReadOnlyMany"] if volume.read_only else [])}
            detail = f"{volume.claim}: {', '.join(modes)}, {get(claim, 'status', 'phase')}"
            if spec.nodes == 1 or sharing & {*modes}:
                yield Check("volume", "ok", detail)
            else:
                yield Check("volume", "missing", f"{detail}: {spec.nodes} nodes need ReadWriteMany")

    def _queue(self, spec: JobSpec) -> Rows:
        """Yields a row for the queue, and a row that says when the job starts: the queue's state, which alone is visible before."""
        if (name := spec.k8s.queue) is None:
            yield Check("start", "cannot tell", "the scheduler says which nodes have room once the job is there")
            return
        places = (f"/apis/{version}/namespaces/{self.namespace}/localqueues/{name}" for version in KUEUE)
        local = next((queue for path in places if (queue := self.api.find(path)) is not None), None)
        if local is None:
            yield Check("queue", "missing", f"no LocalQueue {name} in {self.namespace}")
            return
        yield Check("queue", "ok", f"{name} → {get(local, 'spec', 'clusterQueue')}")
        active, waiting = condition(local, "Active", None), get(local, "status", "pendingWorkloads")
        if active.get("status") == "False":
            yield Check("start", "warning", f"the queue {name} is not active: {active.get('message')}")
        elif waiting:
            yield Check("start", "warning", f"{waiting} jobs wait in the queue {name} before it")
        else:
            yield Check(
                "start", "cannot tell", f"no job waits in the queue {name}; Kueue says whether its quota is free"
            )


def _guarded(name: str, query: Rows) -> Rows:
    """Yields the rows of a query. Raises `LoggedOut`: then no query can answer."""
    try:
        yield from query
    except LoggedOut:
        raise
    except UserError as error:
        yield Check(name, "cannot tell", str(error)[:200])


def rights(kind: str) -> list[tuple[str, str, str]]:
    """Returns (verb, group, resource) of every request of lockstep for this kind of job."""
    version, plural = KINDS[kind]
    return [*((verb, version.partition("/")[0], plural) for verb in JOB_VERBS), *RIGHTS]


def _granted(rules: list[Manifest], verb: str, group: str, resource: str) -> bool:
    """Returns whether a rule grants the right for all objects."""
    wanted = {"verbs": {verb}, "apiGroups": {group}, "resources": {resource, f"*/{resource.partition('/')[2]}"}}
    return any(
        not rule.get("resourceNames") and all({*names, "*"} & {*(rule.get(key) or [])} for key, names in wanted.items())
        for rule in rules
    )
