"""An emulated Kubernetes API server over real sockets: objects, selectors, pages, watches, logs, and faults on demand.

Not a mock: the official client talks HTTP to it. Of what has a will of its own it has the garbage collection, with its lag
(seen: 0.5 to 0.6 s after the owner is gone), finalizers, and the decisions of a Role; `k8s_operator.py` adds the
training-operator's part. Admission and the node's part (conditions of pods) are played by the tests.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import k8s_exec

KINDS = {
    "pods": "Pod", "events": "Event", "networkpolicies": "NetworkPolicy", "pytorchjobs": "PyTorchJob", "jobs": "Job",
    "trainjobs": "TrainJob", "workloads": "Workload", "nodes": "Node", "persistentvolumeclaims": "PersistentVolumeClaim",
    "localqueues": "LocalQueue", "clusterqueues": "ClusterQueue", "customresourcedefinitions": "CustomResourceDefinition",
    "deployments": "Deployment", "secrets": "Secret", "selfsubjectaccessreviews": "SelfSubjectAccessReview",
    "selfsubjectreviews": "SelfSubjectReview", "podmonitors": "PodMonitor", "configmaps": "ConfigMap",
    "clustertrainingruntimes": "ClusterTrainingRuntime",
}  # fmt: skip
_PATH = re.compile(
    r"/(?:api|apis)/(?P<group>[^/]+(?:/[^/]+)??)(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>log|exec))?$"
)


@dataclass
class Fault:
    """What happens to the next `times` requests that match."""

    method: str
    path: str
    status: int = 0
    message: str = "emulated fault"
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    drop: bool = False
    drop_answer: bool = False  # the request is carried out, its answer never arrives
    drop_after_lines: int | None = None
    times: int = 1
    hits: int = 0


class Cluster:
    """The state behind the server. All methods may be called from tests while clients talk to it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.version = 100
        self.oldest = 0
        self.history: list[tuple[int, str, str, dict[str, Any]]] = []
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str, dict[str, str], Any]] = []
        self.tokens: set[str] = {"good"}
        self.logs: dict[str, list[str] | Path] = {}
        self.unknown: set[str] = set()
        self.denied: set[str] = set()
        self.containers = k8s_exec.Containers()
        self.stopping = False
        self.role: set[tuple[str, str]] | None = None
        """(verb, resource) that may be done; None: everything."""
        self.lag = 0.5
        self.busy = 0
        """Requests that are being carried out."""
        self.arrived: Callable[[str, str], bool] | None = None
        """Is told of each request (method, path) before it is carried out, and says whether it gets lost on the way."""

    def allow(self, role: dict[str, Any]) -> None:
        """From now on only what a Role grants is answered."""
        self.role = {(verb, name) for rule in role["rules"] for name in rule["resources"] for verb in rule["verbs"]}

    def put(self, plural: str, item: dict[str, Any], namespace: str = "team") -> dict[str, Any]:
        """Creates or replaces an object, as a controller would."""
        with self.changed:
            key = (plural, namespace, item["metadata"]["name"])
            before = self.objects.get(key)
            self.version += 1
            meta = item["metadata"]
            meta.setdefault("uid", before["metadata"]["uid"] if before else str(uuid.uuid4()))
            meta.setdefault("creationTimestamp", "2026-01-01T00:00:00Z")
            meta["namespace"], meta["resourceVersion"] = namespace, str(self.version)
            item.setdefault("kind", KINDS[plural])
            self.objects[key] = item
            self._tell("MODIFIED" if before else "ADDED", plural, item)
        return item

    def remove(self, plural: str, name: str, namespace: str = "team") -> None:
        with self.changed:
            item = self.objects.pop((plural, namespace, name), None)
            if item is not None:
                self.version += 1
                self._tell("DELETED", plural, item)
                collector = threading.Timer(self.lag, self._collect, [item["metadata"]["uid"]])
                collector.daemon = True
                collector.start()

    def finish_deletion(self, plural: str, name: str, namespace: str = "team") -> None:
        """The finalizers have done their work."""
        self.remove(plural, name, namespace)

    def _collect(self, uid: str) -> None:
        """Removes what names the object that is gone as its owner, whatever has its name by now."""
        with self.changed:
            orphans = [
                key for key, item in self.objects.items()
                if any(owner.get("uid") == uid for owner in item["metadata"].get("ownerReferences") or [])
            ]  # fmt: skip
        for plural, namespace, name in orphans:
            self.remove(plural, name, namespace)

    def get(self, plural: str, name: str, namespace: str = "team") -> dict[str, Any] | None:
        with self.changed:
            return self.objects.get((plural, namespace, name))

    def _tell(self, kind: str, plural: str, item: dict[str, Any]) -> None:
        self.history.append((self.version, kind, plural, json.loads(json.dumps(item))))
        self.changed.notify_all()

    def forget_history(self) -> None:
        """Watches and pages that are older than this moment get 410 Gone."""
        with self.changed:
            self.oldest = self.version

    def fault_for(self, method: str, path: str) -> Fault | None:
        with self.changed:
            for fault in self.faults:
                if fault.times > 0 and fault.method in (method, "*") and re.search(fault.path, path):
                    fault.times -= 1
                    fault.hits += 1
                    return fault
        return None


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
        body = json.loads(self.rfile.read(length)) if length else None
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
            if plural in ("secrets", "configmaps") and "PartialObjectMetadata" not in self.headers.get("Accept", ""):
                self._fail(500, "Test", f"the content of {plural} was asked for")
                return
            if found is None:
                self._fail(404, "NotFound", f'{plural} "{name}" not found')
            else:
                self._answer(200, found)
        elif query.get("watch") == "true":
            self._watch(plural, namespace, query, fault)
        else:
            self._list(plural, namespace, query)

    def _selected(self, plural: str, namespace: str, query: dict[str, str]) -> list[dict[str, Any]]:
        with self.cluster.changed:
            items = [item for (p, n, _), item in self.cluster.objects.items() if p == plural and n == namespace]
        return [item for item in items if _matches(item, query)]

    def _list(self, plural: str, namespace: str, query: dict[str, str]) -> None:
        cluster = self.cluster
        start, _, version = query.get("continue", "0:0").partition(":")
        if version != "0" and int(version) < cluster.oldest:
            self._fail(410, "Expired", "The provided continue parameter is too old")
            return
        items = self._selected(plural, namespace, query)
        if plural == "configmaps":
            assert "PartialObjectMetadataList" in self.headers.get("Accept", ""), (
                "the content of ConfigMaps was asked for"
            )
            items = [{"metadata": item["metadata"]} for item in items]
        limit = int(query.get("limit", 0)) or len(items)
        page = items[int(start) : int(start) + limit]
        more = int(start) + limit < len(items)
        meta = {"resourceVersion": str(cluster.version)}
        if more:
            meta["continue"] = f"{int(start) + limit}:{cluster.version if version == '0' else version}"
        self._answer(200, {"kind": f"{KINDS[plural]}List", "metadata": meta, "items": page})

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
                fresh = [e for e in cluster.history if e[0] > version and e[2] == plural and _matches(e[3], query)]
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
                if "sinceTime" in query and stamp < query["sinceTime"][:-1]:
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
            self._answer(201, {**body, "status": {"allowed": allowed}})
            return
        if plural == "selfsubjectreviews":
            self._answer(201, {**body, "status": {"userInfo": {"username": "me"}}})
            return
        namespace, name = match["namespace"] or "", body["metadata"]["name"]
        with cluster.changed:
            exists = (plural, namespace, name) in cluster.objects
        if exists:
            self._fail(409, "AlreadyExists", f'{plural} "{name}" already exists')
        elif query.get("dryRun") == "All":
            self._answer(201, body)
        else:
            self._answer(201, cluster.put(plural, body, namespace))

    def _patch(self, match: re.Match[str], query: dict[str, str], body: Any, fault: Fault | None) -> None:
        from jobs.manifest import merge

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
            self._fail(409, "Conflict", "the UID or resourceVersion in the precondition does not match")
            return
        finalizers = found["metadata"].get("finalizers")
        if finalizers:
            marked = {**found["metadata"], "deletionTimestamp": "2026-01-01T00:00:01Z"}
            cluster.put(plural, {**found, "metadata": marked}, namespace)
        else:
            cluster.remove(plural, match["name"], namespace)
        self._answer(200, {"kind": "Status", "status": "Success"})

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

    def _fail(self, status: int, reason: str, message: str, headers: dict[str, str] | None = None) -> None:
        value = {"kind": "Status", "status": "Failure", "code": status, "reason": reason, "message": message}
        self._answer(status, value, headers)

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


def _matches(item: dict[str, Any], query: dict[str, str]) -> bool:
    labels = item["metadata"].get("labels") or {}
    for term in filter(None, query.get("labelSelector", "").split(",")):
        name, _, value = term.partition("=")
        if labels.get(name) != value:
            return False
    for term in filter(None, query.get("fieldSelector", "").split(",")):
        name, _, value = term.partition("=")
        current: Any = item
        for part in name.split("."):
            current = current.get(part, {}) if isinstance(current, dict) else {}
        if current != value:
            return False
    return True


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
