"""What the cluster says of a job beside the job and its pods: events, Kueue's Workload, the batch Job of a TrainJob."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.jobs.kubernetes.errors import ApiError
from lockstep.jobs.manifest import JOB, Manifest, get

if TYPE_CHECKING:
    from lockstep.jobs.kubernetes.api import Api


def events(api: Api, namespace: str, about: str) -> list[Manifest]:
    """Of all that has this name, the latest last. Raises `ApiError`."""
    path = f"/api/v1/namespaces/{namespace}/events"
    found = list(api.pages(path, fieldSelector=f"involvedObject.name={about}"))
    return sorted(found, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))


def maker(api: Api, namespace: str, job: Manifest) -> Manifest | None:
    """The batch Job that makes the pods of a TrainJob; None where it is not there, not ours, or not ours to see."""
    if job.get("kind") != "TrainJob":
        return None
    name = get(job, "metadata", "name")
    try:
        found: Manifest = api.get(f"/apis/batch/v1/namespaces/{namespace}/jobs/{name}-node-0")
    except ApiError as error:
        if error.status not in (403, 404):
            raise
        return None
    return found if get(found, "spec", "template", "metadata", "labels", JOB) == name else None


def workload(api: Api, namespace: str, job: Manifest) -> Manifest | None:
    """Where the job stands in Kueue's queue; None where Kueue is not there. Raises `ApiError`."""
    selector = f"kueue.x-k8s.io/job-uid={get(job, 'metadata', 'uid')}"
    for version in ("v1beta2", "v1beta1"):
        try:
            path = f"/apis/kueue.x-k8s.io/{version}/namespaces/{namespace}/workloads"
            return next(api.pages(path, labelSelector=selector), None)
        except ApiError as error:
            if error.status not in (403, 404):
                raise
    return None
