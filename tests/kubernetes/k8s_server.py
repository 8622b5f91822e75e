"""An emulated Kubernetes API server over real sockets: selectors, logs and faults of a `Cluster`.

Not a mock: the official client talks HTTP to it. Its refusals are recorded (`recordings/failures.jsonl`).
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import k8s_requests
import k8s_schema
from k8s_admission import Refused, check
from k8s_cluster import KINDS, Cluster, Fault, matches

_PATH = re.compile(
    r"/(?:api|apis)/(?P<group>[^/]+(?:/[^/]+)??)(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[a-z]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<sub>[a-z]+))?$"
)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cluster: Cluster
    match: re.Match[str] | None
    query: dict[str, str]
    body: Any
    fault: Fault | None
    lines: int
    """Number of lines of a stream that have been sent."""

    def log_message(self, *args: Any) -> None:
        pass

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(self.cluster.now() if timestamp is None else timestamp)

    def _handle(self) -> None:
        with self.cluster.changed:
            self.cluster.busy += 1
        try:
            self._respond()
        finally:
            with self.cluster.changed:
                self.cluster.busy -= 1

    do_GET = do_POST = do_PATCH = do_DELETE = _handle

    def _respond(self) -> None:
        cluster, url = self.cluster, urlsplit(self.path)
        self.query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        length = int(self.headers.get("Content-Length") or 0)
        data = self.rfile.read(length)
        with contextlib.suppress(ValueError):
            self.body = None
            self.body = json.loads(data) if data else None
        with cluster.changed:
            cluster.requests.append((self.command, url.path, self.query, self.body))
        if cluster.arrived is not None and cluster.arrived(self.command, self.path):
            self.close_connection = True
            return
        self.match = match = _PATH.match(url.path)
        self.fault = fault = cluster.fault_for(self.command, self.path)
        if fault is not None:
            time.sleep(fault.delay)
        if fault is not None and fault.drop:
            self.close_connection = True
        elif fault is not None and fault.status:
            self._fail(fault.status, "Fault", fault.message, fault.headers)
        elif "Authorization" not in self.headers:  # an anonymous client may read nothing
            self._forbid("system:anonymous")
        elif self.headers.get("Authorization", "").removeprefix("Bearer ") not in cluster.tokens:
            self._fail(401, "Unauthorized", "Unauthorized")
        elif url.path == "/version":
            self._answer(200, {"gitVersion": "v1.32.0"})
        elif match is None or {match["plural"], match["group"]} & cluster.unknown or not _served(match):
            self._send(404, b"404 page not found\n", {"Content-Type": "text/plain; charset=utf-8"})
        elif match["plural"] in cluster.denied or not self._may(match):
            self._forbid("me")
        else:
            self._serve(match, data)

    def _serve(self, match: re.Match[str], data: bytes) -> None:
        self.plural, self.namespace, self.name = match["plural"], match["namespace"] or "", match["name"]
        try:
            k8s_requests.check(self.command, match, self.query, self.headers, data)
            getattr(self, f"_{self.command.lower()}")(match)
        except k8s_requests.NotEmulated as error:
            self.cluster.not_emulated.append(f"{self.command} {self.path}: {error}")
            self._fail(501, "Test", f"not emulated: {error}")

    def _verb(self, match: re.Match[str]) -> str:
        reading = "get" if match["name"] else "list"
        return {"GET": reading, "POST": "create", "PATCH": "patch", "DELETE": "delete"}[self.command]

    def _forbid(self, user: str) -> None:
        self._fail(403, "Forbidden", f'forbidden: User "{user}" cannot {self.command.lower()} path "{self.path}"')

    def _may(self, match: re.Match[str]) -> bool:
        plural, role = match["plural"] + (f"/{match['sub']}" if match["sub"] else ""), self.cluster.role
        if role is None or plural.startswith("selfsubject"):
            return True  # every user may list the rights that the user has
        return match["namespace"] == self.cluster.home and (self._verb(match), plural) in role

    def _get(self, match: re.Match[str]) -> None:
        if match["sub"]:
            self._log()
        elif self.plural in ("secrets", "configmaps"):
            self._fail(500, "Test", f"the content of {self.plural} was asked for")
        elif self.name:
            item = self._object_or_404()
            if item is not None:
                self._answer(200, item)
        else:
            self._list(match["group"])

    def _object_or_404(self) -> dict[str, Any] | None:
        """Returns the requested object, or sends a 404."""
        item = self.cluster.get(self.plural, self.name, self.namespace)
        if item is None:
            self._fail(404, "NotFound", f'{self.plural} "{self.name}" not found')
        return item

    def _list(self, version: str) -> None:
        cluster, custom = self.cluster, self.plural in k8s_schema.CUSTOM
        items = [item for item in cluster.all(self.plural, self.namespace) if matches(item, self.query)]
        if custom:
            items = [{"apiVersion": version, "kind": KINDS[self.plural], **item} for item in items]
        else:  # the list has the kind of all items
            items = [{key: value for key, value in item.items() if key not in ("kind", "apiVersion")} for item in items]
        head = {"kind": f"{KINDS[self.plural]}List", "apiVersion": version}
        about = {"resourceVersion": str(cluster.version), **({"continue": ""} if custom else {})}
        self._answer(200, {**head, "metadata": about, "items": items})

    def _log(self) -> None:
        cluster, name, follow = self.cluster, self.name, self.query.get("follow") == "true"
        pod, container = self._object_or_404(), self.query.get("container")
        if pod is None:
            return
        containers = [container_spec["name"] for container_spec in pod["spec"].get("containers", [])]
        if containers and container is not None and container not in containers:
            self._fail(400, "BadRequest", f"container {container} is not valid for pod {name}")
            return
        if name not in cluster.logs and not pod["spec"].get("nodeName"):
            self._send(204, b"", {})
            return
        if name not in cluster.logs:
            self._fail(400, "BadRequest", f'container "pytorch" in pod "{name}" is waiting to start: ContainerCreating')
            return
        at, uid = 0, ""
        if not self._begin_stream():
            return
        while not self._broken():
            pod = cluster.get("pods", name, self.namespace)
            if pod is None or pod["metadata"]["uid"] != (uid or pod["metadata"]["uid"]):
                break  # the log is removed with its pod
            uid, lines = pod["metadata"]["uid"], cluster.logs.get(name, [])
            done = pod["status"]["phase"] in ("Succeeded", "Failed")
            if at == 0 and "tailLines" in self.query:
                at = max(0, len(lines) - int(self.query["tailLines"]))
            for line in lines[at:]:
                at += 1
                if _instant(line.partition(" ")[0]) >= _instant(self.query.get("sinceTime", "")):
                    self._line(line)
            if not follow or done or cluster.stopping:
                break
            with cluster.changed:
                cluster.changed.wait(0.05)
        self._end_stream()

    def _post(self, match: re.Match[str]) -> None:
        cluster = self.cluster
        if self.plural == "selfsubjectrulesreviews":
            names = [*KINDS, "pods/log", "pods/exec"]
            everything = {(verb, name) for verb in ("create", "get", "list", "patch", "delete") for name in names}
            rules = [
                {"verbs": [verb], "apiGroups": ["*"], "resources": [name]}
                for verb, name in sorted(everything if cluster.role is None else cluster.role)
                if f"{verb} {name}" not in cluster.denied
            ]
            own = {"verbs": ["create"], "apiGroups": ["authorization.k8s.io"], "resources": ["selfsubjectrulesreviews"]}
            status = {"resourceRules": [own, *rules], "nonResourceRules": [], "incomplete": cluster.incomplete}
            self._answer(201, {**self.body, "status": status})
            return
        if self.plural == "selfsubjectreviews":
            self._answer(201, {**self.body, "status": {"userInfo": {"username": "me"}}})
            return
        name = self.body["metadata"]["name"]
        if self.namespace and self.namespace not in cluster.namespaces:
            self._fail(404, "NotFound", f'namespaces "{self.namespace}" not found')
            return
        try:  # the quota decides before the store
            check(self.plural, self.body)
            created = cluster.create(self.plural, self.body, self.namespace, self.query.get("dryRun") == "All")
        except Refused as refused:
            self._fail(refused.status, refused.reason, str(refused))
        except KeyError:
            going = "deletionTimestamp" in self.cluster.get(self.plural, name, self.namespace)["metadata"]
            message = f'{self.plural} "{name}" already exists'
            self._fail(409, "AlreadyExists", f"object is being deleted: {message}" if going else message)
        else:
            self._answer(201, created)

    def _patch(self, match: re.Match[str]) -> None:
        current = self._object_or_404()
        if current is None:
            return
        if not self._conflicts(self.body.get("metadata", {}), current["metadata"]):
            item = merged(current, self.body)
            if self.plural in k8s_schema.CUSTOM and [*k8s_schema.validator(KINDS[self.plural]).iter_errors(item)]:
                raise k8s_requests.NotEmulated("a patch to an invalid object")
            self._answer(200, self.cluster.put(self.plural, item, self.namespace))

    def _conflicts(self, wanted: dict[str, Any], current: dict[str, Any]) -> bool:
        """Refuses a request that expects another uid or version of the object. Returns whether it did."""
        wrong = [key for key in ("uid", "resourceVersion") if wanted.get(key) not in (None, current[key])]
        if wrong:
            self._fail(409, "Conflict", f'Operation cannot be fulfilled on {self.plural} "{self.name}": other {wrong}')
        return bool(wrong)

    def _delete(self, match: re.Match[str]) -> None:
        current, options = self._object_or_404(), self.body or {}
        if current is None or self._conflicts(options.get("preconditions") or {}, current["metadata"]):
            return
        foreground = options.get("propagationPolicy") == "Foreground"
        marked = self.cluster.delete(self.plural, self.name, self.namespace, foreground)
        self._answer(200, marked or {"kind": "Status", "status": "Success"})

    def _answer(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        if self.fault is not None and self.fault.drop_answer:
            self.close_connection = True
        elif not self._spoiled(status, value):
            self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _spoiled(self, status: int, value: Any) -> bool:
        """Sends the replacement that `spoil` returns. Returns whether it did."""
        spoil = self.cluster.spoil if self.command == "GET" and status == 200 else None
        data = spoil(self.path, value) if spoil is not None else None
        if data is None:
            return False
        self._send(200, data, {"Content-Type": "text/html" if data.startswith(b"<!") else "application/json"})
        return True

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, text in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, text)
        self.end_headers()
        self._raw(data)

    def _fail(self, status: int, reason: str, message: str, headers: dict[str, str] | None = None) -> None:
        value = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        self._answer(status, {**value, "message": message, "reason": reason, "code": status}, headers)

    def _begin_stream(self) -> bool:
        self.lines = 0
        if self._spoiled(200, None):
            return False
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        return True

    def _broken(self) -> bool:
        return self.fault is not None and self.fault.drop_after_lines == self.lines

    def _line(self, text: str) -> None:
        if not self._broken():
            data = text.encode() + b"\n"
            self._raw(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.lines += 1

    def _end_stream(self) -> None:
        if self._broken():
            self.close_connection = True
        else:
            self._raw(b"0\r\n\r\n")

    def _raw(self, data: bytes) -> None:
        try:
            self.wfile.write(data)
            self.wfile.flush()
        except OSError:
            self.close_connection = True  # the client has closed the connection


def _served(match: re.Match[str]) -> bool:
    return match["plural"] in KINDS and match["plural"] in k8s_requests.VERSIONS.get(match["group"], ())


def _instant(stamp: str) -> float:
    """Parses RFC 3339 to whole seconds; 0 if there is no stamp."""
    if not stamp[:4].isdigit():
        return 0
    return datetime.fromisoformat(stamp[:19] + stamp[19:].lstrip(".0123456789").replace("Z", "+00:00")).timestamp()


def merged(old: Any, new: Any) -> Any:
    """Returns the object after a merge patch (RFC 7396)."""
    if not isinstance(new, dict):
        return new
    old = old if isinstance(old, dict) else {}
    changed = {key: merged(old.get(key), value) for key, value in new.items()}
    return {key: value for key, value in {**old, **changed}.items() if value is not None}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients that drop their connection are part of the tests


class ApiServer:
    """`with ApiServer() as server:` – a cluster at `server.url`, with kubeconfigs for it."""

    def __init__(self) -> None:
        self.cluster = Cluster()
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"cluster": self.cluster}))
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
        self.cluster.kubectl.stop()
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
