"""What a lint rule is, and what it looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from jobs.manifest import Manifest, get, mappings
from jobs.spec.model import JobSpec

Level = Literal["error", "warning"]
COMPOSE = "Compose"


@dataclass(frozen=True, slots=True)
class Finding:
    """One complaint: `message` says what was found and what to do."""

    id: str
    level: Level
    message: str

    def __str__(self) -> str:
        return f"{self.id} {self.level}: {self.message}"


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod template of the job."""

    replica: str
    count: Any
    restart_policy: Any
    metadata: Any
    spec: Any

    @property
    def container(self) -> Manifest:
        """The container `pytorch` (PyTorchJob) or `node` (TrainJob); empty where there is none."""
        named = [item for item in mappings(get(self.spec, "containers")) if item.get("name") in ("pytorch", "node")]
        return named[0] if named else {}

    def resource(self, name: str) -> Any:
        return get(self.container, "resources", "limits", name)


class Subject:
    """What the rules look at: the spec and the final manifests."""

    def __init__(self, spec: JobSpec, objects: list[Manifest]) -> None:
        self.spec, self.objects = spec, objects

    @cached_property
    def job(self) -> Manifest:
        kinds = ("PyTorchJob", "TrainJob", "Slurm")
        return next((item for item in self.objects if item.get("kind") in kinds), {})

    @cached_property
    def kind(self) -> str:
        """PyTorchJob, TrainJob or Compose; empty where a patch has taken it away."""
        if any("services" in item for item in self.objects):
            return COMPOSE
        return str(self.job.get("kind") or "")

    @cached_property
    def services(self) -> dict[str, Manifest]:
        """The services of a Compose file by name."""
        found: Any = next((item["services"] for item in self.objects if "services" in item), {})
        return (
            {str(key): value for key, value in found.items() if isinstance(value, dict)}
            if isinstance(found, dict)
            else {}
        )

    @property
    def is_pytorchjob(self) -> bool:
        return self.job.get("kind") == "PyTorchJob"

    @cached_property
    def replicas(self) -> dict[str, Any]:
        found = get(self.job, "spec", "pytorchReplicaSpecs")
        return found if isinstance(found, dict) else {}

    @cached_property
    def pods(self) -> list[Pod]:
        if self.is_pytorchjob:
            return [
                Pod(
                    str(key), get(replica, "replicas"), get(replica, "restartPolicy"),
                    get(replica, "template", "metadata"), get(replica, "template", "spec"),
                )
                for key, replica in self.replicas.items()
            ]  # fmt: skip
        found = []
        for patch in mappings(get(self.job, "spec", "runtimePatches")):
            jobs = get(patch, "trainingRuntimeSpec", "template", "spec", "replicatedJobs")
            for item in mappings(jobs):
                template = get(item, "template", "spec", "template")
                spec = self._with_trainer(get(template, "spec"))
                found.append(Pod("Node", self.spec.nodes, None, get(template, "metadata"), spec))
        return found

    def _with_trainer(self, spec: Any) -> Any:
        """The pod as the runtime will put it together: image, command, env and resources stand in `trainer`."""
        trainer = get(self.job, "spec", "trainer")
        if not isinstance(spec, dict) or not isinstance(trainer, dict):
            return spec
        own = {key: trainer[key] for key in ("image", "command", "env") if key in trainer}
        own |= {"resources": trainer["resourcesPerNode"]} if "resourcesPerNode" in trainer else {}
        return {**spec, "containers": [{**item, **own} for item in mappings(spec.get("containers"))]}


@dataclass(frozen=True, slots=True)
class Rule:
    """`check` yields messages; its docstring is the rule's title."""

    id: str
    level: Level
    check: Callable[[Subject], Iterator[str]]
    kinds: tuple[str, ...]

    @property
    def title(self) -> str:
        return (self.check.__doc__ or "").strip()

    def apply(self, subject: Subject) -> Iterator[Finding]:
        if subject.kind in self.kinds or (not subject.kind and self.kinds != (COMPOSE,)):
            for message in self.check(subject):
                yield Finding(self.id, self.level, message)


_RULES: dict[str, Rule] = {}
BOTH = ("PyTorchJob", "TrainJob")
SLURM = ("Slurm",)


def rule(
    id: str, level: Level = "error", kinds: tuple[str, ...] = BOTH
) -> Callable[[Callable[[Subject], Iterator[str]]], Callable[[Subject], Iterator[str]]]:
    """Registers a check under an id that never changes its meaning."""

    def register(check: Callable[[Subject], Iterator[str]]) -> Callable[[Subject], Iterator[str]]:
        assert id not in _RULES, id
        _RULES[id] = Rule(id, level, check, kinds)
        return check

    return register


def rules() -> list[Rule]:
    """All rules by id."""
    return [_RULES[id] for id in sorted(_RULES)]
