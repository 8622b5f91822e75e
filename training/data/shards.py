"""Shards: safetensors files of samples and labels with a manifest of counts and sha256, read by mmap.

Samples are uint8 images [n, h, w, c] or float32 feature vectors [n, f]; the tensor is called `images` in either case.

manifest = Manifest.read(prepare(config.data))            # finds them, or makes them once a node under a file lock
samples = Samples.open(manifest, "train", low, high)      # opens only the files that hold ids low … high − 1
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import mmap
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import filelock
import safetensors
import torch
from pydantic import AfterValidator, Field

from lockstep.training import files
from lockstep.training import manifest as manifests
from lockstep.training.config import Data, settings
from lockstep.training.config.settings import Section
from lockstep.training.contract import UserError, say
from lockstep.training.data import sources
from lockstep.training.data.sources.raw import Piece, Raw, Stream, numbered
from lockstep.training.data.spool import Spool
from lockstep.training.parallel.process import mapped_bytes

MANIFEST = "manifest.json"
MADE_FROM = "made-from.json"
"""Beside the manifest of cached shards: size and time of each file of the source that they were made from."""
_SPLITS = ("train", "test")
MAPPED_BYTES = 128 << 20
"""Bytes of mapped files that `Samples.take` may add to a process' memory, about; one batch more is possible."""
_NEAR = 0.02
"""Difference of two means or deviations that changes no training."""
_MEND = "make the shards again (python -m lockstep.training shard)"


class CorruptShard(UserError):
    """A shard file is not what its manifest says."""


class Shard(Section):
    file: str = Field(pattern=r"^[\w-]+\.safetensors$")
    count: int = Field(ge=1)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


def _shape(value: tuple[int, ...]) -> tuple[int, ...]:
    if len(value) not in (1, 3) or not all(0 < size < 1 << 16 for size in value):
        raise ValueError(f"must be [height, width, channels] or [features], got {list(value)}")
    return value


def _splits(value: dict[str, list[Shard]]) -> dict[str, list[Shard]]:
    if set(value) != set(_SPLITS) or not all(value.values()):
        raise ValueError(f"must have files for {' and '.join(_SPLITS)}")
    return value


class Manifest(Section):
    """What a folder of shards holds."""

    directory: Path
    format: Literal[1]
    source: str
    classes: list[str] = Field(min_length=1)
    shape: Annotated[tuple[int, ...], Field(strict=False), AfterValidator(_shape)]
    """Of a sample: (height, width, channels) of an image, (features,) of a vector."""
    splits: Annotated[dict[str, list[Shard]], AfterValidator(_splits)]
    mean: list[float] | None = Field(default=None, min_length=1)
    """Of the training samples: of each channel for pixels in 0…1, or one number for vectors. None: with `split` "exercise"."""
    std: list[float] | None = Field(default=None, min_length=1)
    """The same of their standard deviation."""
    left_out: dict[str, str] = Field(default_factory=dict)
    """Name of each of the source's files that could not be used (the first 100), and why."""
    num_left_out: int = 0

    def count(self, split: str) -> int:
        return sum(shard.count for shard in self.splits[split])

    @property
    def dtype(self) -> torch.dtype:
        """The element type of a sample."""
        return torch.uint8 if len(self.shape) == 3 else torch.float32

    @property
    def checksum(self) -> str:
        """One sha256 for all files, in their order."""
        hashes = "".join(shard.sha256 for split in _SPLITS for shard in self.splits[split])
        return hashlib.sha256(hashes.encode()).hexdigest()

    def left_out_message(self) -> str:
        """A line about the files that could not be used."""
        first = [f"{name} ({reason})" for name, reason in self.left_out.items()][:10]
        more = f" and {self.num_left_out - len(first)} more" if self.num_left_out > len(first) else ""
        return f"{self.num_left_out} of the source's files cannot be used and are left out: {', '.join(first)}{more}"

    def fits(self, data: Data) -> bool:
        """Whether mean and deviation that a recipe normalises with are near those of the samples."""
        return all(
            len(configured) in (1, len(measured))
            and all(abs(a - b) < _NEAR for a, b in zip(configured * (len(measured) // len(configured)), measured))
            for configured, measured in ((data.mean, self.mean or []), (data.std, self.std or []))
        )

    def statistics(self, data: Data) -> str:
        """One line with mean and deviation; where the recipe's values do not fit, it says how to set these.

        They are not set silently: they are part of what a run is.
        """
        mean, std = (f"[{','.join(f'{number:.4f}' for number in numbers or [])}]" for numbers in (self.mean, self.std))
        measured = f"mean {mean}, standard deviation {std} of the training samples"
        if self.fits(data):
            return measured
        recipe = "gives none" if (data.mean, data.std) == ([0.0], [1.0]) else f"has {data.mean} and {data.std}"
        return f"{measured}; the recipe {recipe}: set data.mean={mean} data.std={std}"

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Raises `UserError` where the manifest is missing or malformed."""
        path = directory / MANIFEST
        try:
            return manifests.read(
                path, 16 << 20, lambda value: settings.build(cls, {**value, "directory": directory}, "a manifest")
            )
        except OSError as error:
            raise UserError(f"no shards in {directory}: cannot read {MANIFEST} ({error.strerror})") from None
        except manifests.Malformed as error:
            raise UserError(f"{path} is malformed ({error}): {_MEND}") from None


def write(
    raw: Raw | Stream, directory: Path, source: str, num_shards: int,
    made_from: sources.Stamps | None = None, split: str = "honest",
) -> Manifest:  # fmt: skip
    """Writes the shards and, last, the manifest; `directory` appears complete or not at all.

    However many samples there are, no more than a piece of them is in memory. With `split` "exercise", the first tenth of
    all samples is both what trains and what tests.

    Raises:
        UserError: it exists already, or cannot be written; or what the source gives cannot be used.
    """
    if directory.exists():
        raise UserError(f"{directory} exists already: choose another folder, or remove it")
    stream = raw.stream() if isinstance(raw, Raw) else raw
    try:
        _write(stream, directory, source, num_shards, made_from, split)
    except OSError as error:
        raise UserError(f"cannot write shards to {directory}: {error.strerror or error}") from None
    manifest = Manifest.read(directory)
    if manifest.num_left_out:
        say(f"warning: {manifest.left_out_message()}", sys.stderr)
    return manifest


def _write(
    stream: Stream, directory: Path, source: str, num_shards: int, made_from: sources.Stamps | None, split: str
) -> None:
    with files.replacing(directory, durable=False) as staging, contextlib.ExitStack() as spools:
        staging.mkdir(parents=True)
        train, test = (spools.enter_context(contextlib.closing(Spool(staging / f".{name}"))) for name in _SPLITS)
        for name, spool in zip(_SPLITS, (train, test)):
            with contextlib.closing(stream.pieces(name)) as pieces:
                for number, (samples, labels) in enumerate(_readable_pieces(pieces, source)):
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
        tenth = max((len(train) + len(test)) // 10, 1)
        splits = {}
        if split == "exercise":
            tenth = min(tenth, len(train))
            splits["test"] = train.cut(staging, "test", 1, tenth, shrink=False)
        else:
            splits["test"] = test.cut(staging, "test", 1, len(test))
        splits["train"] = train.cut(staging, "train", num_shards, tenth if split == "exercise" else len(train))
        about: dict[str, Any] = {
            "format": 1, "source": source, "classes": classes, "shape": list(train.shape),
            "splits": {name: splits[name] for name in _SPLITS},
        }  # fmt: skip
        if split == "honest":  # else it is not these samples that were measured
            about["mean"], about["std"] = train.statistics()
        if stream.left_out:
            about["left_out"] = dict(itertools.islice(stream.left_out.items(), 100))
            about["num_left_out"] = len(stream.left_out)
        spools.close()
        if made_from:
            (staging / MADE_FROM).write_text(json.dumps(made_from), encoding="utf-8")
        (staging / MANIFEST).write_bytes(manifests.text(about))


def _readable_pieces(pieces: Iterator[Piece], source: str) -> Iterator[Piece]:
    """The same pieces. An `OSError` of the source becomes a `UserError`, so that it is not reported as a write error."""
    try:
        while (piece := next(pieces, None)) is not None:
            yield piece
    except OSError as error:
        raise UserError(f"the source {source} failed: {error}") from error


def cache_directory(data: Data) -> Path:
    """Where the shards of a source are cached: one folder for each (source, options, split, number of shards).

    Raises `UserError` for a user's function that cannot be found.
    """
    parts = [1, data.source, data.options, data.split, data.num_shards, *sources.code_of(data.source)]
    name = re.sub(r"[^\w.]+", "-", data.source)
    return (
        Path(data.root)
        / "shards"
        / f"{name}-{hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]}"
    )


def prepare(data: Data) -> Path:
    """The folder with the shards. Where they are missing, one process makes them while the others wait, bounded.

    Raises:
        UserError: the data is missing or corrupt, the folder cannot be written, or the wait took too long.
    """
    if data.shards is not None:
        return Path(data.shards)
    directory = cache_directory(data)
    if _usable(directory, data):
        return directory
    if not Path(data.root).is_dir() and not data.download and sources.needs_root(data.source):
        raise UserError(
            f"data.root={data.root} does not exist: set it to the folder of {data.source}, or allow downloads"
        )
    lock = directory.with_suffix(".lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(lock, timeout=data.prepare_timeout):
            for left in directory.parent.glob(f".{directory.name}.*"):  # by one that was killed: we hold the lock
                shutil.rmtree(left, ignore_errors=True)
            if not _usable(directory, data):
                stamps = _stamps(data)
                stream = sources.stream(data)
                if directory.exists():
                    shutil.rmtree(directory)  # who trains on it has its files mapped
                # Of a source that has just been downloaded there are stamps only now.
                made = write(stream, directory, data.source, data.num_shards, stamps or _stamps(data), data.split)
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
    return directory


def _stamps(data: Data) -> sources.Stamps:
    return sources.stamps(data.source, Path(data.root), data.options)


def _usable(directory: Path, data: Data) -> bool:
    """Whether shards are there, made from the source's files as they are. Without these files they are all there is."""
    stamps = _stamps(data) if (directory / MANIFEST).exists() else None
    return stamps is not None and stamps in ([], files.read_json(directory / MADE_FROM))


class _Mapped:
    """The tensor `name` of a safetensors file, which is known to be sound.

    Raises `OSError`; `ValueError` or `KeyError` for a file that was replaced since.
    """

    def __init__(self, path: Path, name: str, dtype: torch.dtype) -> None:
        with files.regular(path) as file:
            size = int.from_bytes(file.read(8), "little")
            about = json.loads(file.read(size))[name]
            # Copy-on-write: torch has no read-only tensors. Nothing here writes, so no page is copied.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        low, high = about["data_offsets"]
        count = (high - low) // dtype.itemsize
        self.tensor = torch.frombuffer(self._map, dtype=dtype, count=count, offset=8 + size + low).view(about["shape"])

    def give_back(self) -> None:
        """The pages that were read. They are read again, mostly from the kernel's cache, when they are needed."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


class Kept:
    """Gives the pages of some mapped files back when the process has more of mapped files in its memory than `MAPPED_BYTES`.

    How many pages a read brings in is the kernel's choice (up to a megabyte around it), so it is asked.
    """

    def __init__(self, maps: list[_Mapped]) -> None:
        self._maps = maps
        self._floor = mapped_bytes() or 0

    def look(self) -> None:
        """To be called after some samples have been read."""
        mapped = mapped_bytes() or 0
        if mapped - self._floor > MAPPED_BYTES:
            for mapped_file in self._maps:
                mapped_file.give_back()
            mapped = mapped_bytes() or 0
            self._floor = mapped
        self._floor = min(self._floor, mapped)


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples with ids `low` … `high` − 1 of one split, from files that are mapped into memory, not read.

    What `take` has touched of them is given back before it is much.
    """

    low: int
    high: int
    starts: list[int]
    images: list[torch.Tensor]
    labels: list[torch.Tensor]
    kept: Kept

    def __len__(self) -> int:
        return self.high - self.low

    @property
    def num_bytes(self) -> int:
        return sum(images.numel() * images.element_size() for images in self.images)

    @classmethod
    def open(cls, manifest: Manifest, split: str, low: int, high: int, verify: bool = True) -> Samples:
        """Opens the files that hold any of these ids. Raises `UserError` for one that is missing or corrupt."""
        starts, maps, labels = [], [], []
        start = 0
        for shard in manifest.splits[split]:
            if start < high and low < start + shard.count:
                mapped, shard_labels = _open_shard(manifest, shard, verify)
                starts.append(start)
                maps.append(mapped)
                labels.append(shard_labels)
            start += shard.count
        return cls(low, high, starts, [mapped.tensor for mapped in maps], labels, Kept(maps))

    def take(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(samples [b, …], labels [b]) of global ids, gathered on the CPU."""
        if len(self.images) == 1:
            rows = ids - self.starts[0]
            images, labels = self.images[0][rows], self.labels[0][rows]
            self.kept.look()
            return images, labels
        images = torch.empty((len(ids), *self.images[0].shape[1:]), dtype=self.images[0].dtype)
        labels = torch.empty(len(ids), dtype=torch.int64)
        for start, some_images, some_labels in self._files():
            inside = (ids >= start) & (ids < start + len(some_labels))
            images[inside] = some_images[ids[inside] - start]
            labels[inside] = some_labels[ids[inside] - start]
        self.kept.look()
        return images, labels

    def all(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(images, labels) of all ids in their order; no copy where one file holds them."""
        pieces = []
        for start, images, labels in self._files():
            window = slice(max(self.low - start, 0), min(self.high - start, len(labels)))
            pieces.append((images[window], labels[window]))
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat([images for images, _ in pieces]), torch.cat([labels for _, labels in pieces])

    def _files(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        return zip(self.starts, self.images, self.labels)


def verify(manifest: Manifest, splits: Sequence[str], part: int, parts: int) -> None:
    """Reads every `parts`-th file of these splits, from number `part` on: the ranks of a node share its files out.

    Raises `UserError` for one that is missing or corrupt.
    """
    for shard in [shard for split in splits for shard in manifest.splits[split]][part::parts]:
        _verify(manifest.directory / shard.file, shard)


def _verify(path: Path, shard: Shard) -> None:
    with files.reading(path, CorruptShard, f": {_MEND}"):
        different = manifests.difference(path, shard.sha256)
    if different:
        raise CorruptShard(f"{path} {different}: {_MEND}")


def _open_shard(manifest: Manifest, shard: Shard, verify: bool) -> tuple[_Mapped, torch.Tensor]:
    path, mend = manifest.directory / shard.file, _MEND
    if verify:
        _verify(path, shard)
    with files.reading(path, CorruptShard, f": {mend}"):
        files.regular(path).close()
        with safetensors.safe_open(path, framework="pt") as file:
            # What the library gives is checked; ours is the same bytes, which can be given back.
            images, labels = file.get_tensor("images"), file.get_tensor("labels").clone()
    if images.dtype != manifest.dtype or images.shape != (shard.count, *manifest.shape):
        raise CorruptShard(f"{path} holds {images.dtype} {list(images.shape)}, not what its manifest says: {mend}")
    if labels.dtype != torch.int64 or labels.shape != (shard.count,):
        raise CorruptShard(
            f"{path} holds {labels.dtype} labels {list(labels.shape)}, not what its manifest says: {mend}"
        )
    if int(labels.min()) < 0 or int(labels.max()) >= len(manifest.classes):
        raise CorruptShard(f"{path} has labels outside 0 … {len(manifest.classes) - 1}: {mend}")
    with files.reading(path, CorruptShard, f": {mend}"):
        return _Mapped(path, "images", manifest.dtype), labels
