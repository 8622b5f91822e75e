"""The lint rules of Kubernetes: what keeps a job from running there, and which doors must stay closed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from .. import lint
from ..lint import tag_of, volume_of
from ..manifest import Manifest, changes, get, mappings
from ..spec.model import JobSpec
from ..spec.types import size_in_bytes
from . import render
from .render import k8s, kind_of
from .section import CONTAINERS

PYTORCHJOB = ("PyTorchJob",)
TRAINJOB = ("TrainJob",)
MONITORED = 8
"""Ports that deploy/observability/kubernetes/podmonitor.yaml names."""
INJECTED = re.compile(
    r"PET_.*|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|GROUP_RANK|TORCHELASTIC_.*"
)
_HOST = "gives the job access to the host"
_CONTEXT = "opens what the pod's security context closes"
# What a patch may not add → the values of it that are harmless, and why.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    r".*\.(hostNetwork|hostPID|hostIPC)": ((False,), _HOST),
    r".*\.hostPort": ((), _HOST),
    # All others are refused by PodSecurity's level `restricted`: hostPath, nfs, and what else names a server or the host.
    r".*\.volumes\[[^]]*\]\.(?!(name|configMap|csi|downwardAPI|emptyDir|ephemeral|persistentVolumeClaim|projected|secret)$)[^.]*": (
        (),
        "is a volume that PodSecurity's level restricted refuses: use a claim",
    ),
    r".*\.serviceAccountToken": ((), "gives the job a token of the cluster"),
    r".*\.(privileged|allowPrivilegeEscalation)": ((False,), _CONTEXT),
    r".*\.(readOnlyRootFilesystem|runAsNonRoot)": ((True,), _CONTEXT),
    r".*\.capabilities\.add": (([],), _CONTEXT),
    r".*\.(seccompProfile|appArmorProfile)\.type": (("RuntimeDefault", "Localhost"), _CONTEXT),
    r".*\.seLinuxOptions\.(type|user|role)|.*\.annotations\.container\.apparmor\..*": ((), _CONTEXT),
    r".*\.(procMount|sysctls|windowsOptions|ephemeralContainers)": ((), _CONTEXT),
    r".*\.readinessProbe": ((), "delays the DNS name that the workers wait for"),
    r".*\.template\.spec\.restartPolicy": ((), "is overwritten by the operator"),
    r".*\.annotations\.prometheus\.io/.*": ((), "carries one port only: use the PodMonitor of deploy/k8s"),
    r"(.*\.containers\[(pytorch|node)\]|spec\.trainer)\.(command\[[0-9]+\]|args)": (
        (),
        "would be words of the launcher: set overrides",
    ),
    r"spec\.runtimePatches\[[0-9]+\]": ((), "would change what the first one says"),
    r"spec\.pytorchReplicaSpecs\.[^.]*|.*\.replicatedJobs\[[^]]*\]": ((), "would be more pods: set nodes"),
}


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


@rule("LS011")
def shared_memory_counts(subject: Subject) -> Iterator[str]:
    """What lies in /dev/shm counts against the memory limit."""
    if size_in_bytes(subject.spec.shm) >= size_in_bytes(subject.spec.memory):
        yield "shm counts against memory and is not below it: raise memory, or lower shm"


@rule("LS012")
def injected_variables(subject: Subject) -> Iterator[str]:
    """The operator and the launcher set these variables; a value of yours is overridden, or breaks the job."""
    for name in sorted(subject.environment):
        if INJECTED.fullmatch(name):
            yield f"env sets {name}, which the operator or the launcher sets: remove it"


@rule("LS016", "warning")
def image_tag(subject: Subject) -> Iterator[str]:
    """A tag can move while the job restarts; a digest cannot."""
    image = subject.spec.image or ""
    if image and "@sha256:" not in image:
        loose = tag_of(image) in ("", "latest")
        yield f"image {image} {'has no fixed tag' if loose else 'is a tag, which can move'}: use a digest (name@sha256:…)"


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


@rule("LS025")
def huge_pages(subject: Subject) -> Iterator[str]:
    """EFA needs huge pages."""
    if _efa(subject.spec) and not k8s(subject.spec).hugepages:
        yield "EFA without huge pages falls back to sockets: set k8s.hugepages to 5120Mi"


@rule("LS026")
def topology(subject: Subject) -> Iterator[str]:
    """Topology-aware scheduling is Kueue's: without a queue the annotation does nothing."""
    if k8s(subject.spec).topology and not k8s(subject.spec).queue:
        yield "k8s.topology does nothing without k8s.queue: set the queue, or remove topology"


@rule("LS028")
def patched(subject: Subject) -> Iterator[str]:
    """A patch adds what has no setting. What is rendered keeps its place: Lockstep finds the job by it, and it closes doors."""
    if not k8s(subject.spec).patch:
        return
    policy = next(item for item in subject.objects if item.get("kind") == "NetworkPolicy")
    for change in changes(render.job(subject.spec, render.submission_in(policy, subject.spec)), subject.job):
        if change.ours:
            yield f"the patch changes {change.path}, which is made of the job's settings: change those, and leave it out of k8s.patch"
            continue
        for pattern, (harmless, why) in REFUSED.items():
            if re.fullmatch(pattern, change.path) and change.value not in harmless:
                yield f"the patch adds {change.path}, which {why}: remove it"
        if re.search(r"\.runAsUser$", change.path) and not change.value:
            yield f"the patch adds {change.path}: 0, which is root: remove it"
        if re.search(r"\.(containers|initContainers)\[[^]]*\]$", change.path) and not _closed(change.value):
            yield (
                f"the patch adds {change.path}, whose securityContext must have allowPrivilegeEscalation: false and "
                "capabilities: {drop: [ALL]}"
            )


def _closed(container: Any) -> bool:
    """Whether a container of the user's own gives up what it has without being asked."""
    dropped = get(container, "securityContext", "capabilities", "drop")
    raised = get(container, "securityContext", "allowPrivilegeEscalation")
    return raised is False and isinstance(dropped, list) and "ALL" in dropped


@rule("LS035", "warning")
def recipe_file(subject: Subject) -> Iterator[str]:
    """A recipe of your own must be inside the image, or travel with the job's code."""
    recipe = subject.spec.recipe
    if recipe is not None and recipe.endswith((".yaml", ".yml")) and subject.spec.code is None:
        yield f"recipe {recipe} is a file: it must be in the image at that path, or travel with the job (code: .)"


@rule("LS036", kinds=TRAINJOB)
def trainjob_limits(subject: Subject) -> Iterator[str]:
    """What a TrainJob's pods get beyond a patch is set in the runtime."""
    given = subject.spec.plain().get("k8s", {})
    for name in ("priority_class", "scheduler_name", "image_pull_policy", "ttl"):
        if name in given:
            yield f"a TrainJob cannot set k8s.{name}: put it into the runtime that k8s.runtime names, or use k8s.kind PyTorchJob"


@rule("LS037", "warning")
def interface(subject: Subject) -> Iterator[str]:
    """NCCL may choose an interface that the other nodes cannot reach."""
    if subject.spec.gpus and subject.spec.nodes > 1 and "NCCL_SOCKET_IFNAME" not in subject.environment:
        yield "NCCL_SOCKET_IFNAME is not set: on nodes with several interfaces set k8s.socket_interface"


@rule("LS040", "warning")
def scraped(subject: Subject) -> Iterator[str]:
    """The PodMonitor is there before the job, so it names a fixed number of ports."""
    if subject.spec.ranks > MONITORED:
        yield (
            f"{subject.spec.ranks} ranks a node, and the PodMonitor of deploy/observability scrapes the first {MONITORED}: "
            "add a port a rank to it"
        )


@rule("LS041", "warning")
def efa_in_the_image(subject: Subject) -> Iterator[str]:
    """EFA is reached through libfabric, by a plugin of NCCL: without them in the image NCCL falls back to sockets."""
    if _efa(subject.spec):
        yield (
            f"image {subject.spec.image} must hold libfabric and aws-ofi-nccl for EFA, which Lockstep's own images do not: "
            "build on one of AWS's, and look for `NET/OFI` in the log with k8s.nccl_debug INFO"
        )


def _efa(spec: JobSpec) -> bool:
    return any(name.endswith("/efa") for name in k8s(spec).rdma)


@rule("LS042")
def image_registry(subject: Subject) -> Iterator[str]:
    """A name without a registry means Docker Hub's own images. What was built on one machine is on no other."""
    spec = subject.spec
    if spec.nodes > 1 and (problem := unpublished(spec)):
        yield problem


@rule("LS044", "warning")
def image_of_one_node(subject: Subject) -> Iterator[str]:
    """On one node an image may have been loaded by hand."""
    if subject.spec.nodes == 1 and (problem := unpublished(subject.spec)):
        yield problem


def unpublished(spec: JobSpec) -> str:
    """What is wrong with an image that no registry has; "" where nothing is. A program may be one of Docker Hub's own."""
    image = spec.image or ""
    if not image or "/" in image or spec.command is not None or k8s(spec).image_pull_policy == "Never":
        return ""
    return (
        f"image {image} has no registry in its name, so the nodes would look for it at Docker Hub: push it (`make push`) and name it "
        "registry/name, or set k8s.image_pull_policy Never where it was loaded onto every node"
    )


@rule("LS045", "warning", TRAINJOB)
def plain_runtime(subject: Subject) -> Iterator[str]:
    """Kubeflow's own runtime mounts a token, has no metrics ports, keeps finished jobs and retries wrong usage (exit 2)."""
    if k8s(subject.spec).runtime == "torch-distributed":
        yield (
            "the runtime torch-distributed mounts a token, has no metrics ports, keeps finished jobs and retries wrong usage: "
            "set k8s.runtime to lockstep, the one of deploy/k8s/components/trainer"
        )
