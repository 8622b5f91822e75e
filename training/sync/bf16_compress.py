"""The flat buffer, sent as bfloat16: half the bytes of float32, for slow networks. Works over gloo and NCCL alike.

Lossy. bfloat16 has float32's range and 8 bits of precision, so nothing overflows; each rank's part is rounded once, and
each sum of two parts once more. With w ranks an element of the sum is off by at most w · 2⁻⁸ of the sum of the parts'
magnitudes. torch's own `bf16_compress_hook` does the same on NCCL only.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from lockstep.training.sync.base import nbytes
from lockstep.training.sync.buckets import Bucket, Reducer
from lockstep.training.sync.flat import Flat


class Bf16Compress(Flat):
    capturable = False

    def make_reducer(self, buckets: list[Bucket]) -> Reducer:
        return _Bf16Reducer(self.model.named_parameters(), buckets)


class _Bf16Reducer(Reducer):
    receives = True

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], buckets: list[Bucket]) -> None:
        super().__init__(named, buckets)
        self._rounded: dict[Bucket, torch.Tensor] = {}
        """What is sent."""

    def send(self, bucket: Bucket) -> dist.Work | None:
        if self.size == 1:
            return None
        if bucket not in self._rounded:
            self._rounded[bucket] = torch.empty_like(bucket.payload, dtype=torch.bfloat16)
        rounded = self._rounded[bucket].copy_(bucket.payload)
        self.bytes_sent += nbytes(rounded)
        return dist.all_reduce(rounded, async_op=True)

    def receive(self, bucket: Bucket) -> None:
        bucket.payload.copy_(self._rounded[bucket])
