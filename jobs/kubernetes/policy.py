"""The NetworkPolicy of a job: there before its first pod, gone with it, and nobody else's.

Its name holds the hash of the spec, and it selects pods by it: of two submissions at once, each has its own.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from lockstep.jobs.kubernetes.errors import ApiError
from lockstep.jobs.manifest import HASH, JOB, MANAGED, Manifest, get, mappings
from lockstep.training.contract import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.jobs.kubernetes.api import Api

GONE_SECONDS = 30.0
"""How long a policy that was deleted may stay."""


def secure(api: Api, path: str, policy: Manifest, live: Callable[[], Manifest | None]) -> None:
    """Makes the policy, or takes over one that lockstep has made for the same job and spec.

    One that belongs to a job that is gone is taken away first: the cluster's garbage collection, which comes half a
    second after its owner's end, would take it from the new job.

    Args:
        path: of the namespace's policies.
        live: asks for the job of that name.

    Raises:
        UserError: somebody else's policy has the name.
    """
    name = policy["metadata"]["name"]
    deadline = time.monotonic() + GONE_SECONDS
    while True:
        try:
            api.create(path, policy)
        except ApiError as error:
            if error.status != 409:
                raise
        else:
            return
        if time.monotonic() > deadline:
            raise UserError(
                f"the NetworkPolicy {name} cannot be made, and the one of an earlier job still exists: try again"
            )
        there = _get(api, f"{path}/{name}")
        if there is None:  # it has just gone, or the server was busy with another change
            time.sleep(0.2)
            continue
        wanted = {**MANAGED, JOB: policy["metadata"]["labels"][JOB], HASH: policy["metadata"]["labels"][HASH]}
        if any(get(there, "metadata", "labels", key) != value for key, value in wanted.items()):
            raise UserError(f"the NetworkPolicy {name} exists, and lockstep did not make it: choose another name")
        owners = {owner.get("uid") for owner in mappings(get(there, "metadata", "ownerReferences"))}
        leaving = get(there, "metadata", "deletionTimestamp") is not None
        if not leaving and (not owners or get(live(), "metadata", "uid") in owners):
            api.patch(f"{path}/{name}", {"spec": policy["spec"]})
            return
        if not leaving:
            drop(api, path, there)
        time.sleep(0.2)


def keep(api: Api, path: str, policy: Manifest, job: Manifest) -> None:
    """Brings back what a submission that was cut off has left out: the policy of a job that is there, or its owner."""
    there = _get(api, f"{path}/{policy['metadata']['name']}")
    if there is None or not mappings(get(there, "metadata", "ownerReferences")):
        if there is None:
            secure(api, path, policy, lambda: job)
        own(api, path, policy, job)


def own(api: Api, path: str, policy: Manifest, job: Manifest) -> None:
    """The cluster removes the policy together with the job. (No `blockOwnerDeletion`: that takes rights of its own.)"""
    owner: dict[str, Any] = {
        "apiVersion": job["apiVersion"], "kind": job["kind"], "name": get(job, "metadata", "name"),
        "uid": get(job, "metadata", "uid"),
    }  # fmt: skip
    try:
        api.patch(f"{path}/{policy['metadata']['name']}", {"metadata": {"ownerReferences": [owner]}})
    except ApiError as error:
        if error.status != 404:
            raise
        api.create(path, {**policy, "metadata": {**policy["metadata"], "ownerReferences": [owner]}})


def drop(api: Api, path: str, policy: Manifest) -> None:
    """Deletes that very policy, where nobody owns it or its owner is gone."""
    options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": get(policy, "metadata", "uid")}}
    try:
        api.delete(f"{path}/{get(policy, 'metadata', 'name')}", options)
    except ApiError as error:
        if error.status not in (404, 409):  # gone already, or another one by now
            raise


def drop_unowned(api: Api, path: str, name: str) -> None:
    """Takes away a policy whose job was never made."""
    there = _get(api, f"{path}/{name}")
    if there is not None and not mappings(get(there, "metadata", "ownerReferences")):
        drop(api, path, there)


def _get(api: Api, path: str) -> Manifest | None:
    try:
        found: Manifest = api.get(path)
    except ApiError as error:
        if error.status != 404:
            raise
        return None
    return found
