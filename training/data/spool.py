"""The samples of one split before they are in shards, on the disk: their number is known only at the end.

    spool = Spool(folder / ".train")
    spool.append(samples, labels)                     # as often as there are pieces
    entries = spool.cut(folder, "train", 8, len(spool))   # train-00000.safetensors …

Whatever the number of samples, no more than one piece is in memory; labels are, with 8 bytes each. The files are to the
byte what the safetensors library writes. They are cut from the end, and the spool shrinks with it.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.training.contract import UserError
from lockstep.training.data.order import bounds
from lockstep.training.data.sources.raw import checked

_CHUNK = 4 << 20
_KINDS = {np.dtype(np.uint8): "U8", np.dtype(np.float32): "F32"}


class Spool:
    """Samples and labels of one split, in the order in which they came.

    Raises `OSError` where the disk refuses.
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
        """Takes a piece. Raises `UserError`, which begins with `where`, for one that no shard can hold."""
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
        """(mean, standard deviation) of each channel for pixels in 0…1; one number each for feature vectors."""
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
        """One shard, in the safetensors format; returns its sha256."""
        size = len(labels) * self._sample_bytes
        head = json.dumps(
            {
                "labels": {"dtype": "I64", "shape": [len(labels)], "data_offsets": [0, labels.nbytes]},
                "images": {"dtype": _KINDS[self.dtype], "shape": [len(labels), *self.shape],
                           "data_offsets": [labels.nbytes, labels.nbytes + size]},
            },
            separators=(",", ":"),
        ).encode()  # fmt: skip
        head += b" " * (-len(head) % 8)
        digest = hashlib.sha256()
        with path.open("xb") as file:

            def write(data: bytes) -> None:
                digest.update(data)
                file.write(data)

            write(len(head).to_bytes(8, "little") + head)
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
