"""moto's S3 server in a separate environment (its boto3 conflicts with our Kubernetes client), and a proxy in front of it."""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import re
import shlex
import shutil
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.processes import PYTHON, clean_env, free_port, poll, require, run, started

MOTO = "moto[server]>=5.1.11"
"""From this version on moto compares the tag of a conditional write."""
Fault = Callable[[int, str, str], str]
"""(number of the request from 0, method, path) → its fault: "", one of `FAULTS`, or a status. `kill…` calls `Proxy.kill`.
`held` waits until `Proxy.release` is set. `spoiled`: the server stores the body with one byte changed."""
FAULTS = ("500", "503", "cut", "lost", "truncated", "flipped")
"""A server error; 503 SlowDown; cut before the server; the answer lost; half an answer; one byte of the answer changed."""


def environment(port: int, host: str = "127.0.0.1") -> dict[str, str]:
    """Returns the variables with which a job reaches the server."""
    return clean_env(
        AWS_ENDPOINT_URL=f"http://{host}:{port}", AWS_ACCESS_KEY_ID="name", AWS_SECRET_ACCESS_KEY="secret",
        AWS_REGION="us-east-1",
    )  # fmt: skip


@contextlib.contextmanager
def moto(folder: Path, address: str = "127.0.0.1") -> Iterator[int]:
    """Starts a server with the bucket `bucket` on this address. Yields its port."""
    uv = shutil.which("uv", path=str(Path(PYTHON).parent)) or "uv"
    tool = run([uv, "tool", "run", "--from", MOTO, "moto_server", "--help"])
    require(tool.code == 0, f"needs a package index, or uv's cache: {tool.output}")
    port = free_port()
    log = folder / "moto.log"  # a pipe without a reader blocks it
    words = shlex.join([uv, "tool", "run", "--from", MOTO, "moto_server", "-H", address, "-p", str(port)])
    with started(["sh", "-c", f"exec {words} > {log} 2>&1"]):

        def bucket() -> bool:
            try:
                _ask(port, "bucket", method="PUT")
            except (OSError, http.client.HTTPException):
                return False
            return True

        poll(bucket, what="moto's server")
        yield port


class Proxy:
    """A proxy in front of a server: `fault` decides about each request."""

    def __init__(self, server: int, host: str = "127.0.0.1") -> None:
        self.server = server
        self.fault: Fault
        self.requests: list[tuple[str, str]]
        self.refusals: int
        """Number of answers with status 412."""
        self.release: threading.Event
        self.clock: Callable[[], str] | None
        """Returns the time that replaces every time in an answer."""
        self.dropped_header: str
        """The condition header that the proxy drops."""
        self.kill: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self.reset()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                with contextlib.suppress(OSError):
                    super().handle_one_request()

            def answer(self) -> None:
                proxy.answer(self)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer((host, 0), Handler)
        self.port: int = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def reset(self, fault: Fault = lambda *_: "") -> None:
        self.fault = fault
        self.requests = []
        self.refusals = 0
        self.release = threading.Event()
        self.clock = None
        self.dropped_header = ""

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        with self._lock:
            number = len(self.requests)
            self.requests.append((request.command, request.path))
            fault, release = self.fault(number, request.command, request.path), self.release
        if fault == "held":
            release.wait()
        if fault == "kill before":
            self.kill()
        if fault in ("cut", "kill before"):
            request.close_connection = True
            return
        if fault == "spoiled":
            body = body[:-1] + bytes([body[-1] ^ 1])
        if fault.isdigit():
            status, headers, answer = int(fault), {}, b"<Error><Code>SlowDown</Code></Error>"
        else:
            status, headers, answer = self._ask(request, body)
            self.refusals += status == 412
        if fault == "kill after":
            self.kill()
        if fault in ("lost", "kill after"):
            request.close_connection = True
            return
        if fault == "flipped" and answer:
            answer = answer[:-1] + bytes([answer[-1] ^ 1])
        request.send_response_only(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", headers.get("Content-Length", str(len(answer))))
        request.end_headers()
        if fault == "truncated" and answer:
            answer, request.close_connection = answer[: len(answer) // 2], True
        if request.command != "HEAD":
            request.wfile.write(answer)

    def _ask(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server, timeout=60)
        try:
            headers = {name: value for name, value in request.headers.items() if name.lower() != self.dropped_header}
            connection.request(request.command, request.path, body, headers)
            response = connection.getresponse()
            pattern = re.compile(r"date|etag|last-modified|content-type|content-range|x-amz-.*", re.IGNORECASE)
            answer_headers = {name: value for name, value in response.getheaders() if pattern.fullmatch(name)}
            if request.command == "HEAD":
                answer_headers["Content-Length"] = response.getheader("Content-Length") or "0"
            text = response.read()
            if self.clock is not None:
                answer_headers |= {name: self.clock() for name in ("Date", "Last-Modified") if response.getheader(name)}
                if text.startswith(b"<?xml"):
                    iso = email.utils.parsedate_to_datetime(self.clock()).strftime("%Y-%m-%dT%H:%M:%S.000Z")
                    text = re.sub(rb"(?<=<LastModified>)[^<]*", iso.encode(), text)
            return response.status, answer_headers, text
        finally:
            connection.close()


def _ask(port: int, path: str, data: bytes | None = None, method: str = "GET") -> bytes:
    """Sends a request to the server, which checks the name, not the signature."""
    name = "AWS4-HMAC-SHA256 Credential=name/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
    headers = {
        "Authorization": name,
        "Content-Type": "application/octet-stream",
    }  # moto would parse a form
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", data, headers, method=method)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return bytes(answer.read())


def objects(port: int, prefix: str) -> dict[str, int]:
    """Returns key → size of the objects under a prefix."""
    text = _ask(port, f"bucket?list-type=2&prefix={prefix}/").decode()
    keys, sizes = re.findall(r"<Key>([^<]*)</Key>", text), re.findall(r"<Size>(\d+)</Size>", text)
    return {key.removeprefix(f"{prefix}/"): int(size) for key, size in zip(keys, sizes, strict=True)}


def put(port: int, key: str, data: bytes) -> None:
    _ask(port, f"bucket/{key}", data, "PUT")


def read(port: int, key: str) -> bytes:
    return _ask(port, f"bucket/{key}")
