"""Making a job: its code and its NetworkPolicy are there before it, and belong to it afterwards.

A command that is killed between any two steps leaves no job without either: what has no owner yet, the next command settles.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from lockstep.jobs.code import store
from lockstep.jobs.command import identity
from lockstep.jobs.kubernetes import code, policy, render
from lockstep.jobs.kubernetes.answers import Shape
from lockstep.jobs.kubernetes.errors import ApiError
from lockstep.jobs.kubernetes.kinds import KINDS
from lockstep.jobs.kubernetes.section import k8s
from lockstep.jobs.manifest import HASH, Manifest, get
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
    submission = code.new_submission()
    wanted, job = render.kubernetes(spec, submission)
    # Also without code: where a name is taken, this tells whether by an attempt of ours whose answer was lost.
    job["metadata"]["annotations"][code.SUBMISSION] = submission
    version, plural = KINDS[k8s(spec).kind]
    path, policies = f"/apis/{version}/namespaces/{namespace}/{plural}", _policies(namespace)
    try:
        api.create(path, job, Shape, dryRun="All")  # what the server refuses leaves nothing behind
    except ApiError as error:
        if error.status != 409:  # somebody was faster: below it is seen with what
            raise
    code.settle(api, namespace, spec.name, find)
    pieces = code.maps(spec, submission, store.packed(identity(spec))) if spec.code is not None else []
    try:
        code.bring(api, namespace, pieces)
        policy.secure(api, policies, wanted, find)
        live = _made(api, path, job, find)
        if live is None:
            with contextlib.suppress(ApiError):
                policy.drop_unowned(api, policies, wanted["metadata"]["name"])
            raise UserError(f"{spec.name} was submitted by someone else just now, with another spec")
    except (ApiError, UserError) as error:
        if pieces and not isinstance(error, Unreachable):  # then the job may be there
            with contextlib.suppress(ApiError, UserError):
                code.settle(api, namespace, spec.name, find)
        raise
    live = code.typed({**live, "kind": k8s(spec).kind})
    policy.own(api, policies, wanted, live)
    made = code.submission_of(live) == submission
    if pieces and made:
        code.own(api, namespace, pieces, live)
    elif pieces:
        code.settle(api, namespace, spec.name, lambda: live)
    return live, made


def _made(api: Api, path: str, job: Manifest, find: Callable[[], Manifest | None]) -> Manifest | None:
    """The job that is there now; None where it is one of another spec."""
    try:
        made: Manifest = api.create(path, job)
        return made
    except ApiError as error:
        if error.status != 409:
            raise
    found = find()  # somebody was faster, or our answer was lost on the way
    if get(found, "metadata", "deletionTimestamp"):
        raise UserError(f"{job['metadata']['name']} is being deleted by someone else: submit it again when it is gone")
    same = get(found, "metadata", "labels", HASH) == get(job, "metadata", "labels", HASH)
    return found if same else None


def keep(api: Api, namespace: str, spec: JobSpec, job: Manifest, own: JobSpec | None) -> None:
    """Brings back what a submission that was cut off has left out of a job that is there.

    Args:
        own: the job's spec, which says how its code was packed.
    """
    live, submission = code.typed(job), code.submission_of(job)
    wanted, *_ = render.kubernetes(spec, submission or code.RENDERED)
    policy.keep(api, _policies(namespace), wanted, live)
    if spec.code is None:
        return
    there = code.settle(api, namespace, spec.name, lambda: job)
    packed = store.packed(identity(spec))
    missing = [item for item in code.maps(spec, submission, packed) if item["metadata"]["name"] not in there]
    if missing and (own is None or own.code is None or own.code.packed != len(packed)):
        raise UserError(
            f"the code of {spec.name} is no longer in the cluster, and was packed on another machine: cancel the job and submit it again"
        )
    code.own(api, namespace, missing, live)


def _policies(namespace: str) -> str:
    return f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"
