"""Shards: safetensors files of samples and labels with a manifest of counts and sha256, read by mmap.

Samples are uint8 images [n, h, w, c] or float32 feature vectors [n, f]; the tensor is called `images` in either case.

manifest = shard_writer.prepare(config.data)                    # finds them, or makes them once a node under a file lock.
manifest.file(manifest.splits["train"][0], verify=True)   # matches its sha256; a bucket's file is downloaded.
samples = Samples.open(manifest, "train")                 # maps its files.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import safetensors
import torch
from pydantic import AfterValidator, Field

from .. import files
from ..bucket import Bucket, as_user_error, read_again
from ..config import Data, settings
from ..config.settings import Section
from ..contract import UserError

MANIFEST = "manifest.json"
SPLITS = ("train", "test")
MAX_MANIFEST = 16 << 20
_NEAR = 0.02
"""Difference of two means or deviations that changes no training."""
_MEND = "make the shards again (python -m lockstep.training shard)"
_FETCHED = "shards/fetched"
"""Folder of fetched shards below `data.root`."""


class CorruptShard(UserError):
    """An error for a shard file that does not match its manifest."""


class Shard(Section):
    file: str = Field(pattern=r"^[\w-]+\.safetensors$")
    count: int = Field(ge=1)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


def _shape(value: tuple[int, ...]) -> tuple[int, ...]:
    if len(value) not in (1, 3) or not all(0 < size < 1 << 16 for size in value):
        raise ValueError(f"must be [height, width, channels] or [features], got {list(value)}")
    return value


def _splits(value: dict[str, list[Shard]]) -> dict[str, list[Shard]]:
    if set(value) != set(SPLITS) or not all(value.values()):
        raise ValueError(f"must have files for {' and '.join(SPLITS)}")
    return value


class Manifest(Section):
    """The content of a folder of shards, or of a prefix in a bucket."""

    directory: Path
    """Folder of the files on this disk, or of the fetched files."""
    format: Literal[1]
    source: str
    classes: list[str] = Field(min_length=1)
    shape: Annotated[tuple[int, ...], Field(strict=False), AfterValidator(_shape)]
    """Shape of a sample: (height, width, channels) of an image, (features,) of a vector."""
    splits: Annotated[dict[str, list[Shard]], AfterValidator(_splits)]
    """The files of both splits, in the order of their samples."""
    mean: list[float] = Field(min_length=1)
    """Mean of the training samples: of each channel for pixels in 0…1, or one number for vectors."""
    std: list[float] = Field(min_length=1)
    """Standard deviation of the training samples, in the form of `mean`."""
    _bucket: Bucket | None = None
    """Bucket of the shards. `directory`, below `data.root`, has those that this node has fetched, by their sha256."""

    @property
    def place(self) -> str:
        """Folder or URL of the shards, for messages."""
        return self._bucket.url if self._bucket is not None else str(self.directory)

    def count(self, split: str) -> int:
        return sum(shard.count for shard in self.splits[split])

    @property
    def dtype(self) -> torch.dtype:
        """The element type of a sample."""
        return torch.uint8 if len(self.shape) == 3 else torch.float32

    @property
    def checksum(self) -> str:
        """One sha256 for all files, in their order."""
        hashes = "".join(shard.sha256 for split in SPLITS for shard in self.splits[split])
        return hashlib.sha256(hashes.encode()).hexdigest()

    def fits(self, data: Data) -> bool:
        """Returns whether a recipe's mean and deviation are near those of the samples."""
        return all(
            len(configured) in (1, len(measured))
            and all(abs(a - b) < _NEAR for a, b in zip(configured * (len(measured) // len(configured)), measured))
            for configured, measured in ((data.mean, self.mean), (data.std, self.std))
        )

    def statistics(self, data: Data) -> str:
        """Returns one line with mean and deviation. If the recipe's values do not fit, the line says how to set them.

        The code does not set them silently, because they are a part of the run's identity.
        """
        mean, std = (f"[{','.join(f'{number:.4f}' for number in numbers)}]" for numbers in (self.mean, self.std))
        measured = f"mean {mean}, standard deviation {std} of the training samples"
        if self.fits(data):
            return measured
        recipe = "gives none" if (data.mean, data.std) == ([0.0], [1.0]) else f"has {data.mean} and {data.std}"
        return f"{measured}; the recipe {recipe}: set data.mean={mean} data.std={std}"

    def describe(self, data: Data) -> str:
        """Returns one line about the shards, and one about the fit of a recipe's normalisation."""
        files = sum(map(len, self.splits.values()))
        return (
            f"{self.place}: {self.source}, {self.count('train')} training and {self.count('test')} test samples of {list(self.shape)} in "
            f"{files} files, {len(self.classes)} classes, sha256 {self.checksum[:12]}…\n{self.statistics(data)}"
        )

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Returns the manifest of a folder. Raises `UserError` if it is missing or malformed."""
        path = directory / MANIFEST
        with files.reading(path, then=f": no shards in {directory}, or {_MEND}"):
            return cls._parsed(files.read(path, MAX_MANIFEST), directory, str(path))

    @classmethod
    def fetch(cls, url: str, root: str) -> Manifest:
        """Returns the manifest at the URL `data.shards`.

        Raises:
            UserError: it is missing or malformed, or the bucket cannot be reached (exit code 1).
        """
        bucket, folder = Bucket(url), Path(root) / _FETCHED
        with as_user_error("data.shards cannot be used"):
            text, _ = bucket.read(MANIFEST, MAX_MANIFEST)
        place = f"{bucket.url}/{MANIFEST}"
        with files.reading(place, then=f": {_MEND}"):
            manifest = cls._parsed(text, folder, place)
        manifest._bucket = bucket
        return manifest

    @classmethod
    def _parsed(cls, text: bytes, directory: Path, place: str) -> Manifest:
        value = {**json.loads(text), "directory": directory}
        return settings.build(cls, value, f"{place} is malformed ({_MEND})")

    def file(self, shard: Shard, verify: bool = False) -> Path:
        """Returns a shard's file. Fetches it if it is in a bucket and not on this disk.

        Args:
            verify: whether to read and check a file that is on this disk.

        Raises:
            UserError: it is missing or corrupt, or the bucket cannot be reached.
        """
        if self._bucket is not None:
            return self._fetched(self._bucket, shard, verify)
        path = self.directory / shard.file
        if verify:
            with files.reading(path, CorruptShard, f": {_MEND}"):
                if different := files.difference(path, shard.sha256):
                    raise CorruptShard(f"{path} {different}: {_MEND}")
        return path

    def _fetched(self, bucket: Bucket, shard: Shard, verify: bool) -> Path:
        """Returns a shard's file on this disk. Fetches it if it is missing, or with `verify` if it has changed."""
        path = self.directory / shard.sha256
        with as_user_error("data.shards cannot be used"):
            if path.exists() and not (verify and files.difference(path, shard.sha256)):
                return path
            self.directory.mkdir(parents=True, exist_ok=True)
            read_again((CorruptShard,), self._fetch, bucket, shard, path)
        return path

    def _fetch(self, bucket: Bucket, shard: Shard, path: Path) -> None:
        with files.replacing(path) as staging:
            bucket.fetch(shard.file, staging)
            if different := files.difference(staging, shard.sha256):
                raise CorruptShard(f"{bucket.url}/{shard.file} {different}")


@dataclass(slots=True)
class Samples:
    """The samples of one split, from files that are mapped into memory, not read."""

    files: list[tuple[torch.Tensor, torch.Tensor]]
    """(samples, labels) of each file."""

    def __len__(self) -> int:
        return sum(len(labels) for _, labels in self.files)

    @property
    def num_bytes(self) -> int:
        return sum(samples.nbytes for samples, _ in self.files)

    @classmethod
    def open(cls, manifest: Manifest, split: str) -> Samples:
        """Opens the files of a split. Raises `UserError` for one that is missing, or not of the manifest's shapes."""
        return cls([_opened(manifest, shard) for shard in manifest.splits[split]])

    def take(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (samples [b, …], labels [b]) of global ids, gathered on the CPU."""
        first, its_labels = self.files[0]
        if len(self.files) == 1:
            return first[ids], its_labels[ids]
        images = torch.empty((len(ids), *first.shape[1:]), dtype=first.dtype)
        labels, start = torch.empty(len(ids), dtype=torch.int64), 0
        for some_images, some_labels in self.files:
            inside = (ids >= start) & (ids < start + len(some_labels))
            images[inside] = some_images[ids[inside] - start]
            labels[inside] = some_labels[ids[inside] - start]
            start += len(some_labels)
        return images, labels

    def all(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (samples, labels) of all ids in their order, without a copy if one file holds them."""
        if len(self.files) == 1:
            return self.files[0]
        return torch.cat([images for images, _ in self.files]), torch.cat([labels for _, labels in self.files])


def _opened(manifest: Manifest, shard: Shard) -> tuple[torch.Tensor, torch.Tensor]:
    """Maps a file of samples and labels. Raises `CorruptShard` if it is not of the manifest's shapes."""
    path = manifest.file(shard)
    with files.reading(path, CorruptShard, f": {_MEND}"), files.regular(path):
        with safetensors.safe_open(path, "pt") as file:
            images, labels = file.get_tensor("images"), file.get_tensor("labels")
        expected = (manifest.dtype, (shard.count, *manifest.shape), torch.int64, (shard.count,))
        if (images.dtype, tuple(images.shape), labels.dtype, tuple(labels.shape)) != expected:
            raise ValueError(f"it holds {images.dtype} {list(images.shape)}, not {expected[0]} {list(expected[1])}")
        if int(labels.min()) < 0 or int(labels.max()) >= len(manifest.classes):
            raise ValueError(f"it has labels outside 0 … {len(manifest.classes) - 1}")
    return images, labels
