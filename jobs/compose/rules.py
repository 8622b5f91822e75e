"""Rules about Compose files: what keeps a job from running, and which doors must stay closed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from lockstep.jobs import lint
from lockstep.jobs.compose.render import IMAGE_FOLDERS
from lockstep.jobs.compose.section import Compose
from lockstep.jobs.lint import SECRET
from lockstep.jobs.manifest import HASH, JOB, Manifest, get, holds, mappings

OPENING = ("cap_add", "devices", "device_cgroup_rules", "extends", "provider", "post_start", "pre_stop")
"""Keys of a service that give it rights, or that bring in what no rule has read."""
NAMESPACES = {
    "network_mode": ("none", "bridge"), "pid": (), "ipc": ("private",), "uts": (), "cgroup": ("private",),
    "cgroup_parent": (), "userns_mode": (),
}  # fmt: skip
"""Keys that share a namespace of the host or of another container → what shares none."""
HOST_PATHS = ("/", ".", "~", "$")
"""How a path of the host begins; Compose expands `~` and `$NAME`."""
LISTED = 2
"""Ports that deploy/observability/prometheus/compose.yaml lists."""


class Subject(lint.Subject):
    """A Compose file."""

    @property
    def image(self) -> str | None:
        return self.spec.image

    @cached_property
    def services(self) -> dict[str, Manifest]:
        """The services by name."""
        found: Any = next((item["services"] for item in self.objects if "services" in item), {})
        return (
            {str(key): value for key, value in found.items() if isinstance(value, dict)}
            if isinstance(found, dict)
            else {}
        )


RULES = lint.Rules(Subject)
rule = RULES.rule


def _words(value: Any) -> list[str]:
    if isinstance(value, str):
        return value.split()
    return [str(word) for word in value] if isinstance(value, list) else []


def _nodes(subject: Subject) -> dict[str, Any]:
    """The job's own services. What a patch puts beside them is the user's affair."""
    return {name: item for name, item in subject.services.items() if get(item, "labels", JOB) is not None}


def _environment(service: Any) -> dict[str, Any]:
    found = get(service, "environment")
    if isinstance(found, dict):
        return {str(key): value for key, value in found.items()}
    pairs = [word.partition("=") for word in _words(found)]
    return {name: value if equals else None for name, equals, value in pairs}


@rule("LC001")
def image(subject: Subject) -> Iterator[str]:
    """A node needs an image."""
    if any(not isinstance(service.get("image"), str) for service in subject.services.values()):
        yield "image is not set: add `image: lockstep:cpu` to the job, or pass --image (make image-cpu builds it)"


@rule("LC002")
def one_service_a_node(subject: Subject) -> Iterator[str]:
    """One labelled service a node, each once: ranks are counted over them."""
    found = [service for service in subject.services.values() if get(service, "labels", JOB) == subject.spec.name]
    if len(found) != subject.spec.nodes or any(get(service, "labels", HASH) is None for service in found):
        yield f"the file has {len(found)} services of this job, nodes is {subject.spec.nodes}: set nodes, do not patch the file"
    for name, service in _nodes(subject).items():
        if get(service, "deploy", "replicas") not in (None, 1) or service.get("scale") not in (None, 1):
            yield f"{name} is started more than once: set nodes instead"


@rule("LC003")
def launcher(subject: Subject) -> Iterator[str]:
    """PID 1 is the launcher: it gets TERM, and starts the ranks."""
    for name, service in _nodes(subject).items():
        if "launch" not in _words(service.get("entrypoint")):
            yield f"{name}: the entrypoint is not `python -m lockstep.training launch`: undo the patch"


@rule("LC004")
def closed_doors(subject: Subject) -> Iterator[str]:
    """A node runs without root, capabilities, new privileges, devices or a writable root."""
    for name, service in _nodes(subject).items():
        options = [word.replace("=", ":").replace(" ", "") for word in _words(service.get("security_opt"))]
        wanted = {
            "read_only: true": service.get("read_only") is True,
            "cap_drop: [ALL]": "ALL" in _words(service.get("cap_drop")),
            "security_opt: [no-new-privileges:true]": bool(
                {"no-new-privileges:true", "no-new-privileges"} & set(options)
            ),
            "security_opt without unconfined, disable or false": not any(
                option.endswith(("unconfined", ":disable", ":false")) for option in options
            ),
            "no privileged: true": not service.get("privileged"),
            "a user other than root": not re.fullmatch(r"root|0+", str(service.get("user", "1000")).partition(":")[0]),
            "no reserved devices but GPUs": all(
                get(device, "capabilities") == ["gpu"] for device in _reserved(service)
            ),
            **{f"no {key}": not service.get(key) for key in OPENING},
        }
        missing = [text for text, present in wanted.items() if not present]
        if missing:
            yield f"{name} needs {', '.join(missing)}: undo the patch"


@rule("LC005")
def host_access(subject: Subject) -> Iterator[str]:
    """A node needs nothing of its host or of other containers, least of all the engine's socket."""
    for name, service in _nodes(subject).items():
        for key, harmless in NAMESPACES.items():
            value = service.get(key)
            if value is not None and value not in harmless:
                yield f"{name}: {key}: {value} gives the job access to the host or to another container: remove it"
        for key in ("volumes_from", "use_api_socket"):
            if service.get(key):
                yield f"{name}: {key} gives the job access to something outside it: remove it"
        mounts = service.get("volumes")
        for mount in mounts if isinstance(mounts, list) else []:
            source = _host_path(mount)
            if source is not None:
                yield f"{name}: the mount of {source} gives the job access to the host: use a named volume"
    for item in subject.objects:
        volumes = item.get("volumes")
        for name, volume in volumes.items() if isinstance(volumes, dict) else ():
            device = str(get(volume, "driver_opts", "device") or "")
            if device.startswith(HOST_PATHS):
                yield f"volume {name} is {device} of the host: use a volume that the engine manages"
        networks = item.get("networks")
        for name, network in networks.items() if isinstance(networks, dict) else ():
            if "host" in (get(network, "driver"), get(network, "name")):
                yield f"network {name} is the host's own: remove it"
        if "services" in item and item.get("include"):
            yield "include adds a file that lint does not read: put its content into the patch"


def _reserved(service: Any) -> list[Any]:
    found = get(service, "deploy", "resources", "reservations", "devices")
    return found if isinstance(found, list) else [found] if found else []


def _host_path(mount: Any) -> str | None:
    """What a mount takes from the host; None where that is nothing (a named, an anonymous volume, a tmpfs)."""
    if isinstance(mount, str):
        source, colon, _ = mount.partition(":")
        return source if colon and source.startswith(HOST_PATHS) else None
    kind, source = get(mount, "type"), str(get(mount, "source") or "")
    known = kind in ("volume", "tmpfs", "cluster")
    return None if known and not source.startswith(HOST_PATHS) else source or f"type {kind}"


@rule("LC006")
def literal_secret(subject: Subject) -> Iterator[str]:
    """A secret in `env` stands in the file, and in the labels of the containers."""
    for service in list(_nodes(subject).values())[:1]:
        for name, value in _environment(service).items():
            if SECRET.search(name.upper()) and value is not None:
                yield f"env {name} looks like a secret: name it in secrets, its value is taken from your environment"


@rule("LC007")
def restarts(subject: Subject) -> Iterator[str]:
    """Docker's restart policies also retry wrong usage, and count on top of the launcher."""
    for name, service in _nodes(subject).items():
        if service.get("restart") not in ("no", False, None):
            yield f"{name}: restart: {service['restart']} also restarts after wrong usage: use max_restarts"


@rule("LC008")
def limits(subject: Subject) -> Iterator[str]:
    """Without a limit of memory one job takes the whole machine down."""
    for name, service in _nodes(subject).items():
        if not service.get("mem_limit") and get(service, "deploy", "resources", "limits", "memory") is None:
            yield f"{name}: no limit of memory: set memory"


@rule("LC009")
def run_directory(subject: Subject) -> Iterator[str]:
    """The run directory must be an absolute path that the nodes may write."""
    path = subject.spec.run_directory
    if not path.startswith("/") or ".." in path or " " in path:
        yield f"run_dir {path!r} must be an absolute path without spaces in a container: use /runs/{subject.spec.name}"
    for volume in subject.spec.volumes:
        if volume.read_only and holds(volume.path, path):
            yield f"run_dir {path} lies on a read-only volume: drop read_only, or choose another run_dir"


@rule("LC010")
def shards_mounted(subject: Subject) -> Iterator[str]:
    """Prepared shards must lie on a volume."""
    shards = subject.spec.shards
    if shards and not any(holds(volume.path, shards) for volume in subject.spec.volumes):
        yield f"shards {shards} is not on a volume: add one to volumes"


@rule("LC011", "warning")
def owner(subject: Subject) -> Iterator[str]:
    """A new volume belongs to root, unless the image has a folder at that path."""
    for volume in subject.spec.volumes:
        if not volume.read_only and not any(volume.path.rstrip("/") == folder for folder in IMAGE_FOLDERS):
            yield (
                f"volume {volume.claim} at {volume.path}: a new volume would belong to root, and the job does not run as root; "
                f"mount it at {' or '.join(IMAGE_FOLDERS)}, or give your image that folder"
            )


@rule("LC012", "warning")
def image_tag(subject: Subject) -> Iterator[str]:
    """A name without a tag means another image tomorrow."""
    name = subject.spec.image or ""
    if name and "@sha256:" not in name and (":" not in name.rsplit("/", 1)[-1] or name.endswith(":latest")):
        yield f"image {name} has no fixed tag: use a tag, or better a digest (name@sha256:…)"


@rule("LC013", "warning")
def ignored_settings(subject: Subject) -> Iterator[str]:
    """A setting that has no meaning here is better not there."""
    given = subject.spec.given_elsewhere(Compose)
    if given:
        yield f"{given[0]} has no meaning for Compose and is left out (compose.patch changes the file)"


@rule("LC015", "warning")
def scraped(subject: Subject) -> Iterator[str]:
    """DNS tells Prometheus the nodes, not how many ranks they have."""
    if subject.spec.ranks > LISTED:
        yield (
            f"{subject.spec.ranks} ranks a node, and deploy/observability/prometheus/compose.yaml scrapes the first {LISTED}: "
            "add a line a rank to yours"
        )


@rule("LC014")
def dangling_mounts(subject: Subject) -> Iterator[str]:
    """A mount must name a volume of the file."""
    known = next((item.get("volumes") for item in subject.objects if "services" in item), None)
    names = list(known) if isinstance(known, dict) else []  # a patch may put anything beside them
    for name, service in _nodes(subject).items():
        if not isinstance(service.get("volumes"), list):
            yield f"{name}: volumes must be a list: undo the patch"
        for mount in mappings(service.get("volumes")):
            if mount.get("type") == "volume" and mount.get("source") not in names:
                yield f"{name}: the mount at {mount.get('target')!r} has no volume: a patch replaces whole lists"
