"""A job as a Compose file: one service a node, on the job's own network, which closes the ports that Kubernetes closes.

Nothing restarts a node by itself: Docker would also retry wrong usage. The launcher restarts its ranks, and counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from lockstep.training.contract import ENV_METRICS_PORT, ENV_SECRET, MASTER_PORT

from .. import lint
from ..lint import volume_of
from ..manifest import (
    HASH,
    JOB,
    MANAGED,
    SPEC,
    Change,
    Manifest,
    changes,
    get,
    holds,
    merge,
    seconds,
    size_in_bytes,
    spec_text,
    without_none,
)
from ..spec.model import (
    CODE_PARTS,
    GRACE_MARGIN,
    JobSpec,
    code_identity,
    container_environment,
    launch_command,
    literal,
)

NODE = "lockstep/node"
"""Label of a node's container; its value is the node's number."""
ALIAS = "node"
"""Name of every node on the job's network: Prometheus finds all nodes by one DNS query."""
RUN = "run_directory"
"""Key of the volume that `run_volume` names; no claim can have it, because of the `_`."""
CODE = "code_archive"
"""Key of the volume that `code_volume` names."""
IMAGE_FOLDERS = ("/runs", "/data")
"""Folders of our image that its user may write: a new volume gets the owner of the folder that it is mounted on."""
MERGED_BY = ("target", "driver")
"""Keys by which the items of a patch's lists (volumes, devices) merge with those that are rendered."""


def project(name: str) -> str:
    """Returns Compose's name for the job of that name."""
    return f"lockstep-{name}"


def node_name(spec: JobSpec, index: int) -> str:
    """Returns the name of a node. All have one width, because the rendezvous sorts nodes, and so ranks, by their names as text."""
    return f"node-{index:0{len(str(spec.nodes - 1))}d}"


def render(spec: JobSpec) -> Manifest:
    """Returns the Compose file, with `compose.patch` merged into it."""
    rendered: Manifest = merge(file(spec), _long_form(spec.compose.patch), MERGED_BY)
    services = rendered.get("services")
    for node in services.values() if isinstance(services, dict) else []:
        if get(node, "network_mode") is not None:
            node.pop("networks", None)  # Compose accepts only one of the two
    return rendered


def _long_form(patch: Manifest) -> Manifest:
    """Returns the patch with each `SOURCE:TARGET:ro` of its services' volumes as a mapping: only mappings merge."""
    services = patch.get("services")
    if not isinstance(services, dict):
        return patch
    changed = {
        name: {**service, "volumes": [_mount(item) for item in service["volumes"]]}
        for name, service in services.items()
        if isinstance(get(service, "volumes"), list)
    }
    return {**patch, "services": {**services, **changed}}


def _mount(item: Any) -> Any:
    if not isinstance(item, str):
        return item
    source, target, mode = (item.split(":", 2) if ":" in item else ["", item]) + [""] * (item.count(":") < 2)
    kind = "bind" if source.startswith(("/", ".", "~", "$")) else "volume"
    read_only = True if "ro" in mode.split(",") else None
    return without_none({"type": kind, "source": source or None, "target": target, "read_only": read_only})


def file(spec: JobSpec) -> Manifest:
    """Returns the Compose file without the patch."""
    volumes = {volume.claim: {"name": volume.claim, "external": True} for volume in spec.volumes}
    if volume_of(spec, spec.run_directory) is None:
        volumes[RUN] = {"name": run_volume(spec), "external": True}
    if spec.code is not None:
        volumes[CODE] = {"name": code_volume(spec), "external": True}
    return {
        "name": project(spec.name),
        "services": {node_name(spec, index): _node(spec, index) for index in range(spec.nodes)},
        "networks": {"default": {"labels": {JOB: spec.name, **MANAGED}}},
        "volumes": volumes,
    }


def run_volume(spec: JobSpec) -> str:
    """Returns the volume that stores a run whose directory is on no volume of the job."""
    return f"{project(spec.name)}-runs"


def code_volume(spec: JobSpec) -> str:
    """Returns the volume with the archive of the job's code."""
    return f"{project(spec.name)}-code-{code_identity(spec)[:12]}"


def _node(spec: JobSpec, index: int) -> Manifest:
    words = [literal(word) for word in launch_command(spec, spec.run_directory)]
    own = ["--ranks", str(spec.ranks), "--nodes", str(spec.nodes)]
    own += ["--rendezvous", f"{node_name(spec, 0)}:{MASTER_PORT}"] if spec.nodes > 1 else []
    own += ["--job-id", f"{spec.name}-{spec.hash()}", "--time-limit", str(seconds(spec.time_limit))]
    text = literal(spec_text(spec.record()))
    service = {
        "image": spec.image,
        "hostname": node_name(spec, index),
        "entrypoint": words[:4],
        "command": [*own, *words[4:]],
        "environment": environment(spec),
        "labels": {JOB: spec.name, HASH: spec.hash(), NODE: str(index), SPEC: text, **MANAGED},
        "networks": {"default": {"aliases": [ALIAS]}},
        "volumes": _mounts(spec),
        "working_dir": "/tmp",  # noqa: S108 - the container's own, and the only place that is always writable
        "tmpfs": ["/tmp:mode=1777,exec"],  # noqa: S108 - compile=true loads what it has written there
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "restart": "no",
        "stop_grace_period": f"{spec.grace_seconds + GRACE_MARGIN}s",
        "cpus": spec.cpus,
        "mem_limit": size_in_bytes(spec.memory),
        "memswap_limit": size_in_bytes(spec.memory),  # equal: what exceeds it is killed, and Docker reports it
        "shm_size": size_in_bytes(spec.shm),
        "pids_limit": 4096,
        "ulimits": {"memlock": -1} if spec.gpus else None,  # NCCL pins memory
        "deploy": _devices(spec, index),
        "logging": {"driver": "json-file", "options": {"max-size": "100m", "max-file": "3"}},
        "healthcheck": None if _serves_health(spec) else {"disable": True},
    }
    return without_none(service)


def environment(spec: JobSpec) -> dict[str, Any]:
    """Returns the variables of the job. A secret's value is None: Compose takes it from its own environment. The nodes' shared secret is
    one of them."""
    values = {name: literal(value) for name, value in container_environment(spec).items()}
    secrets = [*spec.secrets, *([ENV_SECRET] if spec.nodes > 1 else [])]
    return dict(sorted({**values, **dict.fromkeys(secrets)}.items()))


def _serves_health(spec: JobSpec) -> bool:
    """Returns whether the image's health check finds every rank's /healthz. The user's own program may serve none."""
    config = spec.config
    return config is not None and config.metrics.enabled and environment(spec).get(ENV_METRICS_PORT) != "0"


def _mounts(spec: JobSpec) -> list[Manifest]:
    mounts: list[Manifest] = []
    if volume_of(spec, spec.run_directory) is None:
        # The parent, if it is a folder of our image: the new volume gets its owner.
        parent = next((path for path in IMAGE_FOLDERS if holds(path, spec.run_directory)), spec.run_directory)
        mounts.append({"type": "volume", "source": RUN, "target": parent})
    for volume in spec.volumes:
        mount: Manifest = {"type": "volume", "source": volume.claim, "target": volume.path}
        mounts.append({**mount, "read_only": True} if volume.read_only else mount)
    if spec.code is not None:
        mounts.append({"type": "volume", "source": CODE, "target": CODE_PARTS, "read_only": True})
    return mounts


def _devices(spec: JobSpec, index: int) -> Manifest | None:
    """Returns GPUs of this machine for a node. Two nodes of a job must not share a GPU."""
    if not spec.gpus:
        return None
    ids = [str(index * spec.gpus + number) for number in range(spec.gpus)]
    devices = [{"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}]
    return {"resources": {"reservations": {"devices": devices}}}


class Subject(lint.Subject):
    """A Compose file."""

    volumes, section = True, "compose"
    found_by = re.compile(
        r"name|volumes|networks(\.default(\.labels(\..*)?)?)?|"
        r"services(\.node-\d+(\.(hostname|labels(\.(lockstep|app\.kubernetes\.io)/.*)?))?)?"
    )

    @cached_property
    def environment(self) -> dict[str, Any]:
        """The environment of the first node: a patch may have added variables."""
        values = get(next(iter(self.objects), {}), "services", node_name(self.spec, 0), "environment")
        return values if isinstance(values, dict) else {}

    @cached_property
    def patched(self) -> list[Change]:
        return [*changes(file(self.spec), next(iter(self.objects), {}))] if self.spec.compose.patch else []


RULES = lint.Rules(Subject)


@RULES.rule("LC011", "warning")
def owner(subject: Subject) -> Iterator[str]:
    """A new volume belongs to root, unless the image has a folder at that path."""
    for volume in subject.spec.volumes:
        if not volume.read_only and not any(volume.path.rstrip("/") == folder for folder in IMAGE_FOLDERS):
            yield (
                f"volume {volume.claim} at {volume.path}: a new volume would belong to root, and the job does not run as root; "
                f"mount it at {' or '.join(IMAGE_FOLDERS)}, or give your image that folder"
            )
