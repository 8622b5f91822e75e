"""Gives a rank's metrics out: an HTTP server, the file that says where it is, and a textfile for runs that end first.

    RUN/endpoints/rank-00003.json   {"host": "node2", "port": 9471, "pid": 4711}, for as long as the rank lives
    RUN/metrics/rank-00003.prom     what it would serve, every few seconds and at the end
    TEXTFILES/RUN-rank-00003.prom   the same once more, for a node exporter
    FILE_SD/RUN-rank-00003.json     the same place for Prometheus' file_sd, where a cluster has no discovery of its own

Nothing here may end the training, or hold it up: what fails is said once, on stderr.
"""

from __future__ import annotations

import contextlib
import glob
import io
import ipaddress
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prometheus_client.exposition import choose_encoder

from training import config as configuration
from training import contract, files
from training.contract import UserError
from training.lines import say
from training.metrics import Metrics
from training.world import World


class Exporter:
    """One rank's metrics and how they leave the process. `close` ends it; it may be called twice.

    Raises:
        UserError: the port is not one.
    """

    def __init__(self, settings: configuration.Metrics, world: World, run_dir: Path, env: Mapping[str, str]) -> None:
        run_dir = run_dir.resolve()
        self.metrics = Metrics(settings.run or run_dir.name, world.rank, world.device)
        self.enabled, self._rank, self._settings = settings.enabled, world.rank, settings
        self._warned: set[str] = set()
        self._begun, self._closed, self._writing = False, threading.Event(), threading.Lock()
        self._server: _Server | None = None
        self._endpoint = contract.endpoint_file(run_dir, world.rank)
        self._textfiles = [contract.textfile(run_dir, world.rank)]
        # In a folder that other runs use, too, the name of this one comes first.
        name = re.sub(r"[^A-Za-z0-9.-]", "_", settings.run or run_dir.name)
        if settings.textfiles is not None:
            self._textfiles.append(Path(settings.textfiles) / f"{name}-{self._textfiles[0].name}")
        file_sd = settings.file_sd or env.get(contract.ENV_FILE_SD)
        self._target = Path(file_sd) / f"{name}-{self._endpoint.name}" if file_sd else None
        port = base_port(settings, env)
        if self.enabled:
            if world.leader:
                _forget_ranks(world.size, [self._endpoint, *self._textfiles, *filter(None, [self._target])])
            address = settings.address or env.get(contract.ENV_METRICS_ADDRESS) or _default_address(world)
            self._serve(None if address == ANY_ADDRESS else address, port + world.local_rank if port else 0)

    def begin(self) -> None:
        """The training begins: from here on there is something to write. (A complete run keeps what it wrote last.)"""
        self._begun = True
        if self.enabled:
            self._write_textfiles()
            if self._settings.textfile_seconds:
                threading.Thread(target=self._write_often, name="textfile", daemon=True).start()

    def _serve(self, address: str | None, port: int) -> None:
        for attempt in (port, 0):
            try:
                self._server = _Server(address, attempt, self.metrics, self._settings.stale_seconds)
            except (OSError, OverflowError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                continue
            break
        if self._server is None:
            self._warn("serve", f"cannot serve metrics ({reason})")
            return
        if port not in (0, self._server.port):
            self._warn("serve", f"port {port} is not free ({reason}): metrics are on port {self._server.port}")
        threading.Thread(target=self._server.run, name="metrics", daemon=True).start()
        host, port = address if address and not _anywhere(address) else socket.gethostname(), self._server.port
        self._publish(self._endpoint, json.dumps({"host": host, "port": port, "pid": os.getpid()}).encode() + b"\n")
        if self._target is not None:
            target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            self._publish(self._target, json.dumps([{"targets": [target], "labels": {}}]).encode() + b"\n")

    def _write_often(self) -> None:
        while not self._closed.wait(self._settings.textfile_seconds):
            self._write_textfiles()

    def _write_textfiles(self, last: bool = False) -> None:
        """One writer at a time: all have the same temporary file, and nothing may come after the last words."""
        with self._writing:
            if last or not self._closed.is_set():
                text = self.metrics.text()
                for path in self._textfiles:
                    self._publish(path, text)

    def _publish(self, path: Path, data: bytes) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.remove_stale(path.parent, (path.name,))
            files.publish(path, data)
        except OSError as error:
            self._warn(str(path.parent), f"cannot write {path}: {error.strerror}")

    def _warn(self, what: str, message: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            say(f"warning: rank {self._rank}: {message}; the run goes on", sys.stderr)

    def close(self, code: int) -> None:
        """The attempt has ended: the last textfiles, then the end of the server."""
        if self._closed.is_set():
            return
        self._closed.set()
        self.metrics.ended(code)
        if self.enabled:
            if self._begun or self.metrics.found_corrupt:  # wrong words leave nothing behind
                self._write_textfiles(last=True)
            with contextlib.suppress(OSError):
                if self._target is not None:
                    self._target.unlink(missing_ok=True)
                self._endpoint.unlink(missing_ok=True)
                self._endpoint.parent.rmdir()  # the last rank
        if self._server is not None:
            self._server.stop()


ANY_ADDRESS = "any"


def _default_address(world: World) -> str:
    """On one machine nobody else needs to look on. Nodes of a cluster are asked from outside, on any address."""
    return "127.0.0.1" if world.nodes == 1 and world.launcher != "slurm" else ANY_ADDRESS


def _anywhere(address: str) -> bool:
    """0.0.0.0 or ::, where one can listen and nobody can be reached."""
    try:
        return ipaddress.ip_address(address).is_unspecified
    except ValueError:
        return False


def base_port(settings: configuration.Metrics, env: Mapping[str, str]) -> int:
    """The port of local rank 0; 0 for any. Raises `UserError`."""
    text = env.get(contract.ENV_METRICS_PORT, "")
    if settings.port is not None or not text:
        return contract.METRICS_PORT if settings.port is None else settings.port
    if not re.fullmatch(r"\d{1,5}", text) or int(text) > 65535:
        raise UserError(f"{contract.ENV_METRICS_PORT}={text!r} is not a port (0 … 65535)")
    return int(text)


def _forget_ranks(size: int, own: list[Path]) -> None:
    """Removes what ranks of a larger world left beside rank 0's `own` files: nobody may take them for ranks of this one."""
    for mine in own:
        before = mine.stem.removesuffix("00000")
        with contextlib.suppress(OSError):
            for path in mine.parent.glob(f"{glob.escape(before)}*{mine.suffix}"):
                number = path.stem.removeprefix(before)
                if number.isdigit() and int(number) >= size:
                    path.unlink(missing_ok=True)


MAX_CONNECTIONS = 16
"""At once; a further one is closed. The training needs its file descriptors for checkpoints and events."""
REQUEST_SECONDS = 5.0
"""For a whole request, from its connection to the last byte of the answer."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # With the base class's 5, a crowd's connections are dropped, and each comes again after 1 s.
    request_queue_size = 128

    def __init__(self, address: str | None, port: int, metrics: Metrics, stale_seconds: float) -> None:
        self.metrics, self.stale_seconds, self.stopped = metrics, stale_seconds, False
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._both = address is None and socket.has_dualstack_ipv6()
        self.address_family = socket.AF_INET6 if self._both or ":" in (address or "") else socket.AF_INET
        super().__init__((address or ("::" if self._both else ""), port), _Handler)
        self.port: int = self.server_address[1]

    def server_bind(self) -> None:
        if self._both:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # A rank that is started again gets its port although connections of the last one linger; one that another
        # process listens on it does not get.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # HTTPServer's own also asks the DNS for this host's name, which may block.
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
        return self._free.acquire(blocking=False)

    def process_request(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started, so none gives the place back
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def stop(self) -> None:
        """At once: a shutdown of the socket wakes the thread that waits on it (`serve_forever` would poll)."""
        self.stopped = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is nothing to print."""


class _Until(io.RawIOBase):
    """What a socket sends until the deadline, which a client that sends a byte now and then does not put off."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection, self._deadline = connection, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._connection.settimeout(max(0.001, self._deadline - time.monotonic()))
        return self._connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.0"

    def setup(self) -> None:
        super().setup()
        self._deadline = time.monotonic() + REQUEST_SECONDS
        self.rfile.close()
        self.rfile = io.BufferedReader(_Until(self.connection, self._deadline))

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            encode, kind = choose_encoder(self.headers.get("Accept", ""))
            self._answer(200, kind, encode(self.server.metrics.registry))
        elif path == "/healthz":
            metrics = self.server.metrics
            age = time.monotonic() - metrics.alive_at
            well = metrics.finished or age <= self.server.stale_seconds
            body = {"ok": well, "seconds_since_progress": round(age, 3), "finished": metrics.finished}
            self._answer(200 if well else 503, "application/json", json.dumps(body).encode() + b"\n")
        else:
            self._answer(404, "text/plain; charset=utf-8", b"/metrics or /healthz\n")

    def _answer(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.connection.settimeout(max(0.001, self._deadline - time.monotonic()))  # for all of it, also in pieces
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape is nothing to print."""
