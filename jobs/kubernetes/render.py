"""Pure functions from a JobSpec to a manifest: no cluster, no clock, no network; same spec, same bytes."""

from __future__ import annotations

from lockstep.jobs.kubernetes import code, pytorchjob, trainjob
from lockstep.jobs.kubernetes.section import k8s
from lockstep.jobs.manifest import Manifest
from lockstep.jobs.spec.model import JobSpec


def kubernetes(spec: JobSpec, submission: str = code.RENDERED) -> list[Manifest]:
    """The objects of a Kubernetes job but those of its code, in the order in which `submit` creates them."""
    frame = trainjob if k8s(spec).kind == "TrainJob" else pytorchjob
    return frame.render(spec, submission)
