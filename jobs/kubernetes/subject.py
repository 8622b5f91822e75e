"""What the rules of Kubernetes look at."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lockstep.jobs import lint
from lockstep.jobs.manifest import Manifest, get, mappings

PYTORCHJOB = ("PyTorchJob",)
TRAINJOB = ("TrainJob",)
KINDS = PYTORCHJOB + TRAINJOB


def number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


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

    @property
    def plain(self) -> dict[str, Any]:
        """As one mapping, for paths into it."""
        parts = {"metadata": self.metadata, "spec": self.spec, "container": self.container}
        return {"restartPolicy": self.restart_policy, **parts}

    def resource(self, name: str) -> Any:
        return get(self.container, "resources", "limits", name)


class Subject(lint.Subject):
    """A PyTorchJob or TrainJob, and what is submitted beside it."""

    @property
    def image(self) -> str | None:
        return self.spec.image

    @cached_property
    def job(self) -> Manifest:
        return next((item for item in self.objects if item.get("kind") in KINDS), {})

    @cached_property
    def kind(self) -> str:  # type: ignore[override]  # read, never set
        """PyTorchJob or TrainJob; empty where a patch has taken it away."""
        return str(self.job.get("kind") or "")

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


RULES = lint.Rules(Subject)
rule = RULES.rule
