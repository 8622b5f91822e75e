"""Rules about what a pod may do, and where secrets and code come from."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.jobs.kubernetes.section import k8s
from lockstep.jobs.kubernetes.subject import Subject, rule
from lockstep.jobs.lint import SECRET
from lockstep.jobs.manifest import get, mappings
from lockstep.jobs.spec.model import JobSpec


@rule("LS014")
def literal_secret(subject: Subject) -> Iterator[str]:
    """A secret in `env` can be read by everyone who may read the job."""
    for pod in subject.pods[:1]:
        for item in mappings(pod.container.get("env")):
            name = str(item.get("name"))
            if SECRET.search(name.upper()) and item.get("value") is not None:
                yield f"env {name} looks like a secret: keep it in a Secret and refer to it in secrets"


@rule("LS015")
def privileges(subject: Subject) -> Iterator[str]:
    """Pods run as an ordinary user, without escalation, capabilities or a writable root."""
    given = (
        k8s(subject.spec).run_as_user is not None
    )  # else the cluster gives one, which runAsNonRoot keeps from being root
    for pod in subject.pods:
        wanted = {
            "runAsNonRoot: true": get(pod.spec, "securityContext", "runAsNonRoot") is True,
            "a runAsUser above 0": get(pod.spec, "securityContext", "runAsUser") not in ((0, None) if given else (0,)),
            "seccompProfile RuntimeDefault": get(pod.spec, "securityContext", "seccompProfile", "type")
            in ("RuntimeDefault", "Localhost"),
        }
        for item in [*mappings(get(pod.spec, "containers")), *mappings(get(pod.spec, "initContainers"))]:
            context = item.get("securityContext")
            dropped = get(context, "capabilities", "drop")
            wanted["allowPrivilegeEscalation: false"] = get(context, "allowPrivilegeEscalation") is False
            wanted["readOnlyRootFilesystem: true"] = get(context, "readOnlyRootFilesystem") is True
            wanted["all capabilities dropped"] = isinstance(dropped, list) and "ALL" in dropped
            wanted["no capability added"] = not get(context, "capabilities", "add")
            wanted["no privileged container"] = not get(context, "privileged")
            missing = [name for name, present in wanted.items() if not present]
            if missing:
                yield f"{pod.replica}: the security context needs {', '.join(missing)}: undo the patch"


@rule("LS016", "warning")
def image_tag(subject: Subject) -> Iterator[str]:
    """A tag can move while the job restarts; a digest cannot."""
    image = subject.spec.image or ""
    if image and "@sha256:" not in image:
        loose = ":" not in image.rsplit("/", 1)[-1] or image.endswith(":latest")
        yield f"image {image} {'has no fixed tag' if loose else 'is a tag, which can move'}: use a digest (name@sha256:…)"


@rule("LS042")
def image_registry(subject: Subject) -> Iterator[str]:
    """A name without a registry means Docker Hub's own images. What was built on one machine is on no other."""
    spec = subject.spec
    if (spec.nodes > 1 or spec.elastic) and (problem := unpublished(spec)):
        yield problem


@rule("LS044", "warning")
def image_of_one_node(subject: Subject) -> Iterator[str]:
    """On one node an image may have been loaded by hand."""
    if subject.spec.nodes == 1 and not subject.spec.elastic and (problem := unpublished(subject.spec)):
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


@rule("LS031")
def host_access(subject: Subject) -> Iterator[str]:
    """A training pod needs nothing of its host."""
    for pod in subject.pods:
        for name in ("hostNetwork", "hostPID", "hostIPC"):
            if get(pod.spec, name):
                yield f"{pod.replica}: {name} gives the job access to the host: remove it"
        for volume in mappings(get(pod.spec, "volumes")):
            if "hostPath" in volume:
                yield f"{pod.replica}: volume {volume.get('name')!r} is a hostPath: use a claim"
