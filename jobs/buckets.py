"""A check of a bucket for a job: `lockstep doctor s3://BUCKET/PREFIX` tries it, with the credentials of this shell."""

from __future__ import annotations

import secrets

from lockstep.training.bucket import Bucket

from .status import Check

_KEY, _CONTENT = "probe", b"lockstep"


def check(url: str) -> list[Check]:
    """Tries what a run does in a bucket, one after the other. All objects lie below the prefix, so other objects are neither listed nor
    changed.

    Raises:
        UserError: `url` is no URL of a bucket, or obstore is not installed.
    """
    bucket = Bucket(f"{url.rstrip('/')}/doctor-{secrets.token_hex(8)}")
    try:
        bucket.put(_KEY, _CONTENT)
        try:
            if bucket.read(_KEY, len(_CONTENT))[0] != _CONTENT:
                raise OSError(f"{bucket.url}/{_KEY} is not what was written")
            if _KEY not in set(bucket.keys()):
                raise OSError(
                    f"{bucket.url}/{_KEY} was written, and is not listed: what a killed attempt has left would stay"
                )
            bucket.check_conditions("conditions")
        finally:
            bucket.remove([_KEY])
        if bucket.keys():
            raise OSError(f"{bucket.url}/{_KEY} cannot be deleted: earlier checkpoints would stay")
    except OSError as error:
        return [Check("bucket", "missing", str(error))]
    return [Check("bucket", "ok", "an object is written, read, listed, swapped under conditions and deleted")]
