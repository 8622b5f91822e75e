"""A Secret as `kubectl create secret` sends it: protobuf, which the official Python client never sends.

The numbers of the fields are those of `k8s.io/api/core/v1/generated.proto`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

MAGIC = b"k8s\x00"


def read(body: bytes) -> Any:
    """A request's body, JSON or protobuf."""
    return _secret(body[len(MAGIC) :]) if body.startswith(MAGIC) else json.loads(body)


def _secret(body: bytes) -> dict[str, Any]:
    """runtime.Unknown: 1 what it is, 2 the object. Secret: 1 its metadata, 2 a map, 3 its type."""
    envelope = dict(_fields(body))
    what = dict(_fields(envelope[1]))
    assert (what[1], what[2]) == (b"v1", b"Secret"), f"only Secrets are read, not {what}"
    found = list(_fields(envelope[2]))
    meta = dict(_fields(dict(found)[1]))
    entries = [dict(_fields(value)) for number, value in found if number == 2]
    return {
        "apiVersion": "v1", "kind": "Secret", "type": dict(found)[3].decode(),
        "metadata": {"name": meta[1].decode(), "namespace": meta[3].decode()},
        "data": {entry[1].decode(): base64.b64encode(entry[2]).decode() for entry in entries},
    }  # fmt: skip


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(number, bytes) of each field that has a length; numbers are left out."""
    at = 0
    while at < len(data):
        key, at = _number(data, at)
        length, at = _number(data, at)
        if key & 7 == 2:
            yield key >> 3, data[at : at + length]
            at += length


def _number(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 0x80:
            return value, at
