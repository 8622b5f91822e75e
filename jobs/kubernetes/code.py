"""The code of a job in ConfigMaps: there before the job, gone with it, and nobody else's.

Their names hold the job's, the code's identity and a word of the submission, so that each submission has its own: the
garbage collection that takes away those of an earlier job, and somebody else who submits at the same time, touch none of
them. Between the first map and the job they have no owner; what a killed command leaves there, the next one settles.
"""

from __future__ import annotations

import base64
import contextlib
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from lockstep.jobs.command import identity
from lockstep.jobs.kubernetes.errors import ApiError
from lockstep.jobs.kubernetes.kinds import KINDS
from lockstep.jobs.manifest import JOB, MANAGED, Manifest, get, mappings
from lockstep.jobs.spec.code import CODE_PARTS
from lockstep.training.contract import UserError

if TYPE_CHECKING:
    from lockstep.jobs.kubernetes.api import Api
    from lockstep.jobs.spec.model import JobSpec

PART_BYTES = 900 << 10
"""Of a map's binaryData. A server takes 1 MiB, with everything else that is in the object."""
SUBMISSION = "lockstep/submission"
"""Label of a map and annotation of a job: which submission made it, and so which maps are the job's."""
ROLE = "lockstep/role"
RENDERED = "rendered"
"""In place of a submission's word, where nothing is submitted."""
KEY = "part"
VOLUME = "code"
METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
"""Lists of maps without what is in them."""


def new_submission() -> str:
    return uuid.uuid4().hex[:8]


def submission_of(job: Manifest) -> str:
    """The word of the submission that made a job; "" where lockstep did not submit it."""
    return str(get(job, "metadata", "annotations", SUBMISSION) or "")


def names(spec: JobSpec, submission: str) -> list[str]:
    """Of the job's maps, in the order of the archive's pieces."""
    assert spec.code is not None
    parts = max(1, -(-spec.code.packed // PART_BYTES))
    return [f"{spec.name}-{identity(spec)[:12]}-{submission}-{index}" for index in range(parts)]


def volume(spec: JobSpec, submission: str) -> Manifest:
    """The volume of a pod that holds all pieces, in one folder."""
    sources = [
        {"configMap": {"name": name, "items": [{"key": KEY, "path": f"{KEY}-{index:03d}"}]}}
        for index, name in enumerate(names(spec, submission))
    ]
    return {"name": VOLUME, "projected": {"defaultMode": 0o444, "sources": sources}}


def mount() -> Manifest:
    return {"name": VOLUME, "mountPath": CODE_PARTS, "readOnly": True}


def maps(spec: JobSpec, submission: str, packed: bytes, namespace: str | None = None) -> list[Manifest]:
    """The ConfigMaps that hold the archive `packed`. They cannot be changed, only deleted."""
    labels = {JOB: spec.name, ROLE: "code", SUBMISSION: submission, **MANAGED}
    found = []
    for index, name in enumerate(names(spec, submission)):
        piece = packed[index * PART_BYTES : (index + 1) * PART_BYTES]
        metadata = {"name": name, **({"namespace": namespace} if namespace else {}), "labels": labels}
        data = {KEY: base64.b64encode(piece).decode()}
        found.append(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "immutable": True, "binaryData": data}
        )
    return found


def path(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/configmaps"


def bring(api: Api, namespace: str, wanted: list[Manifest]) -> None:
    """Makes the maps. Raises `UserError` where the server's limits are too small."""
    for item in wanted:
        try:
            api.create(path(namespace), item)
        except ApiError as error:
            if error.status == 413 or (error.status == 422 and "too l" in str(error).lower()):
                size = len(item["binaryData"][KEY]) * 3 // 4 >> 10
                raise UserError(
                    f"the cluster refuses a ConfigMap of {size} KiB ({error.status}: {' '.join(str(error).split())}); a piece of code "
                    f"has {PART_BYTES >> 10} KiB at most: make the code smaller (.lockstepignore), or put it into the image"
                ) from None
            if error.status != 409:  # the answer to an earlier attempt was lost: the name is this submission's alone
                raise


def own(api: Api, namespace: str, wanted: list[Manifest], job: Manifest) -> None:
    """The cluster removes the maps together with the job. One that somebody has taken for left over is made anew."""
    owner = _owner(job)
    for item in wanted:
        name = item["metadata"]["name"]
        try:
            api.patch(f"{path(namespace)}/{name}", {"metadata": {"ownerReferences": [owner]}})
        except ApiError as error:
            if error.status != 404:
                raise
            bring(api, namespace, [{**item, "metadata": {**item["metadata"], "ownerReferences": [owner]}}])


def settle(api: Api, namespace: str, name: str, find: Callable[[], Manifest | None]) -> set[str]:
    """What submissions of that job's name have left: maps of the live job become its own, others go.

    Args:
        find: asks for the job of that name; it is asked where there are maps.

    Returns:
        Names of the live job's maps.
    """
    selector = ",".join(f"{key}={value}" for key, value in {JOB: name, ROLE: "code", **MANAGED}.items())
    try:
        found = list(api.pages(path(namespace), labelSelector=selector, accept=METADATA))
    except ApiError as error:
        if error.status != 403:
            raise
        return set()  # who has no rights on maps has left none
    live = typed(find()) if found else {}
    submission, kept = submission_of(live), set()
    for item in found:
        its = bool(submission) and get(item, "metadata", "labels", SUBMISSION) == submission
        owners = mappings(get(item, "metadata", "ownerReferences"))
        place = f"{path(namespace)}/{get(item, 'metadata', 'name')}"
        if its:
            kept.add(str(get(item, "metadata", "name")))
        if owners:
            continue  # an earlier job's go with it
        with _gone():
            if its:
                api.patch(place, {"metadata": {"ownerReferences": [_owner(live)]}})
            else:  # whoever is submitting just now may have made it the job's since it was listed
                conditions = {key: get(item, "metadata", key) for key in ("uid", "resourceVersion")}
                api.delete(place, {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": conditions})
    return kept


def typed(job: Manifest | None) -> Manifest:
    """A job with what an answer may leave out; empty where there is none, or one that is going."""
    if job is None or get(job, "metadata", "deletionTimestamp"):
        return {}
    return {**job, "apiVersion": KINDS[str(job["kind"])][0]}


@contextlib.contextmanager
def _gone() -> Iterator[None]:
    """It is gone, or was changed, since it was listed: either is somebody else's work."""
    try:
        yield
    except ApiError as error:
        if error.status not in (404, 409):
            raise


def _owner(job: Manifest) -> dict[str, Any]:
    """No `blockOwnerDeletion`: that takes rights of its own."""
    metadata = {key: get(job, "metadata", key) for key in ("name", "uid")}
    return {"apiVersion": job["apiVersion"], "kind": job["kind"], **metadata}
