"""The flat buffer, sent as bfloat16: half the bytes of float32, for slow networks. Works over gloo and NCCL alike.

Lossy. bfloat16 has float32's range and 8 bits of precision, so nothing overflows; each rank's part is rounded once, and
each sum of two parts once more. With w ranks an element of the sum is off by at most w · 2⁻⁸ of the sum of the parts'
magnitudes. torch's own `bf16_compress_hook` does the same on NCCL only.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from training.config import Sync
from training.sync.base import nbytes
from training.sync.flat import Bucket, Flat


class Bf16Compress(Flat):
    capturable = False

    def __init__(self, settings: Sync) -> None:
        super().__init__(settings)
        self._small: dict[int, torch.Tensor] = {}
        """What travels, by the address of the bucket's own buffer."""

    def _send(self, bucket: Bucket) -> dist.Work | None:
        address = bucket.buffer.data_ptr()
        if address not in self._small:
            self._small[address] = torch.empty_like(bucket.buffer, dtype=torch.bfloat16)
        small = self._small[address].copy_(bucket.buffer)
        self.bytes_sent += nbytes(small)
        return dist.all_reduce(small, async_op=True)

    def _receive(self, bucket: Bucket) -> None:
        bucket.buffer.copy_(self._small[bucket.buffer.data_ptr()])
