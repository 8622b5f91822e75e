"""A backend that hands a manifest to a cluster: what is rendered of a job, and what reads it before it is submitted."""

from __future__ import annotations

import abc
import functools
import re
from typing import Any

from lockstep.jobs.backend import Backend, Specs
from lockstep.jobs.code import store
from lockstep.jobs.lint import Finding, Rules, errors
from lockstep.jobs.manifest import Manifest, to_yaml
from lockstep.jobs.spec.model import JobSpec
from lockstep.jobs.status import Check, Submitted
from lockstep.jobs.terminal import warn
from lockstep.training.contract import UserError

Manifests = list[Manifest]  # these are named here, because `list` is a method of every backend
Checks = list[Check]
Findings = list[Finding]


class Cluster(Backend):
    """The class methods are pure functions of the spec: no cluster is asked, same spec, same bytes."""

    @functools.cached_property
    def _warned(self) -> set[str]:
        """What `refuse` has said, without its numbers."""
        return set()

    @classmethod
    @abc.abstractmethod
    def manifests(cls, spec: JobSpec) -> Manifests:
        """What `submit` hands over, in order; lint reads it."""

    @classmethod
    @abc.abstractmethod
    def rules(cls) -> Rules[Any]:
        """The lint rules that read `manifests`."""

    @classmethod
    @abc.abstractmethod
    def preparation(cls, spec: JobSpec) -> tuple[str, object]:
        """What `lockstep prepare --dry-run` prints: as text, and as plain values. Raises `UserError`."""

    @classmethod
    @abc.abstractmethod
    def doctor(cls, spec: JobSpec | None, **place: str | None) -> Checks:
        """What would keep a job from running there."""

    @abc.abstractmethod
    def prepare(self, spec: JobSpec) -> Submitted:
        """Writes the recipe's shards, or submits what does. Raises `UserError`."""

    @classmethod
    def render(cls, spec: JobSpec, runs: Specs) -> tuple[str, object]:  # noqa: ARG003 - for a backend with arrays
        """What `lockstep render` prints of a job, or of the runs of a sweep: as text, and as plain values."""
        found = [manifest for run in runs for manifest in cls.manifests(run)]
        return to_yaml(found), found

    @classmethod
    def code_manifests(cls, spec: JobSpec, packed: bytes) -> Manifests:  # noqa: ARG003 - for a backend that sends it
        """The objects that carry the archive of the job's code to a cluster. Raises `UserError` where there are none."""
        raise UserError(
            f"render {cls.name} has no code to write: --with-code is for backends that send code as objects (k8s)"
        )

    @classmethod
    def lint(cls, spec: JobSpec) -> Findings:
        """What is wrong with a job, before it is submitted."""
        spec, _ = store.pinned(spec)
        return cls.rules().apply(spec, cls.manifests(spec))

    def findings(self, spec: JobSpec) -> Findings:
        """`lint` of a job that is submitted there."""
        return self.lint(spec)

    def refuse(self, spec: JobSpec) -> None:
        """Prints the warnings, each once for all runs of a sweep. Raises `UserError` for the first error."""
        findings = self.findings(spec)
        for item in findings:
            alike = re.sub(r"\d+", "N", item.message)
            if item.level == "warning" and alike not in self._warned:
                self._warned.add(alike)
                warn(f"{item.id}: {item.message}")
        found = errors(findings)
        if found:
            more = f" (and {len(found) - 1} more: see `lockstep lint --backend {self.name}`)" if len(found) > 1 else ""
            raise UserError(f"{spec.name}: {found[0]}{more}")
