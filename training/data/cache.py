"""Shards of a bucket on this node's disk: each is fetched once, verified, and kept for the next run that needs it.

<data.root>/shards/fetched/<sha256>          a shard
<data.root>/shards/fetched/.lock-<0 … f>     held by the process that fetches one whose sha256 begins so
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import filelock

from .. import files
from ..bucket import Bucket, Damaged, as_user_error
from ..contract import UserError

FOLDER = "shards/fetched"
"""Below `data.root`."""


class CorruptShard(UserError):
    """A shard file is not what its manifest says."""


class Cache:
    """The shards that were fetched from buckets.

    Args:
        max_bytes: of the cache. The least recently used shards go first; those in `needed` stay.
        needed: sha256 of the shards that this run may need.
        timeout: seconds to wait for another process that fetches the same shard.
    """

    def __init__(self, bucket: Bucket, folder: Path, max_bytes: int, needed: frozenset[str], timeout: float) -> None:
        self._bucket, self.folder, self._max_bytes, self._needed, self._timeout = (
            bucket,
            folder,
            max_bytes,
            needed,
            timeout,
        )
        self.url = bucket.url

    def bring(self, key: str, sha256: str, largest: int, verify: bool) -> Path:
        """The file of a shard. It is there, or one process of the node fetches it while the others wait.

        Args:
            largest: bytes that it can have.
            verify: read it where it is there; it is fetched again where it is not what it was.

        Raises:
            UserError: the bucket cannot be reached (exit code 1); it has no such shard; the disk refuses; the wait took too long.
            CorruptShard: it is not what its manifest says, also when it is fetched again.
        """
        path = self.folder / sha256
        with as_user_error("data.shards cannot be used"):
            try:
                if not _usable(path, sha256, verify):
                    self.folder.mkdir(parents=True, exist_ok=True)
                    with filelock.FileLock(self.folder / f".lock-{sha256[0]}", timeout=self._timeout):
                        if not _usable(path, sha256, verify=True):
                            self._fetch(key, path, largest)
            except filelock.Timeout:
                raise UserError(
                    f"another process has fetched {self.url}/{key} for {self._timeout:.0f} s: check that process, or wait longer with "
                    "data.prepare_timeout"
                ) from None
            except OSError as error:
                if error.errno is None:  # of the bucket
                    raise
                raise UserError(
                    f"cannot keep {self.url}/{key} in {self.folder} ({error.strerror}): set data.root to a folder with more space"
                ) from None
        return path

    def _fetch(self, key: str, path: Path, largest: int) -> None:
        """The lock is held."""
        files.remove_stale(self.folder, (path.name,))
        size = self._bucket.size(key)
        if size > largest:
            raise CorruptShard(f"{self.url}/{key} has {size} bytes, at most {largest} were expected")
        self._make_room(size)
        try:
            with files.replacing(path) as staging:
                self._bucket.fetch(key, size, path.name, staging)
        except Damaged as error:
            raise CorruptShard(str(error)) from None

    def _make_room(self, size: int) -> None:
        """Removes the least recently used shards. A run that trains on them has them mapped."""
        found = []
        for entry in os.scandir(self.folder):
            with contextlib.suppress(OSError):
                if re.fullmatch(r"[0-9a-f]{64}", entry.name):
                    found.append((entry.stat().st_mtime, entry.stat().st_size, Path(entry.path)))
        left = self._max_bytes - size - sum(bytes_ for _, bytes_, _ in found)
        for _, bytes_, path in sorted(found):
            if left >= 0:
                break
            if path.name not in self._needed:
                path.unlink(missing_ok=True)
                left += bytes_


def _usable(path: Path, sha256: str, verify: bool) -> bool:
    """Whether it is there; it is used now. Raises `OSError`."""
    try:
        with contextlib.suppress(PermissionError):  # another user's
            os.utime(path)
        return not verify or files.difference(path, sha256) is None
    except FileNotFoundError:
        return False
