"""Pure functions from a JobSpec to a manifest: no cluster, no clock, no network; same spec, same bytes."""

from __future__ import annotations

from jobs.manifest import Manifest
from jobs.spec.model import JobSpec


def kubernetes(spec: JobSpec) -> list[Manifest]:
    """The objects of a Kubernetes job, in the order in which `submit` creates them."""
    if spec.k8s.kind == "TrainJob":
        from jobs.kubernetes import trainjob

        return trainjob.render(spec)
    from jobs.kubernetes import pytorchjob

    return pytorchjob.render(spec)
