"""The requests to a bucket. Imports no torch. `checkpoint/object_store.py` has the layout of a run in a bucket."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypeVar

from . import extras, files
from .contract import BUCKET_URL, EXIT_FAILED, EXIT_USAGE, UserError, first_line, printable

_PART = 16 << 20
"""Bytes of a request: that bounds the memory, in which an upload has `_AT_ONCE`. An answer has to arrive within the client's time-out:
that of a whole object does not."""
_AT_ONCE = 4
_BACKOFF: Any = {"init_backoff": timedelta(seconds=0.5), "base": 3, "max_backoff": timedelta(seconds=15)}
"""Pauses between the tries of a request, 7 to 10 s in all. obstore's own end after 1 to 2 s, before a gateway has restarted."""
_MAX_PARTS = 9000
"""S3 takes 10,000 parts of an object."""
R = TypeVar("R")
Tag: TypeAlias = Any
"""The version of an object that a conditional write compares: an entity tag, a generation."""


class Damaged(OSError):
    """An object differs from what was sent."""


class Bucket:
    """The objects under `url`.

    Args:
        url: `s3://BUCKET/PREFIX`, `gs://…`, `az://CONTAINER/PREFIX`. Endpoint and credentials come from the environment, or from the
            identity of the node or pod.

    Raises:
        UserError: it is no such URL, or obstore is not installed.
    """

    def __init__(self, url: str) -> None:
        with extras.explained():
            import obstore
            from obstore import exceptions
            from obstore.store import from_url
        if not re.fullmatch(BUCKET_URL, url):
            raise UserError(f"expected s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX, got {url}")
        self.url = url.rstrip("/")
        self._obstore, self._errors = obstore, exceptions
        plain = any(value.startswith("http://") for name, value in os.environ.items() if "ENDPOINT" in name)
        try:
            self._store = from_url(
                self.url,
                client_options={"timeout": "60s", "connect_timeout": "10s", "allow_http": plain},
                retry_config={"max_retries": 6, "retry_timeout": timedelta(seconds=60), "backoff": _BACKOFF},
            )
        except (exceptions.BaseError, ValueError) as error:
            raise UserError(f"{self.url} cannot be used: {first_line(error)[:300]}") from None

    @contextlib.contextmanager
    def _asking(self, key: str) -> Iterator[None]:
        """Raises `OSError` for whatever goes wrong, `FileNotFoundError` where there is no such object, `PermissionError` where the store
        wants other credentials."""
        try:
            yield
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
                raise OSError(f"{self.url}/{key}: there is no such bucket") from None
            raise FileNotFoundError(f"{self.url}/{key}: there is no such object") from None
        except (self._errors.BaseError, OSError, ValueError) as error:
            denied = isinstance(error, (self._errors.PermissionDeniedError, self._errors.UnauthenticatedError))
            reason = printable(first_line(error)[:300])  # the other lines are those of obstore's source in Rust
            raise (PermissionError if denied else OSError)(f"{self.url}/{key}: {reason}") from None

    def read(self, key: str, limit: int) -> tuple[bytes, Tag]:
        """Returns a small object, and its tag. Raises `OSError` if it has more than `limit` bytes, `FileNotFoundError`."""
        with self._asking(key):
            answer = self._obstore.get(self._store, key)
            if (size := answer.meta["size"]) > limit:
                raise ValueError(f"it has {size} bytes, at most {limit} are read")
            tag = {name: answer.meta[name] for name in ("e_tag", "version") if answer.meta[name] is not None}
            return bytes(answer.bytes()), tag

    def put(self, key: str, data: bytes | BinaryIO) -> None:
        """Writes an object, a large one in parts. Raises `OSError`."""
        size = len(data) if isinstance(data, bytes) else os.fstat(data.fileno()).st_size
        part = max(_PART, size // _MAX_PARTS + 1)
        with self._asking(key):
            self._obstore.put(self._store, key, data, chunk_size=part, max_concurrency=_AT_ONCE)

    def swap(self, key: str, data: bytes, tag: Tag | None) -> bool:
        """Replaces the object that has this tag; None: creates it.

        Returns:
            Whether it did. Also False if an answer was lost, and obstore has repeated the request.

        Raises:
            OSError: there is no answer.
        """
        with self._asking(key), contextlib.suppress(self._errors.AlreadyExistsError, self._errors.PreconditionError):
            self._obstore.put(self._store, key, data, mode="create" if tag is None else tag, use_multipart=False)
            return True
        return False

    def check_conditions(self, key: str) -> None:
        """Tests with a probe object whether the store heeds conditions. Raises `OSError`: it does not."""
        try:
            self.put(key, b"1")
            _, tag = self.read(key, 1)
            self.swap(key, b"2", tag)
            refused = [not self.swap(key, b"3", stale) for stale in (tag, None)]
            if self.read(key, 1)[0] != b"2" or not all(refused):
                raise OSError(f"{self.url}/{key}: the store has no conditional writes, which keep out a second writer")
        finally:
            self.remove([key])

    def parts(self, key: str) -> Iterator[memoryview]:
        """Yields an object of any size in parts. Raises `OSError`, `FileNotFoundError`."""
        with self._asking(key):
            size = int(self._obstore.head(self._store, key)["size"])
        for start in range(0, size, _PART):
            with self._asking(key):  # in this thread: a save starts none, and Jupyter has an event loop here
                part = self._obstore.get_range(self._store, key, start=start, end=min(start + _PART, size))
            yield memoryview(part)

    def fetch(self, key: str, path: Path) -> None:
        """Downloads an object into a new file, which is on the disk when this returns. Raises `OSError`, `FileNotFoundError`."""
        with path.open("xb") as file:
            file.writelines(self.parts(key))
            file.flush()
            files.fsync(file.fileno())

    def keys(self) -> list[str]:
        """Returns the keys of all objects. Raises `OSError`."""
        with self._asking(""):
            return [entry["path"] for page in self._obstore.list(self._store) for entry in page]

    def remove(self, keys: Collection[str]) -> None:
        """Removes objects, as far as the store lets it."""
        with contextlib.suppress(OSError), self._asking(""):
            if keys:
                self._obstore.delete(self._store, list(keys))


def read_again(damaged: tuple[type[Exception], ...], read: Callable[..., R], *arguments: Any) -> R:
    """Returns what `read` does, at its second try if the first raises `damaged`: an object may be damaged on its way alone."""
    with contextlib.suppress(*damaged):
        return read(*arguments)
    return read(*arguments)


@contextlib.contextmanager
def as_user_error(what: str, unreachable: int = EXIT_FAILED) -> Iterator[None]:
    """Turns an `OSError` of a bucket into a `UserError` that begins with `what`. Its exit code is 2 if an object is missing or damaged,
    or the store wants other credentials. Else it is `unreachable`: another start may reach the bucket."""
    try:
        yield
    except OSError as error:
        reached = isinstance(error, (FileNotFoundError, PermissionError, Damaged))
        raise UserError(f"{what}: {error}", code=EXIT_USAGE if reached else unreachable) from None
