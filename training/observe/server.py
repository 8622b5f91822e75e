"""The HTTP server of a rank: /metrics for Prometheus, /healthz for a supervisor that restarts hanging ranks.

It runs in threads of the process that trains. So the number of clients and the time of each are bounded.
"""

from __future__ import annotations

import contextlib
import io
import json
import secrets
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client.exposition import choose_encoder

from lockstep.training import contract
from lockstep.training.observe.metrics import Metrics

MAX_CONNECTIONS = 16
"""At a time; for a further one the oldest that has sent no request yet is closed. The training needs its file descriptors for
checkpoints and events."""
REQUEST_SECONDS = 5.0
"""For a whole request, from its connection to the last byte of the answer."""


class Server(ThreadingHTTPServer):
    """Listens from its construction on; `run` serves until `stop`.

    Args:
        address: an address or name of this machine; None for every address, IPv4 and IPv6.
        port: 0 for any free one; `port` of the object says which.
        stale_seconds: /healthz answers 503 where the rank's last sign of life is older.

    Raises:
        OSError: the address is not this machine's, or the port is taken.
        OverflowError: the port is above 65535.
    """

    daemon_threads = True
    # With the 5 of the base class, connections of many clients at once are dropped, and each comes again after 1 s.
    request_queue_size = 128

    def __init__(self, address: str | None, port: int, metrics: Metrics, stale_seconds: float) -> None:
        self.metrics, self.stale_seconds, self.stopped = metrics, stale_seconds, False
        self.id = secrets.token_hex(8)
        """Stands in the rank's endpoint file and in each answer: whoever has the port of a dead rank has another one."""
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._idle: dict[socket.socket, None] = {}
        """Connections without a whole request so far, the oldest first."""
        self._dual_stack = address is None and socket.has_dualstack_ipv6()
        self.address_family = socket.AF_INET6 if self._dual_stack or ":" in (address or "") else socket.AF_INET
        super().__init__((address or ("::" if self._dual_stack else ""), port), _Handler)
        self.port: int = self.server_address[1]

    def server_bind(self) -> None:
        if self._dual_stack:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # A rank that is started again gets its port although connections of the last attempt linger. A port that another
        # process listens on is still refused.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # HTTPServer.server_bind would also ask the DNS for this host's name, which may block.
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def run(self) -> None:
        while not self.stopped:
            self.handle_request()

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:  # the process has no descriptor left: the connection waits, and this thread must not spin
            time.sleep(0.1)
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002 - the base class's signature
        while not self._places.acquire(blocking=False):
            oldest = next(iter(self._idle.copy()), None)
            if oldest is None:  # all are being answered, each for its time at most
                return False
            if self.asked(oldest):
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
                if self._places.acquire(timeout=REQUEST_SECONDS):  # its thread ends
                    break
        self._idle[request] = None
        return True

    def asked(self, request: socket.socket) -> bool:
        """It is idle no longer. Whether it was until now."""
        return self._idle.pop(request, True) is None

    def process_request(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started, so none gives the place back
            self.asked(request)
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.asked(request)
            self._places.release()

    def stop(self) -> None:
        """Ends `run` at once: a shutdown of the socket wakes the thread that waits on it (`serve_forever` would poll)."""
        self.stopped = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing: clients may go away at any time."""


class _DeadlineReader(io.RawIOBase):
    """Reads from a socket until a deadline for the whole request: sending a byte now and then does not put it off."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection, self._deadline = connection, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._connection.settimeout(max(0.001, self._deadline - time.monotonic()))
        return self._connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.0"

    def setup(self) -> None:
        super().setup()
        self._deadline = time.monotonic() + REQUEST_SECONDS
        self.rfile.close()
        self.rfile = io.BufferedReader(_DeadlineReader(self.connection, self._deadline))

    def do_GET(self) -> None:
        self.server.asked(self.connection)
        path = self.path.partition("?")[0]
        if path == "/metrics":
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
            self._answer(200, content_type, encode(self.server.metrics.registry))
        elif path == "/healthz":
            metrics = self.server.metrics
            age = time.monotonic() - metrics.alive_at
            well = metrics.finished or age <= self.server.stale_seconds
            body = {"ok": well, "seconds_since_progress": round(age, 3), "finished": metrics.finished}
            self._answer(200 if well else 503, "application/json", json.dumps(body).encode() + b"\n")
        else:
            self._answer(404, "text/plain; charset=utf-8", b"/metrics or /healthz\n")

    def _answer(self, code: int, content_type: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header(contract.RANK_HEADER, self.server.id)
        self.connection.settimeout(max(0.001, self._deadline - time.monotonic()))  # for all of it, also in pieces
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing: Prometheus asks every few seconds."""
