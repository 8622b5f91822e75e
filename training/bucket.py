"""A bucket, what is asked of it, and how a run lies in it. Imports no torch.

    PREFIX/head                                   a JSON object: which attempt may write, and which checkpoints there are
    PREFIX/<holder>/<n>-step-00000100/<file>      the files of a checkpoint, as on a disk
    PREFIX/<holder>/<n>-run.yaml/run.yaml         the settings that the run was begun with
    PREFIX/<holder>/0-directory/snapshot          the run directory, as that attempt has seen it last
    PREFIX/directory/<run>/<sha256>               parts of files of the run directory
    PREFIX/replaced/<commit>                      the head of a run that `--fresh` has replaced

`checkpoint/object_store.py` writes them, and says what holds there; of the run directory `observe/mirror.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import itertools
import os
import re
import threading
from collections import deque
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from . import extras, files
from .contract import EXIT_FAILED, UserError, printable

HEAD = "head"
MAX_HEAD_BYTES = 4 << 20
TRIES = 5
_PART = 16 << 20
"""Bytes of a request, of which `_AT_ONCE` are under way: that bounds the memory."""
_AT_ONCE = 4
_BACKOFF: Any = {"init_backoff": timedelta(seconds=0.5), "base": 3, "max_backoff": timedelta(seconds=15)}
"""Between the tries of a request: 7 to 10 s in all. The library's own are over after 1 to 2 s, before a gateway has restarted."""
_MOST_PARTS = 9000
"""S3 takes 10,000 parts of an object."""
URL = re.compile(r"(s3|gs|az)://[A-Za-z0-9][A-Za-z0-9._-]{1,221}(/[A-Za-z0-9][A-Za-z0-9._=-]*)+/?")
_NO_CREDENTIALS = re.compile(r"169\.254\.|latest/api/token|computeMetadata|Account must be specified")
"""Of errors where the environment has none, and the store's library has looked for an identity of this machine."""
Tag: TypeAlias = Any
"""What the store compares: an entity tag, a generation."""
KEY = r"[0-9a-f]{32}/\d{1,12}-[a-z0-9.-]{1,40}/[a-z][a-z.]{0,40}"
"""Of what attempts have sent."""
_Token = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
_Size = Annotated[int, Field(ge=0, lt=1 << 60)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class File(_Strict):
    """A file in the bucket."""

    key: Annotated[str, Field(pattern=f"^{KEY}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    bytes: _Size


class Kept(_Strict):
    """A checkpoint in the bucket: its files by their names on a disk, and its score, if it has one, by which rule."""

    step: _Size
    files: dict[Annotated[str, Field(pattern=r"^[a-z][a-z.]{0,40}$")], File]
    score: float | None
    score_of: str

    def scored(self, rule: str) -> float | None:
        return self.score if self.score_of == rule else None


class Head(_Strict):
    """What `head` holds. `commit` is drawn anew each time; `sha256` is that of the rest."""

    format: Literal[1] = 1
    run: _Token
    holder: _Token
    commit: _Token
    before: _Token | None = None
    """The attempt whose copy of the run directory counts until the holder has sent one."""
    settings: File | None = None
    checkpoints: list[Kept] = []
    """Newest first."""
    sha256: str = ""

    def text(self) -> bytes:
        sealed = self.model_copy(update={"sha256": self.seal()})
        return sealed.model_dump_json().encode()

    def seal(self) -> str:
        return hashlib.sha256(self.model_dump_json(exclude={"sha256"}).encode()).hexdigest()

    @property
    def snapshots(self) -> list[str]:
        """The keys of the run directory's copies; the first one that is there counts."""
        return [f"{holder}/0-directory/snapshot" for holder in (self.holder, self.before) if holder is not None]

    @property
    def keys(self) -> set[str]:
        """Of what an attempt has sent and the head leads to."""
        return {*self.snapshots, *(file.key for file in self.files())}

    def files(self) -> Iterator[File]:
        if self.settings is not None:
            yield self.settings
        for kept in self.checkpoints:
            yield from kept.files.values()


@dataclass(frozen=True, slots=True)
class Found:
    head: Head
    tag: Tag


class Bucket:
    """What is under `url`.

    Args:
        url: `s3://BUCKET/PREFIX`, `gs://…`, `az://CONTAINER/PREFIX`. Endpoint and credentials come from the environment, or from the
            identity of the node or pod.
        retries: of a request that has no answer.

    Raises:
        UserError: it is no such URL, or obstore is not installed.
    """

    def __init__(self, url: str, retries: int = 6) -> None:
        with extras.explained():
            import obstore
            from obstore.exceptions import (
                AlreadyExistsError,
                BaseError,
                PermissionDeniedError,
                PreconditionError,
                UnauthenticatedError,
            )
            from obstore.store import from_url
        if not URL.fullmatch(url):
            raise UserError(
                f"expected s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX, got {printable(url)}"
            )
        self.url = url.rstrip("/")
        self._obstore, self._error, self._loop = obstore, BaseError, _loop(os.getpid())
        self._refused = (AlreadyExistsError, PreconditionError)
        self._denied = (PermissionDeniedError, UnauthenticatedError)
        self._compares_bare = False
        plain = any(value.startswith("http://") for name, value in os.environ.items() if "ENDPOINT" in name)
        try:
            self._store = from_url(
                self.url,
                client_options={"timeout": "60s", "connect_timeout": "10s", "allow_http": plain},
                retry_config={"max_retries": retries, "retry_timeout": timedelta(seconds=60), "backoff": _BACKOFF},
            )
        except (BaseError, ValueError) as error:
            raise UserError(f"{self.url} cannot be used: {reason(error)}") from None

    @contextlib.contextmanager
    def asking(self, key: str) -> Iterator[None]:
        """Raises `OSError` for whatever goes wrong, `FileNotFoundError` where there is no such object, `PermissionError` where the store
        wants other credentials."""
        try:
            yield
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
                raise OSError(f"{self.url}/{key}: there is no such bucket") from None
            raise FileNotFoundError(f"{self.url}/{key}: there is no such object") from None
        except (self._error, OSError, ValueError) as error:
            why = reason(error)
            if none := _NO_CREDENTIALS.search(why) is not None:
                why = f"the environment has no credentials, and this machine has no identity ({why})"
            kind = PermissionError if none or isinstance(error, self._denied) else OSError
            raise kind(f"{self.url}/{key}: {why}") from None

    def read_head(self) -> Found | None:
        """The head as it is now; None: there is none. Read again where it was damaged on the way. Raises `OSError`."""
        for _ in range(TRIES):
            try:
                text, tag = self.read(HEAD, MAX_HEAD_BYTES)
            except FileNotFoundError:
                return None
            with contextlib.suppress(ValidationError):
                head = Head.model_validate_json(text)
                if head.sha256 == head.seal():
                    return Found(head, tag)
        raise OSError(f"{self.url}/{HEAD} is not what a run writes: choose another prefix")

    def read(self, key: str, limit: int) -> tuple[bytes, Tag]:
        """A small object, and its tag. Raises `OSError` where it is larger than `limit` bytes, `FileNotFoundError` without one."""
        with self.asking(key):
            answer = self._obstore.get(self._store, key)
            if (size := answer.meta["size"]) > limit:
                raise ValueError(f"it has {size} bytes, at most {limit} are read")
            return bytes(answer.bytes()), _tag(answer.meta)

    def put(self, key: str, data: bytes) -> None:
        """Raises `OSError`."""
        with self.asking(key):
            self._obstore.put(self._store, key, data, use_multipart=False)

    def swap(self, key: str, data: bytes, tag: Tag | None) -> bool:
        """Puts an object in the place of the one with this tag; None: where there is none. False: another one is there. That is also the
        answer where it was done, its answer was lost, and it was asked again. Raises `OSError`."""
        with self.asking(key):
            if tag is None or self._compares_bare:
                return self._put_if(key, data, tag and _bare(tag))
            if self._put_if(key, data, tag):
                return True
            # Refused, and the tag is still that one: Ceph compares it without its quotes (until ceph/ceph#63348). R2 wants them, so only a
            # store that refuses its own tag is asked without.
            with contextlib.suppress(FileNotFoundError):
                if _tag(self._obstore.head(self._store, key)) == tag and self._put_if(key, data, _bare(tag)):
                    self._compares_bare = True
                    return True
        return False

    def _put_if(self, key: str, data: bytes, tag: Tag | None) -> bool:
        with contextlib.suppress(*self._refused):
            self._obstore.put(self._store, key, data, mode="create" if tag is None else tag, use_multipart=False)
            return True
        return False

    def check_conditions(self, key: str) -> None:
        """Tries with an object of its own whether the store heeds conditions, and removes it. Raises `OSError`: it does not."""
        try:
            self.put(key, b"1")
            _, first = self.read(key, 1)
            self.swap(key, b"2", first)
            _, second = self.read(key, 1)
            if second == first:
                raise OSError(f"{self.url}/{key}: was not written on a condition that holds")
            for condition, stale in (("that there is none", None), ("that it is an older one", first)):
                if self.swap(key, b"3", stale):
                    raise OSError(
                        f"{self.url}/{key}: was written on the condition {condition}: the store has no conditional writes, "
                        "which keep out a second writer"
                    )
        finally:
            self.remove([key])

    def size(self, key: str) -> int:
        """Bytes of an object. Raises `OSError`, `FileNotFoundError` without one."""
        with self.asking(key):
            return int(self._obstore.head(self._store, key)["size"])

    def send(self, file: Path | BinaryIO, key: str) -> None:
        """A file, in parts. One that is open is sent whatever becomes of its name. Raises `OSError`."""
        size = os.stat(file if isinstance(file, Path) else file.fileno()).st_size
        with self.asking(key):
            self._obstore.put(
                self._store, key, file, chunk_size=max(_PART, size // _MOST_PARTS + 1), max_concurrency=_AT_ONCE
            )

    def pieces(self, key: str, size: int, sha256: str, damaged: type[Exception]) -> Iterator[memoryview]:
        """The bytes of an object, a part at a time. Raises `OSError`; after the last part `damaged` where they are not those that were
        sent."""
        digest = hashlib.sha256()
        try:
            for piece in self._parts(key, size):
                digest.update(piece)
                yield piece
        except FileNotFoundError:
            raise
        except OSError:
            if (found := self.size(key)) != size:
                raise damaged(f"{self.url}/{key} has {found} bytes, expected {size}") from None
            raise
        if digest.hexdigest() != sha256:
            raise damaged(f"{self.url}/{key} is not what was written: its sha256 differs")

    def _parts(self, key: str, size: int) -> Iterator[memoryview]:
        """In order, while those behind are fetched. Raises `OSError`."""

        async def part(start: int) -> memoryview:
            options = {"range": (start, min(start + _PART, size))}
            answer = await self._obstore.get_async(self._store, key, options=options)
            if answer.meta["size"] != size:
                raise ValueError(f"it has {answer.meta['size']} bytes, expected {size}")
            return memoryview(await answer.bytes_async())

        starts = iter(range(0, size, _PART))
        under_way = deque[Future[memoryview]]()
        try:
            while True:
                for start in itertools.islice(starts, _AT_ONCE - len(under_way)):
                    under_way.append(asyncio.run_coroutine_threadsafe(part(start), self._loop))
                if not under_way:
                    return
                with self.asking(key):
                    piece = under_way.popleft().result()
                yield piece
        finally:
            for future in under_way:
                future.cancel()

    def fetch(
        self, key: str, size: int, sha256: str, path: Path, damaged: type[Exception], durable: bool = True
    ) -> None:
        """An object as a new file, which is on the disk when this returns. Raises as `pieces`.

        Args:
            durable: not of a file that is verified, and fetched again, by whoever finds it after a crash.
        """
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            for piece in self.pieces(key, size, sha256, damaged):
                files.write_all(descriptor, piece)
            if durable:
                files.fsync(descriptor)
        finally:
            os.close(descriptor)

    def keys(self) -> dict[str, int]:
        """Key → bytes of all objects. Raises `OSError`."""
        with self.asking(""):
            return {entry["path"]: entry["size"] for page in self._obstore.list(self._store) for entry in page}

    def remove(self, keys: Collection[str]) -> None:
        """As far as the store lets it."""
        with contextlib.suppress(OSError), self.asking(""):
            if keys:
                self._obstore.delete(self._store, list(keys))


def _tag(meta: Any) -> Tag:
    return {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}


def _bare(tag: Tag) -> Tag:
    return {name: value.strip('"') for name, value in tag.items()}


@functools.cache
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """What waits for several answers at once, in one thread for as long as the process lives: a save starts and ends none
    (`checkpoint/store.py`)."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=f"bucket-{process}", daemon=True).start()
    return loop


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Around what asks a bucket, in a run: an `OSError` becomes a `UserError` that begins with `what`. Another start may reach the bucket,
    so its exit code is 1; 2 where an object is missing, or where other credentials are wanted."""
    try:
        yield
    except OSError as error:
        away = UserError(f"{what}: {error}")
        if not isinstance(error, (FileNotFoundError, PermissionError)):
            away.code = EXIT_FAILED
        raise away from None


def reason(error: BaseException) -> str:
    """The line of an error of obstore that says what happened: after it come those of its source in Rust."""
    return printable(str(error).partition("\n")[0][:300]) or type(error).__name__
