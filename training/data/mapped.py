"""The samples of a shard, mapped into memory: read where they are needed, and given back before they are many.

What a process has touched of a mapped file counts as its memory, also where the kernel could take it back: a rank that
reads a data set of many gigabytes would look, and be accounted for, as large as that.
"""

from __future__ import annotations

import json
import mmap
from pathlib import Path

import torch

from lockstep.training import files
from lockstep.training.parallel.process import mapped_bytes

BOUND = 128 << 20
"""Bytes of mapped files that `take` may add to a process' memory, about; one batch more is possible."""


class Mapped:
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
    """Gives the pages of some mapped files back when the process has more of mapped files in its memory than `BOUND`.

    How many pages a read brings in is the kernel's choice (up to a megabyte around it), so it is asked.
    """

    def __init__(self, maps: list[Mapped]) -> None:
        self._maps = maps
        self._floor = mapped_bytes() or 0

    def look(self) -> None:
        """To be called after some samples have been read."""
        mapped = mapped_bytes() or 0
        if mapped - self._floor > BOUND:
            for mapped_file in self._maps:
                mapped_file.give_back()
            mapped = mapped_bytes() or 0
            self._floor = mapped
        self._floor = min(self._floor, mapped)
