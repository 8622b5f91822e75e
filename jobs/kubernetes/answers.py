"""The shape of a server's answers. What is read of them has the type that it is read as, or nobody reads it.

Null is as good as missing: a server writes an empty list or mapping as null. Fields that nobody reads are not looked at.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MOST_PODS = 1_000_000
"""Of a job: far above what a cluster holds, and a list of their names still fits into memory."""
Text = str | None
Count = int | None
Number = Annotated[int | None, Field(ge=0, le=MOST_PODS)]


class Shape(BaseModel):
    """Of any answer: a mapping."""

    model_config = ConfigDict(strict=True, extra="ignore")


class Owner(Shape):
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


class Active(Shape):
    active: Count = None


class Status(Shape):
    phase: Text = None
    reason: Text = None
    message: Text = None
    conditions: list[Condition] | None = None
    containerStatuses: list[ContainerStatus] | None = None
    initContainerStatuses: list[ContainerStatus] | None = None
    jobsStatus: list[Active] | None = None
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
    hostname: Text = None
    nodeName: Text = None
    queueName: Text = None
    clusterQueue: Text = None
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
    involvedObject: About | None = None


class Listing(Shape):
    metadata: Metadata | None = None
    items: list[Item] | None


class Event(Shape):
    """A line of a watch. What has changed is asked for anew."""

    type: str
    object: Shape


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
