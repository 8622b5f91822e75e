"""Checks of a bucket's operations for a job: `lockstep doctor s3://BUCKET/PREFIX` tries it, with the credentials of this shell."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from lockstep.training.bucket import Bucket

from .status import Check

_KEY, _CONTENT = "probe", b"lockstep"


def check(url: str) -> list[Check]:
    """Returns one check for each operation of a run on a bucket. All objects lie below the prefix, so other objects are neither listed nor
    changed.

    Raises:
        UserError: `url` is no URL of a bucket, or obstore is not installed.
    """
    bucket = Bucket(f"{url.rstrip('/')}/doctor-{secrets.token_hex(8)}")
    trials: dict[str, tuple[Callable[[], object], str]] = {
        "write": (lambda: bucket.put(_KEY, _CONTENT), "an object was written"),
        "read": (lambda: _read(bucket), "and read back"),
        "list": (lambda: _listed(bucket), "it is listed"),
        "conditions": (
            lambda: bucket.check_conditions("conditions"),
            "a second create and a swap with an old tag are refused: one attempt writes",
        ),
        "delete": (lambda: _deleted(bucket), "and removed"),
    }
    checks: list[Check] = []
    for name, (trial, done) in trials.items():
        try:
            trial()
        except OSError as error:
            checks.append(Check(name, "missing", str(error)))
            if name == "write":
                break  # the other rows need the object
        else:
            checks.append(Check(name, "ok", done))
    return [*checks, _unfinished(url)]


def _read(bucket: Bucket) -> None:
    if bucket.read(_KEY, len(_CONTENT))[0] != _CONTENT:
        raise OSError(f"{bucket.url}/{_KEY} is not what was written")


def _listed(bucket: Bucket) -> None:
    listed = bucket.keys()
    if _KEY not in listed:
        raise OSError(f"{bucket.url}/{_KEY} was written, and is not listed: what a killed attempt has left would stay")


def _deleted(bucket: Bucket) -> None:
    bucket.remove([_KEY])
    try:
        bucket.size(_KEY)
    except FileNotFoundError:
        return
    raise OSError(f"{bucket.url}/{_KEY} cannot be deleted: earlier checkpoints would stay")


def _unfinished(url: str) -> Check:
    """Returns a note about unfinished uploads. The library cannot read the lifecycle rules of a store."""
    if url.startswith("az://"):
        return Check("unfinished uploads", "ok", "Azure drops blocks that were not committed after a week")
    rule = "AbortIncompleteMultipartUpload"
    return Check(
        "unfinished uploads", "note", f"parts that a kill has left cost money: give the bucket a lifecycle rule {rule}"
    )
