"""Writes the shards of a source from its pieces.

manifest = prepare(config.data)                           # finds them, or makes them once a node under a file lock
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import math
import re
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import torch

from .. import files
from ..bucket import Bucket, as_user_error
from ..config import Data
from ..contract import UserError, to_stderr
from ..limits import PREPARE_SECONDS
from ..parallel.exchange import waiting_for_all
from ..parallel.world import World
from . import sources
from .shards import MANIFEST, MAX_MANIFEST, SPLITS, Manifest
from .sources.raw import Piece, Stream, checked, cut, numbered

SHARD_BYTES = 1 << 30
"""A shard ends when it has so many bytes of samples."""
_HEADER_BYTES = 512
"""Bytes of a shard's header, which is written last. A multiple of 8, so that the samples are aligned."""
_KINDS = {np.dtype(np.uint8): "U8", np.dtype(np.float32): "F32"}


def write(stream: Stream, directory: Path, source: str) -> Manifest:
    """Writes the shards and, last, the manifest; `directory` appears complete or not at all.

    However many samples there are, no more than a piece of them is in memory.

    Raises:
        UserError: the folder exists already or cannot be written, or a piece of the source cannot be used.
    """
    if directory.exists():
        raise UserError(f"{directory} exists already: choose another folder, or remove it")
    try:
        with files.replacing(directory, durable=False) as staging:
            staging.mkdir(parents=True)
            about = _write(stream, staging, source)
            (staging / MANIFEST).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write shards to {directory}: {error.strerror or error}") from None
    return Manifest.read(directory)


def send(data: Data, url: str) -> Manifest:
    """Copies the shards of a source into a bucket: the files, by their sha256, and last the manifest, if there is none yet.

    Raises:
        UserError: as `prepare`; there are shards already; the bucket cannot be reached (exit code 1).
    """
    bucket = Bucket(url)
    taken = UserError(f"{bucket.url} exists already, and has shards: choose another prefix, or remove its {MANIFEST}")
    with as_user_error("the shards cannot be sent"):
        with contextlib.suppress(FileNotFoundError):  # before all shards are made and sent
            bucket.read(MANIFEST, MAX_MANIFEST)
            raise taken
        manifest = prepare(data)
        about = manifest.model_dump(mode="json", exclude={"directory"}, exclude_defaults=True)
        for split, shards in manifest.splits.items():
            for shard, entry in zip(shards, about["splits"][split]):
                entry["file"] = f"{shard.sha256}.safetensors"
                with files.regular(manifest.file(shard, verify=True)) as file:
                    bucket.put(entry["file"], file)
        text = (json.dumps(about, indent=1) + "\n").encode()
        if not bucket.swap(MANIFEST, text, None) and bucket.read(MANIFEST, MAX_MANIFEST)[0] != text:
            raise taken
    return manifest


def _write(stream: Stream, folder: Path, source: str) -> dict[str, Any]:
    """Writes the shards of both splits. Returns the manifest."""
    train, test = (_Split(folder, name) for name in SPLITS)
    for split in (train, test):
        with contextlib.closing(stream.pieces(split.name)) as pieces:
            try:
                split.write(
                    checked(samples, labels, f"{source}: piece {number} of the split {split.name}")
                    for number, piece in enumerate(pieces)
                    for samples, labels in cut(*piece)
                )
            except RuntimeError as error:  # torch raises it anywhere in this thread if a worker is killed
                pieces.throw(error)  # `images` knows the file
                raise
        if not split.entries:
            raise UserError(f"{source} has no sample for the split {split.name}")
    if test.kind != train.kind:
        raise UserError(
            f"{source} has training samples of {train.kind} and test samples of {test.kind}: both must be of the same kind"
        )
    most = max(int(np.flatnonzero(split.counts)[-1]) for split in (train, test))
    classes = stream.classes if stream.classes is not None else numbered(most + 1)
    if most >= len(classes):
        raise UserError(
            f"{source} has a label {most}, and names {len(classes)} classes: expected 0 … {len(classes) - 1}"
        )
    if len(absent := np.flatnonzero(train.counts[: len(classes)] == 0)):
        names = ", ".join(classes[number] for number in absent[:10]) + (", …" if len(absent) > 10 else "")
        to_stderr(
            f"warning: {source} has no training sample for {len(absent)} of {len(classes)} classes ({names}): the largest label is "
            f"{most}, check the labels"
        )
    mean, std = train.statistics()
    return {
        "format": 1,
        "source": source,
        "classes": classes,
        "shape": train.shape,
        "splits": {split.name: split.entries for split in (train, test)},
        "mean": mean,
        "std": std,
    }


def cache_directory(data: Data, stamps: sources.Stamps | None = None) -> Path:
    """Returns the folder of a source's cached shards: one for each (source, its files, options, split).

    Raises `UserError` if a user's function does not exist.
    """
    stamps = sources.stamps(data) if stamps is None else stamps
    parts = [1, data.source, data.options, data.split, *sources.code_of(data.source), stamps]
    name = re.sub(r"[^\w.]+", "-", data.source)
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return Path(data.root) / "shards" / f"{name}-{digest[:12]}"


def prepare(data: Data) -> Manifest:
    """Returns the shards' manifest. If they are missing, one process makes them while the others wait: the lock ends with its process.

    Raises:
        UserError: the data is missing or corrupt, or the folder cannot be written.
    """
    if data.shards is not None:
        return Manifest.fetch(data.shards, data.root) if "://" in data.shards else Manifest.read(Path(data.shards))
    directory = cache_directory(data)
    if (directory / MANIFEST).exists():
        return Manifest.read(directory)
    lock = directory.with_name(f"{directory.name.rpartition('-')[0]}.lock")  # not of these files: they may be under way
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(lock, timeout=PREPARE_SECONDS):
            stamps = sources.stamps(data)  # before the files are read: others may replace them meanwhile
            directory = cache_directory(data, stamps)
            if not (directory / MANIFEST).exists():
                stream = sources.stream(data)
                directory = directory if stamps else cache_directory(data)  # a download has its files only now
                for left in directory.parent.glob(f".{directory.name}.*"):  # by one that was killed: we hold the lock
                    shutil.rmtree(left, ignore_errors=True)
                made = write(stream, directory, data.source)
                if data.source not in sources.SOURCES and not made.fits(data):
                    to_stderr(f"warning: {made.statistics(data)}")
    except filelock.Timeout:
        raise UserError(f"another process has held {lock} for {PREPARE_SECONDS:.0f} s: check that process") from None
    except OSError as error:
        raise UserError(
            f"cannot use {lock.parent} ({error.strerror}): set data.root to a folder that can be written, "
            "or data.shards to ready shards"
        ) from None
    return Manifest.read(directory)


def verified(data: Data, world: World, splits: Sequence[str] = SPLITS) -> Manifest:
    """Returns the manifest of shards whose files of these splits are verified. Collective. Raises `UserError` as `prepare` does."""
    with waiting_for_all(world, "prepare the data", PREPARE_SECONDS):
        manifest = prepare(data)
        shards = [shard for split in splits for shard in manifest.splits[split]]  # which the ranks of a node share
        mine = shards[world.local_rank :: world.local_size]
        # A hash leaves Python's lock. The files of a bucket come one after another.
        from_bucket = "://" in (data.shards or "")
        with ThreadPoolExecutor(1 if from_bucket else torch.get_num_threads()) as pool:
            list(pool.map(functools.partial(manifest.file, verify=True), mine))
    return manifest


class _Split:
    """Writes the shards of a split as its samples come: in memory are a piece, and 8 bytes for each label of a shard.

    Raises `OSError` if the disk refuses.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.entries: list[dict[str, Any]] = []
        """The manifest's entries of the shards."""
        self.counts = np.zeros(1 << 16, np.int64)
        """Samples of each label."""
        self.shape: list[int] = []
        self._folder = folder
        self._dtype = np.dtype(np.uint8)
        self._values = 0
        self._sum: Any = 0
        self._squares: Any = 0

    @property
    def kind(self) -> str:
        return f"{self._dtype} {self.shape}"

    def write(self, pieces: Iterator[Piece]) -> None:
        """Writes the pieces, which are `checked`. Raises `UserError` for one that is of another kind than those before."""
        pieces = (piece for piece in pieces if len(piece[1]))
        for first in pieces:
            path = self._folder / f"{self.name}-{len(self.entries):05d}.safetensors"
            parts: list[np.ndarray] = []
            with path.open("xb") as file:
                file.seek(_HEADER_BYTES)
                for samples, some in itertools.chain([first], pieces):
                    self._measure(samples)
                    file.write(np.ascontiguousarray(samples).data)
                    parts.append(some)
                    if file.tell() >= SHARD_BYTES:
                        break
                labels = np.concatenate(parts)
                images = ("images", _KINDS[self._dtype], [len(labels), *self.shape], file.tell() - _HEADER_BYTES)
                file.write(labels.astype("<i8").tobytes())
                file.seek(0)
                tensors = [images, ("labels", "I64", labels.shape, labels.nbytes)]
                file.write(files.safetensors_header(tensors, size=_HEADER_BYTES))
            path.chmod(0o644)  # a container's user reads it, too
            self.counts += np.bincount(labels, minlength=len(self.counts))
            self.entries.append({"file": path.name, "count": len(labels), "sha256": files.sha256(path)})

    def _measure(self, samples: np.ndarray) -> None:
        before = self.kind
        self._dtype, self.shape = samples.dtype, list(samples.shape[1:])
        if self._values and self.kind != before:
            raise UserError(f"the split {self.name} has samples of {self.kind}, those before are {before}")
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
        unit = 255 if self._dtype == np.uint8 else 1
        pairs = zip(np.atleast_1d(self._sum).tolist(), np.atleast_1d(self._squares).tolist())
        means, deviations = [], []
        for total, squares in pairs:  # of whole numbers where the samples are, however large
            mean = total / self._values
            means.append(round(mean / unit, 6))
            deviations.append(round(math.sqrt(max(squares / self._values - mean * mean, 0.0)) / unit, 6))
        return means, deviations
