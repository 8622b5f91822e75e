"""Writes the shards of a source from its pieces.

manifest = prepare(config.data)                           # finds them, or makes them once a node under a file lock
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import filelock
import numpy as np

from .. import files
from ..bucket import Bucket, as_user_error
from ..config import Data
from ..contract import UserError, say
from . import sources
from .order import bounds
from .shards import MANIFEST, MAX_MANIFEST, SPLITS, Manifest
from .sources.raw import Raw, Stream, checked, cut, numbered

_CHUNK = 4 << 20
_KINDS = {np.dtype(np.uint8): "U8", np.dtype(np.float32): "F32"}


def write(raw: Raw | Stream, directory: Path, source: str, num_shards: int, split: str = "honest") -> Manifest:
    """Writes the shards and, last, the manifest; `directory` appears complete or not at all.

    However many samples there are, no more than a piece of them is in memory. With `split` "exercise", the first tenth of
    all samples is both what trains and what tests.

    Raises:
        UserError: the folder exists already or cannot be written, or a piece of the source cannot be used.
    """
    if directory.exists():
        raise UserError(f"{directory} exists already: choose another folder, or remove it")
    stream = raw.stream() if isinstance(raw, Raw) else raw
    try:
        _write(stream, directory, source, num_shards, split)
    except OSError as error:
        raise UserError(f"cannot write shards to {directory}: {error.strerror or error}") from None
    return Manifest.read(directory)


def send(data: Data, url: str) -> Manifest:
    """Copies the shards of a source into a bucket: the files, by their sha256, and last the manifest, if there is none yet.

    Raises:
        UserError: as `prepare`; there are shards already; the bucket cannot be reached (exit code 1).
    """
    bucket = Bucket(url)
    with as_user_error("the shards cannot be sent"):
        manifest = prepare(data)
        about = manifest.model_dump(mode="json", exclude={"directory"}, exclude_defaults=True)
        for split, shards in manifest.splits.items():
            for shard, entry in zip(shards, about["splits"][split]):
                entry["file"] = f"{shard.sha256}.safetensors"
                with files.regular(manifest.file(shard, verify=True)) as file:
                    bucket.put(entry["file"], file)
        text = (json.dumps(about, indent=1) + "\n").encode()
        if not bucket.swap(MANIFEST, text, None) and bucket.read(MANIFEST, MAX_MANIFEST)[0] != text:
            raise UserError(
                f"{bucket.url} exists already, and has shards: choose another prefix, or remove its {MANIFEST}"
            )
    return manifest


def _write(stream: Stream, directory: Path, source: str, num_shards: int, split: str) -> None:
    with files.replacing(directory, durable=False) as staging, contextlib.ExitStack() as spools:
        staging.mkdir(parents=True)
        train, test = (spools.enter_context(contextlib.closing(_Spool(staging / f".{name}"))) for name in SPLITS)
        for name, spool in zip(SPLITS, (train, test)):
            with contextlib.closing(stream.pieces(name)) as pieces:
                for number, piece in enumerate(pieces):
                    for samples, labels in cut(*piece):
                        spool.append(samples, labels, f"{source}: piece {number} of the split {name}")
            if not len(spool):
                raise UserError(f"{source} has no sample for the split {name}")
        if test.shape != train.shape or test.dtype != train.dtype:
            raise UserError(
                f"{source} has training samples of {train.dtype} {list(train.shape)} and test samples of "
                f"{test.dtype} {list(test.shape)}: both must be of the same kind"
            )
        most = max(int(train.labels.max()), int(test.labels.max()))
        classes = stream.classes if stream.classes is not None else numbered(most + 1)
        if most >= len(classes):
            raise UserError(
                f"{source} has a label {most}, and names {len(classes)} classes: expected 0 … {len(classes) - 1}"
            )
        trained = len(train)
        if split == "exercise":  # the first tenth of all samples
            trained = min(max((len(train) + len(test)) // 10, 1), trained)
            tested = train.cut(staging, "test", 1, trained, shrink=False)
        else:
            tested = test.cut(staging, "test", 1, len(test))
        if len(absent := np.flatnonzero(np.bincount(train.labels[:trained], minlength=len(classes)) == 0)):
            names = ", ".join(classes[number] for number in absent[:10]) + (", …" if len(absent) > 10 else "")
            say(
                f"warning: {source} has no training sample for {len(absent)} of {len(classes)} classes ({names}): the largest label is "
                f"{most}, check the labels",
                sys.stderr,
            )
        about: dict[str, Any] = {
            "format": 1, "source": source, "classes": classes, "shape": list(train.shape),
            "splits": {"train": train.cut(staging, "train", num_shards, trained), "test": tested},
        }  # fmt: skip
        if split == "honest":  # else it is not these samples that were measured
            about["mean"], about["std"] = train.statistics()
        spools.close()
        (staging / MANIFEST).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def cache_directory(data: Data) -> Path:
    """Returns the folder of a source's cached shards: one for each (source, its files, options, split, number of shards).

    Raises `UserError` if a user's function does not exist.
    """
    stamps = sources.stamps(data.source, Path(data.root), data.options)
    parts = [1, data.source, data.options, data.split, data.num_shards, *sources.code_of(data.source), stamps]
    name = re.sub(r"[^\w.]+", "-", data.source)
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return Path(data.root) / "shards" / f"{name}-{digest[:12]}"


def prepare(data: Data) -> Manifest:
    """Returns the shards' manifest. If they are missing, one process makes them while the others wait, for a bounded time.

    Raises:
        UserError: the data is missing or corrupt, the folder cannot be written, or the wait took too long.
    """
    if data.shards is not None:
        return Manifest.fetch(data) if "://" in data.shards else Manifest.read(Path(data.shards))
    directory = cache_directory(data)
    if (directory / MANIFEST).exists():
        return Manifest.read(directory)
    lock = directory.with_name(f"{directory.name.rpartition('-')[0]}.lock")  # not of these files: they may be under way
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(lock, timeout=data.prepare_timeout):
            if not (cache_directory(data) / MANIFEST).exists():
                stream = sources.stream(data)
                directory = cache_directory(data)  # a source that was just downloaded has its files only now
                for left in directory.parent.glob(f".{directory.name}.*"):  # by one that was killed: we hold the lock
                    shutil.rmtree(left, ignore_errors=True)
                made = write(stream, directory, data.source, data.num_shards, data.split)
                if data.source not in sources.SOURCES and made.mean is not None and not made.fits(data):
                    say(f"warning: {made.statistics(data)}", sys.stderr)
    except filelock.Timeout:
        raise UserError(
            f"another process has held {lock} for {data.prepare_timeout:.0f} s: check that process, "
            "or wait longer with data.prepare_timeout"
        ) from None
    except OSError as error:
        raise UserError(
            f"cannot use {lock.parent} ({error.strerror}): set data.root to a folder that can be written, "
            "or data.shards to ready shards"
        ) from None
    return Manifest.read(cache_directory(data))


class _Spool:
    """A file with the samples of one split before they are in shards: their number is known only at the end.

    At most one piece is in memory, and 8 bytes for each label. The shards have the same bytes as files of the safetensors library. The
    spool is cut from its end, and shrinks with each cut.

    Raises `OSError` if the disk refuses.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shape: tuple[int, ...] = ()
        self.dtype = np.dtype(np.uint8)
        self._file = path.open("w+b")
        self._labels: list[np.ndarray] = []
        self._count = self._values = 0
        self._sum: Any = 0
        self._squares: Any = 0

    def __len__(self) -> int:
        return self._count

    @property
    def labels(self) -> np.ndarray:
        """int64 [n]"""
        return np.concatenate(self._labels) if self._labels else np.zeros(0, np.int64)

    def append(self, samples: np.ndarray, labels: np.ndarray, where: str) -> None:
        """Appends a piece. Raises a `UserError` that begins with `where` for a piece that no shard can hold."""
        samples, labels = checked(samples, labels, where)
        if not len(labels):
            return
        if self._count and (samples.shape[1:] != self.shape or samples.dtype != self.dtype):
            got = f"{samples.dtype} {list(samples.shape[1:])}"
            raise UserError(f"{where} has samples of {got}, those before are {self.dtype} {list(self.shape)}")
        self.shape, self.dtype = samples.shape[1:], samples.dtype
        self._file.write(np.ascontiguousarray(samples).data)
        self._labels.append(labels)
        self._count += len(labels)
        self._measure(samples)

    def _measure(self, samples: np.ndarray) -> None:
        if samples.dtype == np.uint8:
            rows, channels = samples.reshape(-1, samples.shape[2] * samples.shape[3]), samples.shape[3]
            squares = np.square(rows, dtype=np.uint16)  # 255² fits
            self._sum += rows.sum(0, dtype=np.int64).reshape(-1, channels).sum(0)
            self._squares += squares.sum(0, dtype=np.int64).reshape(-1, channels).sum(0)
            self._values += samples.size // channels
        else:
            self._sum += samples.sum(dtype=np.float64)
            self._squares += np.square(samples, dtype=np.float64).sum()
            self._values += samples.size

    def statistics(self) -> tuple[list[float], list[float]]:
        """Returns (mean, standard deviation) of each channel for pixels in 0…1; one number each for feature vectors."""
        unit = 255 if self.dtype == np.uint8 else 1
        pairs = zip(np.atleast_1d(self._sum).tolist(), np.atleast_1d(self._squares).tolist())
        means, deviations = [], []
        for total, squares in pairs:  # of whole numbers where the samples are, however large
            mean = total / self._values
            means.append(round(mean / unit, 6))
            deviations.append(round(math.sqrt(max(squares / self._values - mean * mean, 0.0)) / unit, 6))
        return means, deviations

    def cut(self, folder: Path, split: str, num_files: int, total: int, shrink: bool = True) -> list[dict[str, Any]]:
        """Writes the first `total` samples as shards of a split, and returns the manifest's entries of them.

        Args:
            shrink: the samples leave the spool, file by file, so that the disk holds them once.
        """
        self._file.flush()
        labels, count = self.labels, min(num_files, total)
        entries = []
        for number in reversed(range(count)):
            low, high = bounds(total, number, count)
            path = folder / f"{split}-{number:05d}.safetensors"
            sha256 = self._write(path, low, labels[low:high])
            entries.append({"file": path.name, "count": high - low, "sha256": sha256})
            if shrink:
                self._file.truncate(low * self._sample_bytes)
        return entries[::-1]

    @property
    def _sample_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def _write(self, path: Path, low: int, labels: np.ndarray) -> str:
        """Writes one shard, in the safetensors format. Returns its sha256."""
        size = len(labels) * self._sample_bytes
        images = ("images", _KINDS[self.dtype], [len(labels), *self.shape], size)
        digest = hashlib.sha256()
        with path.open("xb") as file:

            def write(data: bytes) -> None:
                digest.update(data)
                file.write(data)

            write(files.safetensors_header([("labels", "I64", labels.shape, labels.nbytes), images]))
            write(labels.astype("<i8").tobytes())
            self._file.seek(low * self._sample_bytes)
            while size:
                chunk = self._file.read(min(size, _CHUNK))
                if not chunk:
                    raise OSError(5, f"{self.path.name} has become shorter")
                write(chunk)
                size -= len(chunk)
        path.chmod(0o644)  # a container's user reads it, too
        return digest.hexdigest()

    def close(self) -> None:
        """Closes and removes the spool's file."""
        self._file.close()
        self.path.unlink(missing_ok=True)
