"""Rules about Compose files: what keeps a job from running, and which doors must stay closed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from .. import lint
from ..lint import tag_of
from ..manifest import changes, get
from . import render
from .render import IMAGE_FOLDERS

HOST_PATHS = ("/", ".", "~", "$")
"""How a path of the host begins; Compose expands `~` and `$NAME`."""
LISTED = 2
"""Ports that deploy/observability/prometheus/compose.yaml lists."""


class Subject(lint.Subject):
    """A Compose file."""

    volumes = True

    @property
    def environment(self) -> dict[str, Any]:
        """Of the first node: a patch may have added some."""
        found = get(next(iter(self.objects), {}), "services", render.node_name(self.spec, 0), "environment")
        return found if isinstance(found, dict) else {}


RULES = lint.Rules(Subject)
rule = RULES.rule


def _never(value: Any) -> bool:  # noqa: ARG001 - the same signature as the others
    return False


def _confined(value: Any) -> bool:
    return not re.sub(r"[= ]", ":", str(value)).endswith(("unconfined", ":disable", ":false"))


def _ordinary(value: Any) -> bool:
    return not re.fullmatch(r"root|0+", str(value).partition(":")[0])


_DOOR = "opens what the job's container is closed to"
_OTHERS = "gives the job access to the host or to another container"
Refused = dict[str, tuple[Callable[[Any], bool], str]]
"""What a patch may not add → whether a value of it is harmless, and why not."""
NODE: Refused = {
    r"scale|deploy\.replicas": (lambda value: value == 1, "would start it more than once: set nodes"),
    r"(entrypoint|command)\[[0-9]+\]": (_never, "would be words of the launcher: set overrides"),
    r"user": (_ordinary, _DOOR),
}
"""To a node of the job."""
SERVICE: Refused = {
    r"cap_add|devices|device_cgroup_rules|extends|provider|post_start|pre_stop|build": (_never, _DOOR),
    r"privileged": (lambda value: value is False, _DOOR),
    r"security_opt\[[0-9]+\]": (_confined, _DOOR),
    r"deploy\.resources\.reservations\.devices\[[^]]*\]": (lambda value: get(value, "capabilities") == ["gpu"], _DOOR),
    r"network_mode": (lambda value: value in ("none", "bridge"), _OTHERS),
    r"ipc|cgroup": (lambda value: value == "private", _OTHERS),
    r"pid|uts|cgroup_parent|userns_mode|volumes_from|use_api_socket": (_never, _OTHERS),
    r"volumes\[[0-9]+\]": (lambda value: _host_path(value) is None, f"{_OTHERS}: use a named volume"),
}
"""To any service: one of the user's own has the engine's defaults, and is no way to the host either."""


@rule("LC004")
def patched(subject: Subject) -> Iterator[str]:
    """A patch adds what has no setting. What is rendered keeps its place: Lockstep finds the job by it, and it closes doors."""
    if not subject.spec.compose.patch:
        return
    file, rendered = next(iter(subject.objects), {}), render.file(subject.spec)
    ours, services = rendered["services"], get(file, "services")
    for change in changes(rendered, file):
        if change.ours:
            yield f"the patch changes {change.path}, which is made of the job's settings: change those, and leave it out of compose.patch"
            continue
        for name in services if isinstance(services, dict) else ():
            place = change.path.removeprefix(f"services.{name}.")  # a service's name may hold dots
            for pattern, (harmless, why) in (SERVICE if name not in ours else {**NODE, **SERVICE}).items():
                if place != change.path and re.fullmatch(pattern, place) and not harmless(change.value):
                    yield f"{name}: the patch adds {place}: {str(change.value)[:60]}, which {why}: remove it"
        if re.fullmatch(r"(configs|secrets)\..*\.file", change.path):
            yield f"the patch adds {change.path}: {change.value}, which is the host's: use `content` or `environment`"
        if re.fullmatch(r"volumes\..*\.driver_opts\.device", change.path) and str(change.value).startswith(HOST_PATHS):
            yield f"the patch adds {change.path}: {change.value}, which is the host's: use a volume that the engine manages"
        if re.fullmatch(r"networks\.[^.]*\.(driver|name)", change.path) and change.value == "host":
            yield f"the patch adds {change.path}: host, which {_OTHERS}: remove it"
        if change.path == "include" and change.value:
            yield "the patch adds include, a file that lint does not read: put its content into the patch"


def _host_path(mount: Any) -> str | None:
    """What a mount takes from the host; None where that is nothing (a named, an anonymous volume, a tmpfs)."""
    if isinstance(mount, str):
        source, colon, _ = mount.partition(":")
        return source if colon and source.startswith(HOST_PATHS) else None
    kind, source = get(mount, "type"), str(get(mount, "source") or "")
    known = kind in ("volume", "tmpfs", "cluster")
    return None if known and not source.startswith(HOST_PATHS) else source or f"type {kind}"


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
    if name and "@sha256:" not in name and tag_of(name) in ("", "latest"):
        yield f"image {name} has no fixed tag: use a tag, or better a digest (name@sha256:…)"


@rule("LC013", "warning")
def ignored_settings(subject: Subject) -> Iterator[str]:
    """A setting that has no meaning here is better not there."""
    given = subject.spec.given_elsewhere("compose")
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
