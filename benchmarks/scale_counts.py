"""What a rank has sent, read and computed so far: from the kernel's own counters of its sockets, and Python's audit events.

counts = Counts(store_port, [folder])
before = counts.now()
…
spent = counts.now() - before           # Spent(messages=…, bytes=…, …)
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

_DATA_SEGMENTS_OUT, _BYTES_SENT = 156, 200
"""Places of two numbers in the kernel's struct tcp_info (Linux 4.19 and later)."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What one rank did. Messages are TCP segments with data: gloo's headers, and what it says of buffers, among them."""

    messages: int = 0
    bytes: int = 0
    store_messages: int = 0
    """To the store where the ranks meet (torch's TCPStore), and from it on the rank that serves it."""
    opens: int = 0
    """Files opened in the watched folders; those that the safetensors library opens are not seen."""
    entries: int = 0
    """Names read in listings of the watched folders."""
    hashed: int = 0
    """Bytes of files that were read to be verified."""
    cpu: float = 0.0
    """Seconds of all threads."""
    wall: float = 0.0
    """Seconds on the clock: of many ranks on few cores they are those of the cores, too."""

    def __sub__(self, other: Spent) -> Spent:
        return Spent(*(a - b for a, b in zip(astuple(self), astuple(other))))

    def __add__(self, other: Spent) -> Spent:
        return Spent(*(a + b for a, b in zip(astuple(self), astuple(other))))

    def plain(self) -> dict[str, float]:
        return {field.name: round(getattr(self, field.name), 6) for field in fields(self)}


class Counts:
    """Counts what this process does from its construction on. One a process: audit hooks cannot be taken out again."""

    def __init__(self, store_port: int, folders: list[Path]) -> None:
        self._port, self._folders = store_port, [str(folder.resolve()) for folder in folders]
        self._opens = self._entries = self._hashed = 0
        self._looked_cpu = self._looked_wall = 0.0
        """What the looking itself has taken: it grows with the number of sockets."""
        self._looking = False
        sys.addaudithook(self._audit)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self._looking or event not in ("open", "os.scandir", "os.listdir") or not args[0]:
            return
        try:
            path = os.path.abspath(os.fsdecode(args[0]))
        except TypeError:  # a descriptor
            return
        if not any(path.startswith(folder) for folder in self._folders):
            return
        self._looking = True
        try:
            if event == "open":
                self._opens += not os.path.isdir(path)
            else:
                with contextlib.suppress(OSError):
                    self._entries += len(os.listdir(path))
        finally:
            self._looking = False

    def hashing(self, sha256: Callable[[Path], str]) -> Callable[[Path], str]:
        """`files.sha256`, counted."""

        def counted(path: Path) -> str:
            self._hashed += path.stat().st_size
            return sha256(path)

        return counted

    def now(self) -> Spent:
        cpu, wall = time.process_time(), time.monotonic()
        messages = sent = store = 0
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            try:
                if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(descriptor)) as found:
                    if found.type != socket.SOCK_STREAM or found.family not in (socket.AF_INET, socket.AF_INET6):
                        continue
                    ports = (found.getpeername()[1], found.getsockname()[1])
                    info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            except OSError:  # one that listens, or gone since
                continue
            (segments,) = struct.unpack_from("<I", info, _DATA_SEGMENTS_OUT)
            if self._port in ports:
                store += segments
            else:
                messages += segments
                sent += struct.unpack_from("<Q", info, _BYTES_SENT)[0]
        own_cpu, own_wall = cpu - self._looked_cpu, wall - self._looked_wall
        self._looked_cpu += time.process_time() - cpu
        self._looked_wall += time.monotonic() - wall
        return Spent(messages, sent, store, self._opens, self._entries, self._hashed, own_cpu, own_wall)


def held() -> dict[str, int]:
    """What this process holds: bytes of memory (all, and what it shares with no other process), descriptors, sockets, threads."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    rollup = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    private = sum(int(rollup[name].split()[0]) for name in ("Private_Clean", "Private_Dirty"))
    found = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _there(name)]
    return {
        "rss": int(lines["VmRSS"].split()[0]) << 10, "private": private << 10,
        "descriptors": len(found), "sockets": sum(link.startswith("socket:") for link in found),
        "threads": int(lines["Threads"]),
    }  # fmt: skip


def _there(name: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{name}")
