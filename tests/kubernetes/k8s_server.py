"""An emulated Kubernetes API server over real sockets: selectors, pages, watches, logs and faults of a `Cluster`.

Not a mock: the official client talks HTTP to it.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from datetime import datetime
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import k8s_discovery
import k8s_exec
import k8s_protobuf
from k8s_admission import Refused
from k8s_cluster import KINDS, Cluster, Fault, matches
from k8s_failures import failure

_PATH = re.compile(
    r"/(?:api|apis)/(?P<group>[^/]+(?:/[^/]+)??)(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>log|exec))?$"
)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cluster: Cluster
    _mute = False

    def log_message(self, *args: Any) -> None:
        pass

    def _handle(self) -> None:
        with self.cluster.changed:
            self.cluster.busy += 1
        try:
            self._answered()
        finally:
            with self.cluster.changed:
                self.cluster.busy -= 1

    def _answered(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        length = int(self.headers.get("Content-Length") or 0)
        body = k8s_protobuf.read(self.rfile.read(length)) if length else None
        cluster = self.cluster
        with cluster.changed:
            cluster.requests.append((self.command, url.path, query, body))
        if cluster.arrived is not None and cluster.arrived(self.command, self.path):
            self.close_connection = True
            return
        fault = cluster.fault_for(self.command, self.path)
        self._mute = fault is not None and fault.drop_answer
        if fault is not None:
            time.sleep(fault.delay)
            if fault.drop:
                self.close_connection = True
                return
            if fault.status:
                self._fail(fault.status, "Fault", fault.message, fault.headers)
                return
        if self.headers.get("Authorization", "").removeprefix("Bearer ") not in cluster.tokens:
            self._fail(401, "Unauthorized", "Unauthorized")
            return
        if url.path == "/version":
            self._answer(200, {"major": "1", "minor": "32", "gitVersion": "v1.32.0"})
            return
        known = k8s_discovery.answer(url.path)
        if known is not None:
            self._answer(200, known)
            return
        match = _PATH.match(url.path)
        if match is None or match["plural"] in cluster.unknown or match["plural"] not in KINDS:
            self._fail(404, "NotFound", "the server could not find the requested resource")
            return
        if match["plural"] in cluster.denied:
            said = (
                f'{match["plural"]} is forbidden: User "me" cannot {self.command.lower()} resource "{match["plural"]}"'
            )
            self._fail(403, "Forbidden", said)
            return
        if cluster.role is not None and not self._may(match, query):
            self._fail(403, "Forbidden", f'{match["plural"]} is forbidden: User "me" cannot do this in the namespace')
            return
        getattr(self, f"_{self.command.lower()}")(match, query, body, fault)

    def _may(self, match: re.Match[str], query: dict[str, str]) -> bool:
        plural = match["plural"] + (f"/{match['sub']}" if match["sub"] else "")
        if plural.startswith("selfsubject"):
            return True  # everybody may ask for one's own rights
        if match["sub"] == "exec":  # since 1.35 a WebSocket needs both
            return {("get", plural), ("create", plural)} <= (self.cluster.role or set())
        reading = "watch" if query.get("watch") else "get" if match["name"] else "list"
        verb = {"GET": reading, "POST": "create", "PATCH": "patch", "DELETE": "delete"}[self.command]
        assert self.cluster.role is not None
        return match["namespace"] is not None and (verb, plural) in self.cluster.role

    do_GET = do_POST = do_PATCH = do_DELETE = _handle

    def _get(self, match: re.Match[str], query: dict[str, str], body: Any, fault: Fault | None) -> None:
        plural, namespace, name = match["plural"], match["namespace"] or "", match["name"]
        if match["sub"] == "log":
            self._log(name, query, fault)
        elif match["sub"] == "exec":
            self._exec(name, namespace, query, fault)
        elif name:
            found = self.cluster.get(plural, name, namespace)
            if plural in ("secrets", "configmaps") and not self._may_read():
                self._fail(500, "Test", f"the content of {plural} was asked for")
                return
            if found is None:
                self._fail(404, "NotFound", f'{plural} "{name}" not found')
            else:
                self._answer(200, found)
        elif query.get("watch") == "true":
            self._watch(plural, namespace, query, fault)
        else:
            self._list(match, namespace, query)

    def _may_read(self) -> bool:
        """Contents are kubectl's to compare; lockstep asks for metadata alone."""
        kubectl = self.headers.get("User-Agent", "").startswith("kubectl")
        return kubectl or "PartialObjectMetadata" in self.headers.get("Accept", "")

    def _selected(self, plural: str, namespace: str, query: dict[str, str]) -> list[dict[str, Any]]:
        return [item for item in self.cluster.all(plural, namespace) if matches(item, query)]

    def _list(self, match: re.Match[str], namespace: str, query: dict[str, str]) -> None:
        cluster, plural = self.cluster, match["plural"]
        start, _, version = query.get("continue", "0:0").partition(":")
        if version != "0" and int(version) < cluster.oldest:
            self._fail(410, "Expired", "The provided continue parameter is too old")
            return
        items, of = (
            self._selected(plural, namespace, query),
            {"kind": f"{KINDS[plural]}List", "apiVersion": match["group"]},
        )
        metadata_alone = "as=PartialObjectMetadataList" in self.headers.get("Accept", "")
        assert metadata_alone or plural != "configmaps", "the content of ConfigMaps was asked for"
        if metadata_alone:
            of = {"kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1"}
            one = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1"}
            items = [{**one, "metadata": item["metadata"]} for item in items]
        limit = int(query.get("limit", 0)) or len(items)
        page = items[int(start) : int(start) + limit]
        more = int(start) + limit < len(items)
        meta = {"resourceVersion": str(cluster.version)}
        if more:
            meta["continue"] = f"{int(start) + limit}:{cluster.version if version == '0' else version}"
        # A list of metadata that is empty is none at all: the server's language has no other word for it.
        self._answer(200, {**of, "metadata": meta, "items": page or (None if metadata_alone else [])})

    def _watch(self, plural: str, namespace: str, query: dict[str, str], fault: Fault | None) -> None:
        cluster, version = self.cluster, int(query.get("resourceVersion") or 0)
        self._begin_stream()
        if version < cluster.oldest:
            gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            self._chunk({"type": "ERROR", "object": gone})
            self._end_stream()
            return
        deadline = time.monotonic() + float(query.get("timeoutSeconds", 30))
        sent = 0
        if fault is not None and fault.drop_after_lines == sent:
            self.close_connection = True
            return
        while not cluster.stopping and time.monotonic() < deadline:
            with cluster.changed:
                fresh = [e for e in cluster.history if e[0] > version and e[2] == plural and matches(e[3], query)]
                if not fresh:
                    cluster.changed.wait(0.1)
                    continue
            for number, kind, _, item in fresh:
                version = number
                self._chunk({"type": kind, "object": item})
                sent += 1
                if fault is not None and fault.drop_after_lines == sent:
                    self.close_connection = True
                    return
        self._end_stream()

    def _log(self, name: str, query: dict[str, str], fault: Fault | None) -> None:
        cluster = self.cluster
        if name not in cluster.logs:
            self._fail(400, "BadRequest", f'container "pytorch" in pod "{name}" is waiting to start: ContainerCreating')
            return
        self._begin_stream()
        at, sent, uid = 0, 0, ""
        while True:
            namespace = next((n for p, n, other in cluster.objects if p == "pods" and other == name), "team")
            pod = cluster.get("pods", name, namespace)
            if pod is None or pod["metadata"]["uid"] != (uid or pod["metadata"]["uid"]):
                break  # the log goes with its pod
            uid = pod["metadata"]["uid"]
            done = pod["status"]["phase"] in ("Succeeded", "Failed")
            source = cluster.logs.get(name, [])
            lines = source if isinstance(source, list) else source.read_text(errors="replace").splitlines()
            if at == 0 and "tailLines" in query:
                at = max(0, len(lines) - int(query["tailLines"]))
            for line in lines[at:]:
                at += 1
                stamp = line.partition(" ")[0]
                if "sinceTime" in query and _instant(stamp) < _instant(query["sinceTime"]):
                    continue
                self._write(line.encode() + b"\n")
                sent += 1
                if fault is not None and fault.drop_after_lines == sent:
                    self.close_connection = True
                    return
            if query.get("follow") != "true" or done or cluster.stopping:
                break
            with cluster.changed:
                cluster.changed.wait(0.05)
        self._end_stream()

    def _exec(self, name: str, namespace: str, query: dict[str, str], fault: Fault | None) -> None:
        containers, pod = self.cluster.containers, self.cluster.get("pods", name, namespace)
        if pod is None:
            self._fail(404, "NotFound", f'pods "{name}" not found')
            return
        phase, container = pod["status"].get("phase"), containers.there.get(name)
        if phase in ("Succeeded", "Failed"):
            said = f"cannot exec into a container in a completed pod; current phase is {phase}"
            self._fail(400, "BadRequest", said)
            return
        if container is None:
            self._fail(
                500, "InternalError", f'unable to upgrade connection: container not found ("{query["container"]}")'
            )
            return
        if container.name != query.get("container"):
            self._fail(400, "BadRequest", f"container {query.get('container')} is not valid for pod {name}")
            return
        headers = k8s_exec.accept(
            self.headers.get("Sec-WebSocket-Key", ""), self.headers.get("Sec-WebSocket-Protocol", ""), containers
        )
        if headers is None:
            self._fail(400, "BadRequest", "unable to upgrade: unknown protocol")
            return
        self.send_response(101)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.flush()
        self.close_connection = True
        drop = fault.drop_after_lines if fault is not None else None
        protocol = headers["Sec-WebSocket-Protocol"]
        session = k8s_exec.Session(containers, container, protocol, self.rfile, self.wfile, drop)  # type: ignore[arg-type]
        session.broken = partial(self.connection.shutdown, socket.SHUT_RDWR)
        session.run(parse_qs(urlsplit(self.path).query, keep_blank_values=True)["command"], query.get("tty") == "true")

    def _post(self, match: re.Match[str], query: dict[str, str], body: Any, fault: Fault | None) -> None:
        cluster, plural = self.cluster, match["plural"]
        if plural == "selfsubjectaccessreviews":
            wanted = body["spec"]["resourceAttributes"]
            resource = (
                f"{wanted['resource']}/{wanted['subresource']}" if wanted.get("subresource") else wanted["resource"]
            )
            allowed = not {f"{wanted['verb']} {wanted['resource']}", f"{wanted['verb']} {resource}"} & cluster.denied
            allowed = allowed and (cluster.role is None or (wanted["verb"], resource) in cluster.role)
            self._answer(201, {**body, "status": {"allowed": allowed}})
            return
        if plural == "selfsubjectreviews":
            self._answer(201, {**body, "status": {"userInfo": {"username": "me"}}})
            return
        namespace, name = match["namespace"] or "", body["metadata"]["name"]
        with cluster.changed:
            exists = (plural, namespace, name) in cluster.objects
        if exists:
            self._fail(409, "AlreadyExists", f'{plural} "{name}" already exists', name=name)
            return
        try:
            made = cluster.create(plural, body, namespace, query.get("dryRun") == "All")
        except Refused as refused:
            self._fail(403, "Forbidden", str(refused), name=name)
        else:
            self._answer(201, made)

    def _patch(self, match: re.Match[str], query: dict[str, str], body: Any, fault: Fault | None) -> None:
        from lockstep.jobs.manifest import merge

        found = self.cluster.get(match["plural"], match["name"], match["namespace"] or "")
        if found is None:
            self._fail(404, "NotFound", f'{match["plural"]} "{match["name"]}" not found')
        else:
            self._answer(200, self.cluster.put(match["plural"], merge(found, body), match["namespace"] or ""))

    def _delete(self, match: re.Match[str], query: dict[str, str], body: Any, fault: Fault | None) -> None:
        cluster, plural, namespace = self.cluster, match["plural"], match["namespace"] or ""
        found = cluster.get(plural, match["name"], namespace)
        if found is None:
            self._fail(404, "NotFound", f'{plural} "{match["name"]}" not found')
            return
        wanted = (body or {}).get("preconditions") or {}
        if any(wanted.get(key) not in (None, found["metadata"][key]) for key in ("uid", "resourceVersion")):
            said = "the UID or resourceVersion in the precondition does not match"
            self._fail(409, "Conflict", said, kind=KINDS[plural])
            return
        foreground = (body or {}).get("propagationPolicy") == "Foreground"
        left = cluster.delete(plural, match["name"], namespace, foreground)
        self._answer(200, left or {"kind": "Status", "status": "Success"})

    def _answer(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        if self._mute:
            self.close_connection = True
            return
        data = json.dumps(value).encode()
        self.send_response(status)
        usual = {"Content-Type": "application/json", "Content-Length": str(len(data))}
        for name, text in {**usual, **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        self._raw(data)

    def _fail(
        self, status: int, reason: str, message: str, headers: dict[str, str] | None = None, **about: str
    ) -> None:
        match = _PATH.match(urlsplit(self.path).path)
        self._answer(status, failure(status, reason, message, match, about), headers)

    def _begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _chunk(self, value: Any) -> None:
        self._write(json.dumps(value).encode() + b"\n")

    def _write(self, data: bytes) -> None:
        self._raw(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _end_stream(self) -> None:
        self._raw(b"0\r\n\r\n")

    def _raw(self, data: bytes) -> None:
        try:
            self.wfile.write(data)
            self.wfile.flush()
        except OSError:
            self.close_connection = True  # the client has gone: that is its right


def _instant(stamp: str) -> datetime:
    """RFC 3339, in whole seconds."""
    return datetime.fromisoformat(stamp[:19] + stamp[19:].lstrip(".0123456789").replace("Z", "+00:00"))


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients that drop their connection are part of the tests


class ApiServer:
    """`with ApiServer() as server:` – a cluster at `server.url`, with kubeconfigs for it."""

    def __init__(self) -> None:
        self.cluster = Cluster()
        handler = type("Handler", (_Handler,), {"cluster": self.cluster})
        self._server = _Server(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> ApiServer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.cluster.stopping = True
        with self.cluster.changed:
            self.cluster.changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self.cluster.containers.stop()
        self._thread.join(5)

    def kubeconfig(self, path: Path, token: str = "good", namespace: str = "team") -> Path:
        value = {
            "apiVersion": "v1", "kind": "Config", "current-context": "here",
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": namespace}}],
        }  # fmt: skip
        path.write_text(json.dumps(value))
        return path
