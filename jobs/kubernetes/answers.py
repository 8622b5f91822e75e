"""A server's answers: their shape, and which error a person is told.

What is read of an answer has the type that it is read as, or nobody reads it.

Null is as good as missing: a server writes an empty list or mapping as null. Fields that nobody reads are not looked at.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lockstep.training.contract import UserError

from ..status import Unreachable

MAX_PODS = 1_000_000
"""Of a job: far above what a cluster holds, and a list of their names still fits into memory."""
METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
"""Answers without what is in the objects."""
INSTALL = {"PyTorchJob": "the Kubeflow training-operator", "TrainJob": "Kubeflow Trainer"}
Text = str | None
Count = int | None
Number = Annotated[int | None, Field(ge=0, le=MAX_PODS)]


class Shape(BaseModel):
    """Of any answer: a mapping."""

    model_config = ConfigDict(strict=True, extra="ignore", defer_build=True)  # `render` needs none of them


class Failure(Shape):
    """A Status: what a server answers in place of what was asked for."""

    message: Text = None
    reason: Text = None


class Owner(Shape):
    kind: Text = None
    name: Text = None
    uid: Text = None


class Metadata(Shape):
    resourceVersion: Text = None
    next_page: Text = Field(None, alias="continue")


class Identity(Metadata):
    name: str = Field(min_length=1)
    uid: str = Field(min_length=1)
    """Without it a deletion could meet another object of the same name."""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    creationTimestamp: Text = None
    deletionTimestamp: Text = None
    ownerReferences: list[Owner] | None = None


class Condition(Shape):
    type: Text = None
    status: Text = None
    reason: Text = None
    message: Text = None


class How(Shape):
    """How a container waits, or has ended."""

    exitCode: Count = None
    reason: Text = None
    message: Text = None
    finishedAt: Text = None


class ContainerState(Shape):
    waiting: How | None = None
    terminated: How | None = None


class ContainerStatus(Shape):
    name: Text = None
    image: Text = None
    restartCount: Count = None
    state: ContainerState | None = None
    lastState: ContainerState | None = None


class Ready(Shape):
    ready: Count = None


class Status(Shape):
    phase: Text = None
    reason: Text = None
    message: Text = None
    conditions: list[Condition] | None = None
    containerStatuses: list[ContainerStatus] | None = None
    initContainerStatuses: list[ContainerStatus] | None = None
    jobsStatus: list[Ready] | None = None
    readyReplicas: Count = None


class Container(Shape):
    image: Text = None
    command: list[str] | None = None
    args: list[str] | None = None


class Replica(Shape):
    replicas: Number = None


class Trainer(Shape):
    numNodes: Number = None


class ExitCodes(Shape):
    values: list[int] | None = None


class FailureRule(Shape):
    action: Text = None
    onExitCodes: ExitCodes | None = None


class FailurePolicy(Shape):
    rules: list[FailureRule] | None = None


class Template(Shape):
    spec: Spec | None = None


class ReplicatedJob(Shape):
    name: Text = None
    template: Template | None = None


class Spec(Shape):
    """Of a job, a pod and what else is looked at: one name means one thing in all of them."""

    pytorchReplicaSpecs: dict[str, Replica | None] | None = None
    trainer: Trainer | None = None
    suspend: bool | None = None
    hostname: Text = None
    nodeName: Text = None
    queueName: Text = None
    clusterQueue: Text = None
    cohort: Text = None
    cohortName: Text = None
    accessModes: list[str] | None = None
    template: Template | None = None
    replicatedJobs: list[ReplicatedJob] | None = None
    containers: list[Container] | None = None
    podFailurePolicy: FailurePolicy | None = None


class About(Shape):
    name: Text = None
    uid: Text = None


class Item(Shape):
    """An object that is stored: a job, a pod, an event, or its metadata alone."""

    metadata: Identity
    spec: Spec | None = None
    status: Status | None = None
    type: Text = None
    reason: Text = None
    message: Text = None
    lastTimestamp: Text = None
    eventTime: Text = None
    count: Count = None
    involvedObject: About | None = None


class Listing(Shape):
    metadata: Metadata | None = None
    items: list[Item] | None


def checked(text: bytes | str, shape: type[Shape]) -> dict[str, Any]:
    """An answer as plain values. Raises `ValueError` that says in one line what is wrong with it."""
    try:
        value = json.loads(text)
    except ValueError:
        raise ValueError("no JSON") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    try:
        shape.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{place or 'the whole'}: {first['msg'].lower()}") from None
    return dict(value)


class ApiError(Exception):
    """The server's refusal: HTTP status, its reason word, its message."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class Failing(Unreachable):
    """Every attempt met an error of the server itself, or of a webhook that it asks."""


class Gone(Exception):
    """410: the resource version of a page is too old. List again."""


@contextlib.contextmanager
def as_user_errors(host: str, kind: str = "") -> Iterator[None]:
    """The server's refusals as one line that says what to do. `kind`: of the object that was asked for."""
    try:
        yield
    except Gone:
        raise Unreachable(f"{host} no longer has the version that was asked for: try again") from None
    except ApiError as error:
        message = " ".join(str(error).split())
        if error.status == 403:
            raise UserError(_forbidden(message)) from None
        if error.status >= 500:
            raise Unreachable(f"{host} answers {error.status}: {message}") from None
        if error.status == 404 and "namespaces " in message:
            raise UserError(
                f"the cluster does not have the namespace: {message}; choose another one (--namespace, k8s.namespace), or make it "
                "(make install-k8s)"
            ) from None
        if error.status == 404 and kind in INSTALL:
            raise UserError(
                f"the cluster does not have {kind}: install {INSTALL[kind]}, see `lockstep doctor k8s`"
            ) from None
        advice = ""
        if kind == "TrainJob" and outdated(message):
            advice = "; a TrainJob needs Kubeflow Trainer 2.3 or later: ask for it, or use k8s.kind PyTorchJob"
        raise UserError(f"the cluster refuses ({error.status} {error.reason}): {message}{advice}") from None


def outdated(message: str) -> bool:
    """Whether Trainer is too old for a field of the job."""
    return "unknown field" in message and "runtimePatches" in message


_DENIED = re.compile(r'admission webhook "(?P<name>[^"]+)" denied the request: (?P<why>.*)')


def _forbidden(message: str) -> str:
    """403 is the answer to four things. What is forbidden stands before the reason, and may hold any word."""
    if webhook := _DENIED.fullmatch(message):
        return f"the cluster's admission webhook {webhook['name']} refuses it: {webhook['why']}"
    why = message.rpartition(" is forbidden: ")[2]
    if why.startswith("exceeded quota"):
        return f"the namespace's quota does not allow it: {message}; wait for other jobs to end, or ask for more"
    if "being terminated" in why or "is terminating" in why:
        return f"the namespace is being deleted: {message}; use another one, or wait until it is there again"
    return f"not allowed: {message}; ask for the rights in deploy/k8s/base/rbac.yaml of this version"
