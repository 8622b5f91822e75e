"""Making a job, owner first: the job is created suspended, then what belongs to it, then one patch lets it run.

So no pod runs without its NetworkPolicy and its code, and nothing is left without an owner: what belongs to a job goes with it.
Names hold a word of the submission, so that what is left of an earlier job of the name is in nobody's way. A submission that was
cut off leaves a job that says so (`INCOMPLETE`): the next `submit` finishes it, `cancel` removes it.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lockstep.jobs.code import store
from lockstep.jobs.command import identity
from lockstep.jobs.kubernetes import render
from lockstep.jobs.kubernetes.answers import METADATA_LIST, ApiError
from lockstep.jobs.kubernetes.observe import INCOMPLETE
from lockstep.jobs.kubernetes.render import CODE_KEY, CODE_PART_BYTES, RENDERED, SUBMISSION
from lockstep.jobs.kubernetes.section import KINDS, KUEUE_QUEUE
from lockstep.jobs.manifest import HASH, JOB, MANAGED, Manifest, get, merge, spec_in
from lockstep.jobs.spec.model import JobSpec
from lockstep.jobs.status import Unreachable
from lockstep.training.contract import UserError

if TYPE_CHECKING:
    from lockstep.jobs.kubernetes.api import Api


def create(api: Api, namespace: str, spec: JobSpec, find: Callable[[], Manifest | None]) -> tuple[Manifest, bool]:
    """The job, and whether this command has made it: another one may have sent the same spec at the same time.

    Args:
        find: asks for the job of that name.

    Raises:
        UserError: somebody else has submitted another spec, or the code does not fit.
        ApiError: the server refuses.
    """
    submission = uuid.uuid4().hex[:8]
    *_, job = render.manifests(spec, submission)
    marks = {"annotations": {SUBMISSION: submission, INCOMPLETE: "true"}, "labels": {KUEUE_QUEUE: None}}
    path = job_path(namespace, job["kind"])
    try:
        live: Manifest | None = api.create(path, merge(job, {"metadata": marks, "spec": _suspended(job, True)}))
    except ApiError as error:
        if error.status != 409:
            raise
        live = find()  # somebody was faster, or our answer was lost on the way
    if live is None or get(live, "metadata", "deletionTimestamp"):
        raise UserError(f"{spec.name} is being deleted by someone else: submit it again when it is gone")
    if get(live, "metadata", "labels", HASH) != spec.hash():
        raise UserError(f"{spec.name} was submitted by someone else just now, with another spec")
    made = submission_of(live) == submission
    try:
        complete(api, namespace, spec, live)
    except (ApiError, UserError) as error:
        if made and not isinstance(error, Unreachable):  # else the next submission finishes it
            with contextlib.suppress(ApiError, UserError):
                api.delete(f"{path}/{spec.name}", deletion(live))
        raise
    return live, made


def complete(api: Api, namespace: str, spec: JobSpec, live: Manifest) -> None:
    """Brings what belongs to a job and is not there, and lets a job run that was waiting for it.

    Args:
        spec: of the job's own hash. How its code was packed says the one that it was made from.
    """
    submission = submission_of(live) or RENDERED
    policy, job = render.manifests(spec, submission)
    owned = {"ownerReferences": [_owner(job, live)]}
    _bring(
        api, f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies", merge(policy, {"metadata": owned})
    )
    if spec.code is not None:
        packed, maps = store.packed(identity(spec)), f"/api/v1/namespaces/{namespace}/configmaps"
        selector = ",".join(
            f"{key}={value}" for key, value in {JOB: spec.name, SUBMISSION: submission, **MANAGED}.items()
        )
        there = {
            get(item, "metadata", "name") for item in api.pages(maps, labelSelector=selector, accept=METADATA_LIST)
        }
        missing = [item for item in render.code_maps(spec, submission, packed) if item["metadata"]["name"] not in there]
        if missing and get(spec_in(get(live, "metadata", "annotations")), "code", "packed") != len(packed):
            raise UserError(
                f"the code of {spec.name} is not in the cluster, and was packed on another machine: cancel the job and submit it again"
            )
        for item in missing:
            _bring(api, maps, merge(item, {"metadata": owned}))
    if get(live, "metadata", "annotations", INCOMPLETE) is not None:
        # Where there is a queue (a patch may name it), Kueue lets the job run.
        queue = get(job, "metadata", "labels", KUEUE_QUEUE)
        marks: Manifest = {"uid": get(live, "metadata", "uid"), "annotations": {INCOMPLETE: None}}
        run = (
            {"metadata": {**marks, "labels": {KUEUE_QUEUE: queue}}}
            if queue
            else {"metadata": marks, "spec": _suspended(job, None)}
        )
        api.patch(f"{job_path(namespace, job['kind'])}/{spec.name}", run)


def _suspended(job: Manifest, value: bool | None) -> Manifest:
    """Where a job says whether it waits; None: as it was rendered."""
    place = job["spec"] if job["kind"] == "TrainJob" else job["spec"]["runPolicy"]
    found = {"suspend": bool(place.get("suspend")) if value is None else value}
    return found if job["kind"] == "TrainJob" else {"runPolicy": found}


def _bring(api: Api, path: str, item: Manifest) -> None:
    """Makes an object whose name is this submission's alone. Raises `UserError` where it is above the server's limits."""
    try:
        api.create(path, item)
    except ApiError as error:
        if item["kind"] == "ConfigMap" and (
            error.status == 413 or (error.status == 422 and "too l" in str(error).lower())
        ):
            size = len(item["binaryData"][CODE_KEY]) * 3 // 4 >> 10
            raise UserError(
                f"the cluster refuses a ConfigMap of {size} KiB ({error.status}: {' '.join(str(error).split())}); a piece of code "
                f"has {CODE_PART_BYTES >> 10} KiB at most: make the code smaller (.lockstepignore), or put it into the image"
            ) from None
        if error.status != 409:
            raise


def job_path(namespace: str, kind: str, name: str = "") -> str:
    version, plural = KINDS[kind]
    return f"/apis/{version}/namespaces/{namespace}/{plural}{f'/{name}' if name else ''}"


def submission_of(job: Manifest) -> str:
    """The word of the submission that made a job; "" where lockstep did not submit it."""
    return str(get(job, "metadata", "annotations", SUBMISSION) or "")


def deletion(item: Manifest) -> dict[str, Any]:
    """Of that very object, after all that belongs to it."""
    conditions = {"uid": get(item, "metadata", "uid")}
    return {
        "apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground", "preconditions": conditions,
    }  # fmt: skip


def _owner(job: Manifest, live: Manifest) -> dict[str, Any]:
    """No `blockOwnerDeletion`: that takes rights of its own."""
    names = {key: get(live, "metadata", key) for key in ("name", "uid")}
    return {"apiVersion": job["apiVersion"], "kind": job["kind"], **names}
