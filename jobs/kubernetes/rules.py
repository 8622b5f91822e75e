"""The lint rules of Kubernetes: what keeps a job from running there, and what a patch changes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from .. import lint
from ..lint import volume_of
from ..manifest import Change, Manifest, changes, get, mappings
from ..spec.model import JobSpec
from . import render
from .render import CONTAINERS, kind_of

PYTORCHJOB = ("PyTorchJob",)
TRAINJOB = ("TrainJob",)
INJECTED = re.compile(
    r"PET_.*|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|GROUP_RANK|TORCHELASTIC_.*"
)
_FOUND_BY = re.compile(
    r"apiVersion|kind|metadata(\.(name|namespace|labels|annotations)(\..*)?)?|.*\.template\.metadata(\.labels(\..*)?)?"
    r"|spec(\.(runPolicy|trainer|runtimePatches|pytorchReplicaSpecs(\.Worker)?))?"
)
"""Places by which Lockstep finds a job and its pods, and what must stay a mapping or a list."""


class Subject(lint.Subject):
    """A PyTorchJob or TrainJob."""

    volumes = True

    @property
    def kind(self) -> str:  # type: ignore[override]  # read, never set
        return kind_of(self.spec)

    @cached_property
    def job(self) -> Manifest:
        """With the patch."""
        return next((item for item in self.objects if item.get("kind") != "NetworkPolicy"), {})

    @cached_property
    def patched(self) -> list[Change]:
        """What the patch has made of the rendered job."""
        policy = next((item for item in self.objects if item.get("kind") == "NetworkPolicy"), None)
        if policy is None or not self.spec.k8s.patch:
            return []
        return [*changes(render.job(self.spec, render.submission_in(policy, self.spec)), self.job)]

    @cached_property
    def environment(self) -> dict[str, Any]:
        """Of the ranks' container, where the patch has left it in its place."""
        worker = get(self.job, "spec", "pytorchReplicaSpecs", "Worker", "template", "spec", "containers")
        ours = [item for item in mappings(worker) if item.get("name") == CONTAINERS["PyTorchJob"]]
        items = get(self.job, "spec", "trainer", "env") if self.kind == "TrainJob" else get(ours, 0, "env")
        return {str(item.get("name")): item.get("value") for item in mappings(items)}


RULES = lint.Rules(Subject)
rule = RULES.rule


@rule("LS001")
def name_length(subject: Subject) -> Iterator[str]:
    """Pod and Service names hold the job's name and have at most 63 characters."""
    name, last = subject.spec.name, subject.spec.nodes - 1
    longest = 63 - len(f"-node-0-{last}-xxxxx" if subject.kind == "TrainJob" else f"-worker-{last}")
    if len(name) > longest:
        yield f"the name {name[:40]}… has {len(name)} characters, at most {longest} are possible with these pods: shorten it"


@rule("LS012")
def injected_variables(subject: Subject) -> Iterator[str]:
    """The operator and the launcher set these variables; a value of yours is overridden, or breaks the job."""
    for name in sorted(subject.environment):
        if INJECTED.fullmatch(name):
            yield f"env sets {name}, which the operator or the launcher sets: remove it"


@rule("LS019", "warning")
def durable_run(subject: Subject) -> Iterator[str]:
    """A run directory on no persistent volume is gone with the pod; what is kept in a bucket is not."""
    spec = subject.spec
    if spec.checkpoints_bucket is None and volume_of(spec, spec.run_directory) is None:
        yield (
            f"run_dir {spec.run_directory} is not on a volume: a restart would begin anew, uncounted; add one to volumes, or set "
            "checkpoint.to to a bucket"
        )


@rule("LS024", kinds=PYTORCHJOB)
def ports(subject: Subject) -> Iterator[str]:
    """There is one metrics port a rank, beside the operator's."""
    if subject.spec.metrics_port <= render.RENDEZVOUS_PORT < subject.spec.metrics_port + subject.spec.ranks:
        yield f"two ports have one number: move metrics_port away from {render.RENDEZVOUS_PORT}"


@rule("LS028")
def found_by(subject: Subject) -> Iterator[str]:
    """A patch may not change names and labels, by which Lockstep finds a job and its pods."""
    for change in subject.patched:
        if change.ours and _FOUND_BY.fullmatch(change.path):
            yield f"k8s.patch changes {change.path}, by which Lockstep finds the job and its pods: leave it out"
    name = CONTAINERS[subject.kind]
    names = [item.get("name") for item in mappings(get(render.template(subject.job), "spec", "containers"))]
    if subject.patched and name not in names:
        yield f"k8s.patch leaves no container {name}, in which the ranks run: leave its name as it is"


@rule("LS046", "note")
def changed(subject: Subject) -> Iterator[str]:
    """A patch may open any door that the namespace leaves open, so everything that it changes is shown."""
    for change in subject.patched:
        if change.ours or not change.value or not isinstance(change.value, (dict, list)):
            yield f"k8s.patch sets {change.path}: {json.dumps(change.value)[:200]}"


@rule("LS036", kinds=TRAINJOB)
def trainjob_limits(subject: Subject) -> Iterator[str]:
    """What a TrainJob's pods get beyond a patch is set in the runtime."""
    given = subject.spec.plain().get("k8s", {})
    for name in ("priority_class", "scheduler_name", "image_pull_policy", "ttl"):
        if name in given:
            yield f"a TrainJob cannot set k8s.{name}: put it into the runtime that k8s.runtime names, or use k8s.kind PyTorchJob"


@rule("LS042")
def image_registry(subject: Subject) -> Iterator[str]:
    """A name without a registry means Docker Hub's own images. What was built on one machine is on no other."""
    spec = subject.spec
    if spec.nodes > 1 and (problem := unpublished(spec)):
        yield problem


def unpublished(spec: JobSpec) -> str:
    """What is wrong with an image that no registry has; "" where nothing is. A program may be one of Docker Hub's own."""
    image = spec.image or ""
    if not image or "/" in image or spec.command is not None or spec.k8s.image_pull_policy == "Never":
        return ""
    return (
        f"image {image} has no registry in its name, so the nodes would look for it at Docker Hub: push it (`make push`) and name it "
        "registry/name, or set k8s.image_pull_policy Never where it was loaded onto every node"
    )
