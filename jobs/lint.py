"""Lint: the classes of rules, and the rules of every backend. Each rule has an id, a message with the fix, and a test.

Rules read the *final* manifest: `patch` can replace any part of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

from lockstep.training.contract import UserError

from .manifest import Change, Manifest, holds
from .spec.model import JobSpec
from .spec.types import Volume
from .status import note, warn

Level = Literal["error", "warning", "note"]
SECRET = re.compile(r"(^|_)(TOKEN|PASSWORD|PASSWD|SECRET|SECRET_KEY|API_?KEY|ACCESS_KEY|PRIVATE_KEY|CREDENTIALS?)($|_)")
"""Names of variables that look like a secret's."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding: `message` names the problem and its fix. `submit` refuses errors, and prints the others."""

    id: str
    level: Level
    message: str

    def __str__(self) -> str:
        return f"{self.id} {self.level}: {self.message}"


def errors(findings: list[Finding]) -> list[Finding]:
    """Returns the findings for which `submit` refuses the job."""
    return [finding for finding in findings if finding.level == "error"]


def refuse(jobs: Mapping[str, list[Finding]], backend: str) -> None:
    """Prints warnings and notes, each once for all jobs, which are the runs of a sweep. Raises `UserError` for the first error."""
    printed = set()
    for name, findings in jobs.items():
        for item in findings:
            alike = item.message if item.level == "note" else re.sub(r"\d+", "N", item.message)
            if item.level != "error" and alike not in printed:
                printed.add(alike)
                (warn if item.level == "warning" else note)(f"{item.id}: {item.message}")
        if refused := errors(findings):
            more = (
                f" (and {len(refused) - 1} more: see `lockstep lint --backend {backend}`)" if len(refused) > 1 else ""
            )
            raise UserError(f"{name}: {refused[0]}{more}")


@dataclass
class Subject:
    """The spec and the final manifests that the rules read. A backend adds how its manifests are read."""

    spec: JobSpec
    objects: list[Manifest]

    volumes: ClassVar[bool] = False
    """Whether the job runs in an image, and sees no folder but those of its `volumes`."""
    taken: ClassVar[re.Pattern[str]] = re.compile("(?!)")
    """Names of the variables that the cluster or the launcher sets."""
    found_by: ClassVar[re.Pattern[str]] = re.compile("(?!)")
    """Paths by which Lockstep finds a job and its nodes, and paths that must stay a mapping or a list."""
    section: ClassVar[str] = ""
    """The section of job.yaml with the patch of the manifest."""

    @property
    def lacks_image(self) -> bool:
        """Whether the job runs in a container, and names no image for it."""
        return self.volumes and self.spec.image is None

    @property
    def patched(self) -> list[Change]:
        """The changes of the patch to the rendered manifest."""
        return []

    @property
    def environment(self) -> dict[str, Any]:
        """The ranks' variables; the value None stands for a value that comes from elsewhere."""
        return dict(self.spec.env)


S = TypeVar("S", bound=Subject)
Checker = Callable[[S], Iterator[str]]


@dataclass(frozen=True, slots=True)
class Rule(Generic[S]):
    """`check` yields messages; its docstring is the rule's title."""

    id: str
    level: Level
    check: Checker[S]

    @property
    def title(self) -> str:
        return (self.check.__doc__ or "").strip()


class Rules(Generic[S]):
    """The rules of a backend, and those that all backends have; `subject` is the class of the `Subject` that the rules read."""

    def __init__(self, subject: type[S]) -> None:
        self.subject = subject
        self._rules: dict[str, Rule[S]] = {}

    def rule(self, id: str, level: Level = "error") -> Callable[[Checker[S]], Checker[S]]:
        """Registers a check under an id that never changes its meaning."""

        def register(check: Checker[S]) -> Checker[S]:
            assert id not in self._rules, id
            self._rules[id] = Rule(id, level, check)
            return check

        return register

    def all(self) -> list[Rule[Any]]:
        """Returns all rules, in the order of their ids."""
        rules: dict[str, Rule[Any]] = {**COMMON._rules, **self._rules}
        return [rules[id] for id in sorted(rules)]

    def apply(self, spec: JobSpec, objects: list[Manifest]) -> list[Finding]:
        """Returns all findings, in the order of their ids. Manifests may be anything: `patch` can replace any part."""
        subject = self.subject(spec, objects)
        findings = [Finding(rule.id, rule.level, message) for rule in self.all() for message in rule.check(subject)]
        return list(dict.fromkeys(findings))


COMMON = Rules(Subject)
"""Rules that `lockstep lint` applies for every backend."""


@COMMON.rule("LJ005")
def no_image(subject: Subject) -> Iterator[str]:
    """A container needs an image."""
    if subject.lacks_image:
        yield (
            "image is not set: add `image: registry/name@sha256:…` to the job (on SLURM slurm.image), or pass --image "
            "(`make image-cpu` builds one)"
        )


@COMMON.rule("LJ006")
def literal_secret(subject: Subject) -> Iterator[str]:
    """A secret in `env` can be read by everyone who may read the job."""
    for name, value in subject.environment.items():
        if SECRET.search(name.upper()) and value is not None:
            yield f"env {name} looks like a secret, and would stand in what is submitted: refer to it in secrets"


@COMMON.rule("LJ007")
def run_directory(subject: Subject) -> Iterator[str]:
    """In a container the run directory must be an absolute path that the ranks may write."""
    path = subject.spec.run_directory
    if not subject.volumes:
        return
    if not path.startswith("/") or ".." in path or " " in path:
        yield f"run_dir {path!r} must be an absolute path without spaces in a container: use /runs/{subject.spec.name}"
    volume = volume_of(subject.spec, path)
    if volume is not None and volume.read_only:
        yield f"run_dir {path} lies on a read-only volume: drop read_only, or choose another run_dir"


@COMMON.rule("LJ008")
def shards_mounted(subject: Subject) -> Iterator[str]:
    """In a container prepared shards must lie on a volume."""
    shards = subject.spec.shards
    if subject.volumes and shards and not subject.spec.shards_in_a_bucket and volume_of(subject.spec, shards) is None:
        yield f"shards {shards} is not on a volume: add one to volumes, or name a place in a bucket (s3://BUCKET/PREFIX)"


@COMMON.rule("LJ009")
def live(subject: Subject) -> Iterator[str]:
    """Ranks continue without a lost one under `exact` alone."""
    spec = subject.spec
    if spec.live and spec.config is not None and not spec.config.exact:
        yield f"live needs sync.name exact, and the recipe has {spec.config.sync.name}: set it in overrides, or remove live"


@COMMON.rule("LJ010")
def injected_variables(subject: Subject) -> Iterator[str]:
    """The cluster and the launcher set these variables; a value of yours is overridden, or breaks the job."""
    for name in sorted(subject.environment):
        if subject.taken.fullmatch(name):
            yield f"env sets {name}, which the cluster or the launcher sets: remove it"


@COMMON.rule("LJ011")
def found_by(subject: Subject) -> Iterator[str]:
    """A patch may not change names and labels, by which Lockstep finds a job and its nodes."""
    for change in subject.patched:
        if change.ours and subject.found_by.fullmatch(change.path):
            yield (
                f"{subject.section}.patch changes {change.path}, which Lockstep needs as it is, to find the job and its nodes: leave it out"
            )


@COMMON.rule("LJ012", "note")
def changed(subject: Subject) -> Iterator[str]:
    """A patch may open any door that the cluster leaves open, so everything that it changes is shown."""
    for change in subject.patched:
        yield f"{subject.section}.patch sets {change.path}: {json.dumps(change.value)[:200]}"


def volume_of(spec: JobSpec, path: str) -> Volume | None:
    """Returns the volume that `path` lies on, or None. The longest mount path wins."""
    return max((one for one in spec.volumes if holds(one.path, path)), key=lambda one: len(one.path), default=None)
