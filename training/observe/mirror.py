"""The copy of a run directory in a bucket: what a run has written down outlives its node, and is read from elsewhere.

    PREFIX/<holder>/0-directory/snapshot     the directory as the attempt has seen it last: one object, replaced each time
    PREFIX/directory/<run>/<sha256>          parts of files that do not change any more

Rank 0 sends what has changed every `SECONDS`, before each commit of a checkpoint, and at its end, in a thread of its own: no step waits
for it, and a bucket that does not answer ends no run. An attempt begins with the snapshot of the one before, and writes under keys of its
own. So one that was overtaken, and still lives, changes nothing that `head` leads to. Imports no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
import threading
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, Field

from .. import files
from ..bucket import TRIES, Bucket, Head
from ..contract import (
    EVENTS_FILE,
    HANG_FILE,
    METRICS,
    RUN_FILE,
    STATUS_FILE,
    SUMMARY_FILE,
    TIME_FILE,
    say,
)

SECONDS = 15.0
LAST_SECONDS = 20.0
"""For the last of it, at the end of an attempt."""
PART = 256 << 10
"""Bytes of a part. What follows the last whole one is in the snapshot itself."""
_MOST_BYTES, _MOST_PARTS = 64 << 20, 1 << 13
"""Of a snapshot, unpacked; of a file. What follows is left out."""
_GROW = (EVENTS_FILE, TIME_FILE)
"""Only ever appended to."""
_NAMES = tuple(map(re.escape, (*_GROW, STATUS_FILE, SUMMARY_FILE, RUN_FILE, HANG_FILE)))
NAME = "|".join((*_NAMES, rf"{METRICS}/rank-\d{{5,9}}\.prom"))
"""Of what is sent, in this order: where there is too much, the last ones are left out."""
_FOLDERS = ("", METRICS)


class Damaged(Exception):
    """What the bucket has of a run directory is not what was sent."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Shown(_Strict):
    """A file of the directory."""

    parts: Annotated[list[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]], Field(max_length=_MOST_PARTS)]
    """The sha256 of each; they have `PART` bytes."""
    rest: Annotated[int, Field(ge=0, le=_MOST_BYTES)]
    """Bytes that follow them."""
    bytes: Annotated[int, Field(ge=0, lt=1 << 60)]
    time: Annotated[int, Field(ge=0, lt=1 << 62)]
    """When it was written last: nanoseconds since the epoch."""


class _Table(_Strict):
    """The first line of a snapshot. The rests of the files follow, in the same order."""

    format: Literal[1] = 1
    files: dict[Annotated[str, Field(pattern=f"^({NAME})$")], Shown]


class Snapshot:
    """A run directory as a bucket has it."""

    @classmethod
    def of(cls, bucket: Bucket, head: Head) -> Snapshot:
        """Read again where it was damaged on the way. Raises `FileNotFoundError` where there is none, `OSError`, `Damaged`."""
        for key in head.snapshots:
            with contextlib.suppress(FileNotFoundError):
                for _ in range(TRIES):
                    data, _ = bucket.read(key, _MOST_BYTES)
                    with contextlib.suppress(ValueError, zlib.error):
                        return cls(bucket, head.run, data)
                raise Damaged(f"{bucket.url}/{key} is not what a run writes")
        raise FileNotFoundError(f"{bucket.url} has nothing of a run directory")

    def __init__(self, bucket: Bucket, run: str, data: bytes) -> None:
        self._bucket, self._run = bucket, run
        unpacking = zlib.decompressobj()
        table, _, content = unpacking.decompress(data, _MOST_BYTES).partition(b"\n")
        self.files = _Table.model_validate_json(table).files
        self._rests, at = dict[str, bytes](), 0
        for name, shown in self.files.items():
            self._rests[name] = content[at : at + shown.rest]
            at += shown.rest
        if not unpacking.eof or at != len(content):
            raise ValueError("it was cut off")

    def is_continued_by(self, directory: Path) -> bool:
        """Whether the directory has all of it, and perhaps more: an attempt on this very disk wrote it."""
        return all(self._begins(directory / name, name) for name in _GROW if name in self.files)

    def _begins(self, path: Path, name: str) -> bool:
        try:
            with files.regular(path) as file:
                same = all(_sha256(file.read(PART)) == part for part in self.files[name].parts)
                return same and file.read(len(self._rests[name])) == self._rests[name]
        except OSError:
            return False

    def restore(self, directory: Path, without: Collection[str] = ()) -> None:
        """Writes its files. Those that are there already are left alone. Raises `OSError`, `Damaged`."""
        for name, shown in self.files.items():
            if name in without:
                continue
            path = directory / name
            path.parent.mkdir(exist_ok=True)
            with files.opened_folder(path.parent) as folder:
                with contextlib.suppress(OSError):
                    here = (folder / path.name).lstat()
                    if (here.st_mtime_ns, here.st_size) == (shown.time, shown.bytes):
                        continue
                with files.replacing(folder / path.name, durable=False) as place:
                    self._write(place, folder / path.name, shown, self._rests[name])

    def _write(self, place: Path, before: Path, shown: Shown, rest: bytes) -> None:
        with contextlib.ExitStack() as stack:
            file, old = stack.enter_context(place.open("xb")), None
            with contextlib.suppress(OSError):
                old = stack.enter_context(files.regular(before))
            for part in shown.parts:
                here = old.read(PART) if old is not None else b""
                file.write(here if _sha256(here) == part else self._part(part))
            file.write(rest)
        os.utime(place, ns=(shown.time, shown.time))

    def _part(self, part: str) -> bytes:
        key = _key(self._run, part)
        with contextlib.suppress(FileNotFoundError):
            for _ in range(TRIES):
                data, _ = self._bucket.read(key, PART)
                if _sha256(data) == part:
                    return data
        raise Damaged(f"{self._bucket.url}/{key} is missing, or not what was written")


class Mirror:
    """Keeps the snapshot of one attempt as new as the run directory. From `begin` to `close`.

    Args:
        head: of this attempt; None: it does not hold the run yet, and sends nothing.
        directory: locked for it.
        left: seconds until the process must have ended.
    """

    def __init__(
        self, bucket: Bucket, head: Callable[[], Head | None], directory: Path, left: Callable[[], float]
    ) -> None:
        self._bucket, self._head, self._directory, self._left = bucket, head, directory, left
        self._files = dict[str, Shown]()
        """As they were sent last."""
        self._stamps = dict[str, Any]()
        self._sending, self._ending = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._warned = False

    def bring(self) -> None:
        """Puts what earlier attempts have written down into the directory, if one on another disk has written the last of it. Raises
        `OSError`."""
        head = self._head()
        assert head is not None
        try:
            snapshot = Snapshot.of(self._bucket, head)
            if not snapshot.is_continued_by(self._directory):
                # This start writes its own run.yaml; its settings were compared already.
                snapshot.restore(self._directory, without=(RUN_FILE, HANG_FILE))
            self._files = snapshot.files
        except FileNotFoundError:
            return
        except Damaged as error:
            self._say(f"what earlier attempts have written down is lost: {error}; the run continues")

    def begin(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Sends the last of it, and waits for that, within bounds."""
        self._ending.set()
        if self._thread.is_alive():
            seconds = max(0.0, min(LAST_SECONDS, self._left()))
            self._thread.join(seconds)
            if self._thread.is_alive() and not self._warned:
                self._warned = True
                self._say(
                    f"the run directory could not be sent within {seconds:.0f} s: the next start on this node sends it"
                )

    def _work(self) -> None:
        self.send()
        while not self._ending.wait(SECONDS):
            self.send()
        self.send()

    def send(self) -> None:
        """Sends what has changed. What fails is said once."""
        with self._sending:
            try:
                self._send()
            except OSError as error:
                if not self._warned:
                    self._warned = True
                    self._say(f"the run directory could not be sent, it is tried again: {error}; the run continues")

    def _send(self) -> None:
        head, there = self._head(), listed(self._directory)
        stamps = {name: (found.st_ino, found.st_mtime_ns, found.st_size) for name, found in there.items()}
        if head is None or stamps == self._stamps:
            return
        table, rests, size = dict[str, Shown](), list[bytes](), 0
        for name, found in there.items():
            path = self._directory / name
            with contextlib.suppress(FileNotFoundError), files.opened_folder(path.parent) as folder:
                with files.regular(folder / path.name) as file:
                    parts, rest = self._read(head.run, name, file)
                    at = file.tell()
                if (size := size + len(rest)) > _MOST_BYTES // 2:
                    break
                table[name] = Shown(parts=parts, rest=len(rest), bytes=at, time=found.st_mtime_ns)
                rests.append(rest)
        text = _Table(files=table).model_dump_json().encode()
        self._bucket.put(head.snapshots[0], zlib.compress(b"\n".join([text, b"".join(rests)])))
        self._files, self._stamps = table, stamps

    def _read(self, run: str, name: str, file: BinaryIO) -> tuple[list[str], bytes]:
        """(its parts, which are sent where the bucket lacks them, what follows them)."""
        number = min(os.fstat(file.fileno()).st_size // PART, _MOST_PARTS)
        sent = self._files[name].parts if name in self._files else []
        parts = sent[:number] if name in _GROW else []
        file.seek(len(parts) * PART)
        while len(parts) < number:
            data = file.read(PART)
            parts.append(_sha256(data))
            if parts[-1] not in sent:
                self._bucket.put(_key(run, parts[-1]), data)
        return parts, file.read(PART)

    def _say(self, message: str) -> None:
        say(f"warning: {self._directory}: {message}", sys.stderr)


def listed(directory: Path) -> dict[str, os.stat_result]:
    """The files of a run directory that are sent, and what the disk says of them. No links."""
    found = {}
    for folder in _FOLDERS:
        with contextlib.suppress(OSError), files.opened_folder(directory / folder) as at, os.scandir(at) as entries:
            for entry in entries:
                name = f"{folder}/{entry.name}".lstrip("/")
                with contextlib.suppress(FileNotFoundError):  # it has gone meanwhile
                    if re.fullmatch(NAME, name) and entry.is_file(follow_symlinks=False):
                        found[name] = entry.stat(follow_symlinks=False)
    return {name: found[name] for name in sorted(found, key=lambda name: (name.startswith(METRICS), name))}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _key(run: str, part: str) -> str:
    return f"directory/{run}/{part}"
