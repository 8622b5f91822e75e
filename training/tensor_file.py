"""The header of a safetensors file: the one writer of shards, of checkpoints and of exported weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def header(tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str] | None = None) -> bytes:
    """Returns the beginning of a file; the data of the tensors follow, in their order.

    Args:
        tensors: name, element type by its name in the format, shape, and bytes of each.
        metadata: of the whole file; None: there is none.
    """
    table: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, dtype, shape, size in tensors:
        begin, end = end, end + size
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
