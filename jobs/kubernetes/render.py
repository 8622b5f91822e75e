"""Pure functions from a JobSpec to a manifest: no cluster, no clock, no network; same spec, same bytes."""

from __future__ import annotations

from jobs.kubernetes import pytorchjob, trainjob
from jobs.kubernetes.section import k8s
from jobs.manifest import Manifest
from jobs.spec.model import JobSpec


def kubernetes(spec: JobSpec) -> list[Manifest]:
    """The objects of a Kubernetes job, in the order in which `submit` creates them."""
    return trainjob.render(spec) if k8s(spec).kind == "TrainJob" else pytorchjob.render(spec)
