"""A command beside a rank, in the rank's container: the official client's WebSocket, read and written without waiting for either.

Input and output flow at once in one thread: a command that writes while it is still being fed would otherwise wait for us
while we wait for it. The client's own `WSClient` waits for either, and one TLS connection must not be used from two threads. Of
the channel protocols only v5, of Kubernetes 1.30, can say that standard input has ended; with v4 the client says nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import ssl
import termios
import time
import tty
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kubernetes import client as kube
from kubernetes.stream import stream
from kubernetes.stream.ws_client import ABNF, V5_CHANNEL_PROTOCOL, WebSocketConnectionClosedException, WSClient

from lockstep.training.contract import UserError

from .. import command as commands
from ..manifest import Manifest, get, mappings
from ..process import PASSED_ON, Interrupt, Streams, heard
from ..status import LoggedOut, Unreachable
from .answers import ApiError
from .api import Api

STDIN, STDOUT, STDERR, ERROR, RESIZE, CLOSE = 0, 1, 2, 3, 4, 255
PIECE = 1 << 15
MOST_UNSENT = 1 << 18
"""Bytes of input that wait to be sent; until then no more is read."""
LOOK_SECONDS = 0.1
PING_SECONDS = 20.0
"""So that nobody on the way takes a quiet command for a dead connection."""
UNANSWERED_SECONDS = 60
"""After which the kernel gives a connection up on which nothing is acknowledged."""
AFTER_THE_END_SECONDS = 5.0
"""For output that is still on its way when the exit code is there."""
_BROKEN: tuple[type[Exception], ...] = (WebSocketConnectionClosedException.__mro__[1], OSError)
"""Any error of the WebSocket."""
_LATER = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


@dataclass(frozen=True, slots=True)
class Rank:
    """Where a rank may be.

    Args:
        pod: the pod of a host, None where there is none.
        container: the one of its containers that the ranks run in.
        host: of its pod.
    """

    api: Api
    namespace: str
    pod: Callable[[str], Manifest | None]
    container: str
    host: str
    rank: int

    def run(self, command: list[str], run_dir: str, streams: Streams) -> int:
        """The command's exit code. Raises `UserError`, `Unreachable`, `ApiError`."""
        pod, token = self._place(), uuid.uuid4().hex
        terminal = streams.terminal
        words = commands.execute("python", self.rank, command, run_dir, "--token", token)

        def interrupt(number: int) -> None:
            self._quietly(pod, commands.signal("python", token, number))

        client = _connect(self.api.client, self.namespace, pod, self.container, words, terminal)
        return Conversation(client, pod, streams, terminal, interrupt).run()

    def _place(self) -> str:
        """The name of the rank's pod. Raises `UserError` where it does not run."""
        pod = self.pod(self.host)
        phase = get(pod, "status", "phase")
        if phase != "Running":
            state = {"Succeeded": "has ended", "Failed": "has ended"}.get(str(phase), "has not started")
            raise UserError(
                f"rank {self.rank} does not run: the pod {self.host} {state if pod is not None else 'is gone'}"
            )
        return str(get(pod, "metadata", "name"))

    def _quietly(self, pod: str, words: list[str]) -> None:
        nowhere = os.open(os.devnull, os.O_RDWR)
        try:
            client = _connect(self.api.client, self.namespace, pod, self.container, words, terminal=False)
            Conversation(client, pod, Streams(nowhere, nowhere, nowhere), False, None).run()
        finally:
            os.close(nowhere)


def _connect(
    client: kube.ApiClient, namespace: str, pod: str, container: str, command: list[str], terminal: bool
) -> WSClient:  # fmt: skip
    """Starts a command in a container. Raises `ApiError`, `UserError`, `Unreachable`."""
    call = kube.CoreV1Api(client).connect_get_namespaced_pod_exec
    try:
        found: WSClient = stream(
            call, pod, namespace, command=command, container=container, stdin=True, stdout=True, stderr=not terminal,
            tty=terminal, binary=True, _preload_content=False,
        )  # fmt: skip
    except kube.ApiException as error:
        raise _refused(str(client.configuration.host), pod, error.__context__ or error) from None
    raw = found.sock.sock
    if found.subprotocol != V5_CHANNEL_PROTOCOL:
        raw.close()
        raise UserError(
            f"{client.configuration.host} does not speak {V5_CHANNEL_PROTOCOL}: exec needs Kubernetes 1.30 or later"
        )
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNANSWERED_SECONDS * 1000)
    raw.setblocking(False)
    return found


def _refused(host: str, pod: str, why: BaseException) -> BaseException:
    code = getattr(why, "status_code", None)
    if code is None:
        return Unreachable(f"{host} cannot be reached ({str(why)[:200]})") if isinstance(why, Exception) else why
    said: Any = {}
    with contextlib.suppress(ValueError):
        said = json.loads(getattr(why, "resp_body", None) or b"{}")
    message = str(get(said, "message") or str(why).partition(" -+-+- ")[0])
    if code == 401:
        return LoggedOut(f"{host} does not accept the credentials (expired?): log in again, then retry")
    if code == 403:
        return UserError(f"not allowed: {message}; ask for the rights in deploy/k8s/components/debug")
    if code == 500:
        return _not_started(pod, message)
    return ApiError(code, str(get(said, "reason") or ""), message)


def _not_started(pod: str, message: str) -> UserError:
    message = " ".join(message.split())[:500]
    if "error dialing backend" in message:
        return Unreachable(f"the node of {pod} does not answer: {message}")
    return UserError(f"cannot run a command in {pod}: {message}")


class Conversation:
    """A command that runs, between its channels and the streams of this process.

    Args:
        terminal: it has one, and what is typed goes to it as it is.
        interrupt: sends a signal to it; None for what ends in a moment.
    """

    def __init__(
        self, client: WSClient, pod: str, streams: Streams, terminal: bool, interrupt: Interrupt | None
    ) -> None:
        self.client, self.pod, self.streams = client, pod, streams
        self.terminal, self.interrupt = terminal, interrupt
        self._unsent = bytearray()
        self._input = True
        self._status: dict[str, Any] | None = None
        self._channel = STDOUT

    def run(self) -> int:
        """The command's exit code.

        Raises:
            UserError: it could not be started.
            Unreachable: the connection was lost before it had ended.
        """
        numbers = (*PASSED_ON, signal.SIGWINCH) if self.terminal else PASSED_ON
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            signals = stack.enter_context(heard(numbers))
            if self.terminal:
                stack.enter_context(_as_typed(self.streams.stdin))
                self._tell_size()
            pinged, ended = time.monotonic(), 0.0
            while self._turn():
                while not signals.empty():
                    number = signals.get()
                    if number == signal.SIGWINCH:
                        self._tell_size()
                    elif self.interrupt is not None:
                        self.interrupt(number)
                now = time.monotonic()
                if now - pinged > PING_SECONDS:
                    pinged = now
                    self._frame(b"", ABNF.OPCODE_PING)
                if self._status is not None:
                    ended = ended or now
                    if now - ended > AFTER_THE_END_SECONDS:
                        break
        return self._code()

    def _turn(self) -> bool:
        """Waits for what can be read or written, and does it. False when the connection is closed."""
        raw = self.client.sock.sock
        reads = self._input and len(self._unsent) < MOST_UNSENT
        decrypted = isinstance(raw, ssl.SSLSocket) and raw.pending() > 0
        sources = [raw.fileno(), *([self.streams.stdin] if reads else [])]
        targets = [raw.fileno()] if self._unsent else []
        try:  # not poll: macOS knows none for terminals
            readable, writable, _ = select.select(sources, targets, [], 0 if decrypted else LOOK_SECONDS)
        except OSError:  # standard input was closed before we began
            readable, writable = [self.streams.stdin], []
        if self.streams.stdin in readable and reads:
            self._read_input()
        try:
            if writable:
                self._write(raw)
            if decrypted or raw.fileno() in readable:
                return self._read()
        except _LATER:
            pass
        except _BROKEN:
            return False
        return True

    def _read_input(self) -> None:
        try:
            data = os.read(self.streams.stdin, PIECE)
        except OSError:  # it was closed
            data = b""
        if data:
            self._send(STDIN, data)
        elif not self.terminal:
            self._frame(bytes((CLOSE, STDIN)), ABNF.OPCODE_BINARY)
        self._input = bool(data)

    def _read(self) -> bool:
        for _ in range(16):  # then it is the input's turn
            frame = self.client.sock.recv_frame()
            if frame.opcode == ABNF.OPCODE_CLOSE:
                return False
            if frame.opcode == ABNF.OPCODE_PING:
                self._frame(frame.data, ABNF.OPCODE_PONG)
            elif frame.opcode != ABNF.OPCODE_PONG and frame.data:
                data = frame.data
                if frame.opcode != ABNF.OPCODE_CONT:  # the rest of a frame is of the same channel
                    self._channel, data = data[0], data[1:]
                self._received(data)
        return True

    def _received(self, data: bytes) -> None:
        if self._channel == STDOUT:
            _write_all(self.streams.stdout, data)
        elif self._channel == STDERR:
            _write_all(self.streams.stderr, data)
        elif self._channel == ERROR and data:
            try:
                value = json.loads(data)
            except ValueError:
                value = {"message": data.decode(errors="replace")}
            self._status = value if isinstance(value, dict) else {}

    def _write(self, raw: socket.socket) -> None:
        try:
            while self._unsent:
                del self._unsent[: raw.send(self._unsent[:PIECE])]
        except _LATER:
            return
        except OSError:  # it hears no more; what it has said, the exit code perhaps, is still to be read
            self._unsent.clear()
            self._input = False

    def _send(self, channel: int, data: bytes) -> None:
        self._frame(bytes((channel,)) + data, ABNF.OPCODE_BINARY)

    def _frame(self, data: bytes, opcode: int) -> None:
        self._unsent += ABNF.create_frame(data, opcode).format()

    def _tell_size(self) -> None:
        with contextlib.suppress(OSError):
            size = os.get_terminal_size(self.streams.stdout)
            self._send(RESIZE, json.dumps({"Width": size.columns, "Height": size.lines}).encode())

    def _code(self) -> int:
        if self._status is None:
            raise Unreachable(f"the connection to {self.pod} was lost: the command may still run there")
        if self._status.get("status") == "Success":
            return 0
        for cause in mappings(get(self._status, "details", "causes")):
            if cause.get("reason") == "ExitCode" and str(cause.get("message")).isdecimal():
                return int(cause["message"])
        raise _not_started(self.pod, str(self._status.get("message") or "the server gave no reason"))

    def _close(self) -> None:
        sock = self.client.sock.sock
        if sock is not None:
            sock.close()


@contextlib.contextmanager
def _as_typed(fd: int) -> Iterator[None]:
    """Every key goes to the command, Ctrl-C too; its own terminal shows and interprets them."""
    before = termios.tcgetattr(fd)
    tty.setraw(fd)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
