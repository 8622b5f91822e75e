"""Rules about the pods: resources, environment, volumes, ports."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from lockstep.jobs.kubernetes.section import k8s
from lockstep.jobs.kubernetes.subject import PYTORCHJOB, Pod, Subject, rule
from lockstep.jobs.manifest import get, holds, mappings
from lockstep.jobs.spec.types import size_in_bytes

MONITORED = 8
"""Ports that deploy/observability/kubernetes/podmonitor.yaml names."""
INJECTED = re.compile(
    r"PET_.*|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|GROUP_RANK|TORCHELASTIC_.*"
)


def _bytes(value: Any) -> int | None:
    try:
        return size_in_bytes(value) if isinstance(value, str) else None
    except ValueError:
        return None


def _environment(pod: Pod) -> list[str]:
    return [str(item.get("name")) for item in mappings(pod.container.get("env"))]


def _volume_at(pod: Pod, path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(mount, volume) that holds `path`: the longest mount path wins."""
    mounts = [m for m in mappings(pod.container.get("volumeMounts")) if isinstance(m.get("mountPath"), str)]
    mounts = sorted((m for m in mounts if holds(m["mountPath"], path)), key=lambda m: len(m["mountPath"]))
    if not mounts:
        return {}, {}
    volumes = mappings(get(pod.spec, "volumes"))
    return mounts[-1], next((v for v in volumes if v.get("name") == mounts[-1].get("name")), {})


@rule("LS010")
def shared_memory(subject: Subject) -> Iterator[str]:
    """NCCL and data loaders need /dev/shm, and an emptyDir without a limit may take the whole node."""
    for pod in subject.pods:
        _, volume = _volume_at(pod, "/dev/shm")  # noqa: S108 - the pod's
        if get(volume, "emptyDir", "medium") != "Memory":
            yield f"{pod.replica}: /dev/shm is the default of 64 MiB: set shm"
        elif get(volume, "emptyDir", "sizeLimit") is None:
            yield f"{pod.replica}: /dev/shm has no sizeLimit: set shm"


@rule("LS011")
def shared_memory_counts(subject: Subject) -> Iterator[str]:
    """What lies in /dev/shm counts against the memory limit."""
    for pod in subject.pods:
        _, volume = _volume_at(pod, "/dev/shm")  # noqa: S108 - the pod's
        shm, memory = _bytes(get(volume, "emptyDir", "sizeLimit")), _bytes(pod.resource("memory"))
        if shm is not None and memory is not None and shm >= memory:
            yield f"{pod.replica}: shm counts against memory and is not below it: raise memory, or lower shm"


@rule("LS012")
def injected_variables(subject: Subject) -> Iterator[str]:
    """The operator and the launcher set these variables; a value of yours is overridden, or breaks the job."""
    for name in sorted({n for pod in subject.pods for n in _environment(pod) if INJECTED.fullmatch(n)}):
        yield f"env sets {name}, which the operator or the launcher sets: remove it"


@rule("LS013")
def duplicate_variables(subject: Subject) -> Iterator[str]:
    """`env` is keyed by name: the API server refuses duplicates."""
    for pod in subject.pods:
        names = _environment(pod)
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"{pod.replica}: env has {name} twice: keep one"


@rule("LS019", "warning")
def durable_run(subject: Subject) -> Iterator[str]:
    """A run directory on no persistent volume is gone with the pod."""
    for pod in subject.pods[:1]:
        _, volume = _volume_at(pod, subject.spec.run_directory)
        if get(volume, "persistentVolumeClaim") is None:
            yield f"run_dir {subject.spec.run_directory} is not on a volume: a restart would begin anew, uncounted; add one to volumes"


@rule("LS020")
def shared_run(subject: Subject) -> Iterator[str]:
    """The run directory must be writable, and shared where rank 0 may move."""
    path = subject.spec.run_directory
    if not path.startswith("/") or ".." in path or " " in path:
        yield f"run_dir {path!r} must be an absolute path without spaces in a container: use /runs/{subject.spec.name}"
        return
    for pod in subject.pods[:1]:
        mount, volume = _volume_at(pod, path)
        if mount.get("readOnly"):
            yield f"run_dir {path} lies on a read-only volume: drop read_only, or choose another run_dir"
        if subject.spec.elastic and get(volume, "persistentVolumeClaim") is None:
            yield "an elastic job's rank 0 may move, so run_dir must lie on a shared volume: add one to volumes"


@rule("LS024", kinds=PYTORCHJOB)
def ports(subject: Subject) -> Iterator[str]:
    """Port names have at most 15 characters and are unique; one metrics port a rank, beside the operator's."""
    for pod in subject.pods:
        found = mappings(pod.container.get("ports"))
        names = [str(item.get("name")) for item in found]
        numbers = [item.get("containerPort") for item in found]
        for name in names:
            if len(name) > 15 or names.count(name) > 1:
                yield f"{pod.replica}: port name {name!r} must be unique and have at most 15 characters"
        if "pytorchjob-port" not in names:
            yield f"{pod.replica}: the port pytorchjob-port is missing, and the operator needs it: undo the patch"
        if any(numbers.count(number) > 1 for number in numbers):
            yield f"{pod.replica}: two ports have one number: move metrics_port away from 23456"
        missing = [f"metrics-{rank}" for rank in range(subject.spec.ranks) if f"metrics-{rank}" not in names]
        if missing:
            yield f"{pod.replica}: no port {missing[0]}: Prometheus would miss that rank"


@rule("LS040", "warning")
def scraped(subject: Subject) -> Iterator[str]:
    """The PodMonitor is there before the job, so it names a fixed number of ports."""
    if subject.spec.ranks > MONITORED:
        yield (
            f"{subject.spec.ranks} ranks a node, and the PodMonitor of deploy/observability scrapes the first {MONITORED}: "
            "add a port a rank to it"
        )


@rule("LS025")
def devices(subject: Subject) -> Iterator[str]:
    """Devices are limits; EFA needs huge pages."""
    for pod in subject.pods:
        limits = get(pod.container, "resources", "limits")
        limits = limits if isinstance(limits, dict) else {}
        gpus = limits.get(k8s(subject.spec).gpu_resource)
        if subject.spec.gpus and str(gpus) != str(subject.spec.gpus):
            yield f"{pod.replica}: limit of {k8s(subject.spec).gpu_resource} is {gpus!r}, but gpus is {subject.spec.gpus}"
        fast = [str(name) for name in limits if str(name).startswith("rdma/") or str(name).endswith("/efa")]
        if any(name.endswith("/efa") for name in fast) and not any(str(n).startswith("hugepages-") for n in limits):
            yield f"{pod.replica}: EFA without huge pages falls back to sockets: set k8s.hugepages to 5120Mi"


@rule("LS041", "warning")
def efa_in_the_image(subject: Subject) -> Iterator[str]:
    """EFA is reached through libfabric, by a plugin of NCCL: without them in the image NCCL falls back to sockets."""
    if any(name.endswith("/efa") for name in k8s(subject.spec).rdma):
        yield (
            f"image {subject.spec.image} must hold libfabric and aws-ofi-nccl for EFA, which Lockstep's own images do not: "
            "build on one of AWS's, and look for `NET/OFI` in the log with k8s.nccl_debug INFO"
        )


@rule("LS034")
def dangling_mounts(subject: Subject) -> Iterator[str]:
    """A mount must name a volume of the pod."""
    for pod in subject.pods:
        known = [volume.get("name") for volume in mappings(get(pod.spec, "volumes"))]  # a patch may put anything there
        for mount in mappings(pod.container.get("volumeMounts")):
            if mount.get("name") not in known:
                yield f"{pod.replica}: the mount at {mount.get('mountPath')!r} has no volume: a patch replaces whole lists"


@rule("LS035", "warning")
def recipe_file(subject: Subject) -> Iterator[str]:
    """A recipe of your own must be inside the image, or travel with the job's code."""
    recipe = subject.spec.recipe
    if recipe is not None and recipe.endswith((".yaml", ".yml")) and subject.spec.code is None:
        yield f"recipe {recipe} is a file: it must be in the image at that path, or travel with the job (code: .)"


@rule("LS037", "warning")
def interface(subject: Subject) -> Iterator[str]:
    """NCCL may choose an interface that the other nodes cannot reach."""
    for pod in subject.pods[:1]:
        if subject.spec.gpus and subject.spec.nodes > 1 and "NCCL_SOCKET_IFNAME" not in _environment(pod):
            yield "NCCL_SOCKET_IFNAME is not set: on nodes with several interfaces set k8s.socket_interface"


@rule("LS038")
def shards_mounted(subject: Subject) -> Iterator[str]:
    """Prepared shards must lie on a volume."""
    for pod in subject.pods[:1]:
        if subject.spec.shards and get(_volume_at(pod, subject.spec.shards)[1], "persistentVolumeClaim") is None:
            yield f"shards {subject.spec.shards} is not on a volume: add one to volumes"
