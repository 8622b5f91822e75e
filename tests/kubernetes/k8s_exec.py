"""`pods/exec` of the emulated API server: real processes behind a WebSocket, channel protocols v4 and v5.

As a server does: the first of the client's protocols that it knows; an empty message on standard output when the streams are
there; with v5 [255, 0] closes standard input, with v4 nothing does; the exit code as a Status on channel 3, then a close
frame. Where the process cannot be started, the connection is there already, and the Status has no exit code. A client that
goes away ends no process: it loses its streams.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

V4, V5 = "v4.channel.k8s.io", "v5.channel.k8s.io"
_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
CONT, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10


@dataclass
class Container:
    """What a command gets in a pod's container."""

    env: dict[str, str]
    folder: Path
    name: str = "pytorch"


@dataclass
class Containers:
    """Where commands can be run, and what has been run."""

    protocols: tuple[str, ...] = (V5, V4)
    there: dict[str, Container] = field(default_factory=dict)
    """Pod → its container."""
    pings: int = 0
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def stop(self) -> None:
        for process in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def accept(key: str, offered: str, containers: Containers) -> dict[str, str] | None:
    """The headers of a 101; None where no protocol is known to both."""
    chosen = next((one for one in map(str.strip, offered.split(",")) if one in containers.protocols), None)
    if chosen is None:
        return None
    digest = base64.b64encode(hashlib.sha1(key.encode() + _MAGIC).digest()).decode()
    switched = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Accept": digest}
    return {**switched, "Sec-WebSocket-Protocol": chosen}


class Session:
    """One command, from the handshake to the close frame."""

    drop_after: int | None = None
    """Frames after which the connection breaks."""
    broken: Callable[[], object]
    """Ends the connection without a word."""

    def __init__(
        self,
        containers: Containers,
        container: Container | None,
        accepted: dict[str, str],
        reader: BinaryIO,
        writer: BinaryIO,
    ) -> None:
        self.containers, self.container, self.v5 = containers, container, accepted["Sec-WebSocket-Protocol"] == V5
        self.reader, self.writer = reader, writer
        self.sent, self.gone, self.lock = 0, False, threading.Lock()

    def refuse(self, why: str) -> None:
        """The kubelet's error, for which the connection is there already."""
        self.send(1, b"")
        said = f"Internal error occurred: error executing command in container: {why}"
        causes = {"causes": [{"message": said}]}
        failure = {"status": "Failure", "reason": "InternalError", "code": 500, "details": causes}
        self.status({**failure, "message": f"Internal error occurred: {said}"})

    def run(self, command: list[str], terminal: bool) -> None:
        ours, theirs = pty.openpty() if terminal else (-1, subprocess.PIPE)
        program = sys.executable if command[0] == "python" else command[0]
        try:
            process = subprocess.Popen(
                [program, *command[1:]], env=self.container.env, cwd=self.container.folder, start_new_session=True,
                stdin=theirs, stdout=theirs, stderr=theirs,
                preexec_fn=(lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)) if terminal else None,
            )  # fmt: skip
        except OSError as error:
            self.refuse(f'exec: "{command[0]}": {error.strerror}')
            return
        self.send(1, b"")
        self.containers.running.append(process)
        if terminal:
            os.close(theirs)
            outputs, target = {1: ours}, ours
        else:
            outputs, target = {1: process.stdout.fileno(), 2: process.stderr.fileno()}, process.stdin.fileno()
        readers = [threading.Thread(target=self.copy, args=pair, daemon=True) for pair in outputs.items()]
        for thread in readers:
            thread.start()
        threading.Thread(target=self.receive, args=(process, target, terminal), daemon=True).start()
        code = process.wait()
        for thread in readers:
            thread.join(30)
        code = 128 - code if code < 0 else code
        causes = [{"reason": "ExitCode", "message": str(code)}]
        said = f"command terminated with non-zero exit code: exit status {code}"
        failure = {"status": "Failure", "message": said, "reason": "NonZeroExitCode", "details": {"causes": causes}}
        self.status({"status": "Success"} if code == 0 else failure)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        if terminal:
            os.close(ours)

    def copy(self, channel: int, fd: int) -> None:
        while True:
            try:
                data = os.read(fd, 1 << 15)
            except OSError:  # a terminal whose last process has gone
                return
            if not data:
                return
            self.send(channel, data)

    def receive(self, process: subprocess.Popen[bytes], target: int, terminal: bool) -> None:
        """What the client sends, until it goes."""
        is_open = True
        with contextlib.suppress(OSError, ValueError, struct.error):
            while (frame := self.frame()) is not None:
                opcode, data = frame
                if opcode == CLOSE:
                    break
                if opcode == PING:
                    self.containers.pings += 1
                    self.raw(PONG, data)
                elif opcode in (TEXT, BINARY) and data:
                    if data[0] == 0 and is_open:
                        try:
                            _write_all(target, data[1:])
                        except OSError:  # the command reads no more
                            is_open = False
                    elif data[0] == 4 and terminal:
                        size = json.loads(data[1:])
                        fcntl.ioctl(
                            target, termios.TIOCSWINSZ, struct.pack("HHHH", size["Height"], size["Width"], 0, 0)
                        )
                    elif data[0] == 255 and self.v5 and data[1:] == b"\0":
                        is_open = False
                        if not terminal:
                            process.stdin.close()
        if is_open and not terminal:
            with contextlib.suppress(OSError):
                process.stdin.close()

    def frame(self) -> tuple[int, bytes] | None:
        head = self.reader.read(2)
        if len(head) < 2:
            return None
        size = head[1] & 0x7F
        if size == 126:
            (size,) = struct.unpack("!H", self.reader.read(2))
        elif size == 127:
            (size,) = struct.unpack("!Q", self.reader.read(8))
        assert head[1] & 0x80, "what a client sends is masked"
        key, data = self.reader.read(4), self.reader.read(size)
        if len(data) < size:
            return None
        keys = int.from_bytes((key * (size // 4 + 1))[:size], "big")
        return head[0] & 0x0F, (int.from_bytes(data, "big") ^ keys).to_bytes(size, "big")

    def status(self, value: dict[str, Any]) -> None:
        self.send(3, json.dumps({"metadata": {}, **value}).encode())
        self.raw(CLOSE, struct.pack("!H", 1000))

    def send(self, channel: int, data: bytes) -> None:
        self.raw(BINARY, bytes((channel,)) + data)

    def raw(self, opcode: int, data: bytes) -> None:
        size = len(data)
        long = struct.pack("!BH", 126, size) if size < 1 << 16 else struct.pack("!BQ", 127, size)
        head = bytes((0x80 | opcode,)) + (bytes((size,)) if size < 126 else long)
        with self.lock:
            if self.gone:
                return
            if self.drop_after is not None and self.sent >= self.drop_after:
                self.gone = True
                self.broken()
                return
            self.sent += 1
            try:
                self.writer.write(head + data)
                self.writer.flush()
            except OSError:
                self.gone = True


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
