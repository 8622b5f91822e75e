"""Talks to a Kubernetes API server. A failure on the way is either repaired or reported in one line.

The official client brings kubeconfig, credentials and TLS; this adds attempts within a bound, and one renewal of an
expired token. Answers are plain JSON: building the client's objects for 10,000 pods takes seconds.
"""

from __future__ import annotations

import contextlib
import email.utils
import json
import logging.handlers
import os
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Annotated, Any

import urllib3
import yaml
from kubernetes import client as kube
from kubernetes import config as kubeconfig
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lockstep.training.contract import UserError, first_line

from ..logs import LineSplitter
from ..status import LoggedOut, Unreachable, seconds_to_answer
from .observe import ApiError, Failing
from .render import KINDS, path_of

RETRIED = (429, *range(500, 600))
CONNECT_SECONDS = 10.0
_UNREADABLE = (kubeconfig.ConfigException, yaml.YAMLError, OSError, ValueError, TypeError, KeyError, AttributeError)
"""Errors that reading a kubeconfig may raise."""
ANONYMOUS = "system:anonymous"
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

MAX_PODS = 1_000_000
"""Largest number of pods of a job: far above the size of a cluster, and a list of their names fits into memory."""

Text = str | None
Count = int | None
Number = Annotated[int | None, Field(ge=0, le=MAX_PODS)]


class Shape(BaseModel):
    """The shape of any answer: a mapping."""

    model_config = ConfigDict(strict=True, extra="ignore", defer_build=True)


class Explained(Shape):
    """Anything that gives a reason, such as the refusal of a request."""

    reason: Text = None
    message: Text = None


class Reference(Shape):
    """The owner of an object, or the object of an event."""

    kind: Text = None
    name: Text = None
    uid: Text = None


class Identity(Shape):
    name: str = Field(min_length=1)
    uid: str = Field(min_length=1)
    """Identity of the object. A deletion without it could delete another object of the same name."""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    creationTimestamp: Text = None
    deletionTimestamp: Text = None
    ownerReferences: list[Reference] | None = None


class Condition(Explained):
    type: Text = None
    status: Text = None


class How(Explained):
    """The reason why a container waits or has ended."""

    exitCode: Count = None
    finishedAt: Text = None


class ContainerState(Shape):
    waiting: How | None = None
    terminated: How | None = None


class ContainerStatus(Shape):
    name: Text = None
    image: Text = None
    restartCount: Count = None
    state: ContainerState | None = None
    lastState: ContainerState | None = None


class Members(Shape):
    """How many pods a kind of replicas, a trainer or a job of a JobSet has."""

    replicas: Number = None
    numNodes: Number = None
    ready: Count = None


class Status(Explained):
    phase: Text = None
    conditions: list[Condition] | None = None
    containerStatuses: list[ContainerStatus] | None = None
    initContainerStatuses: list[ContainerStatus] | None = None
    jobsStatus: list[Members] | None = None


class Spec(Shape):
    """The spec of jobs, pods and other objects: one name means one thing in all of them."""

    pytorchReplicaSpecs: dict[str, Members | None] | None = None
    trainer: Members | None = None
    suspend: bool | None = None
    hostname: Text = None
    nodeName: Text = None
    queueName: Text = None
    clusterQueue: Text = None
    accessModes: list[str] | None = None


class Item(Explained):
    """An object that is stored: a job, a pod, an event, or its metadata alone."""

    metadata: Identity
    spec: Spec | None = None
    status: Status | None = None
    type: Text = None
    lastTimestamp: Text = None
    eventTime: Text = None
    count: Count = None
    involvedObject: Reference | None = None


class Listing(Shape):
    items: list[Item] | None


def checked(text: bytes | str, shape: type[Shape]) -> dict[str, Any]:
    """Returns an answer as plain values. Raises `ValueError`, which says in one line what is wrong with the answer."""
    try:
        value = json.loads(text)
    except ValueError:
        raise ValueError("no JSON") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    try:
        shape.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{place or 'the whole'}: {first['msg'].lower()}") from None
    return dict(value)


class Api:
    """One API server.

    Args:
        load: makes the client's configuration from the kubeconfig; called again if a token has expired.
        timeout: seconds to wait for an answer to one attempt, and after which no further attempt begins.
        attempts: how often a request is sent before the error counts.
    """

    def __init__(
        self, load: Callable[[], kube.Configuration], timeout: float = 20.0, attempts: int = 5,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        self._load, self.timeout, self.attempts, self._sleep = load, timeout, attempts, sleep
        self._ahead = 0.0
        self._client = kube.ApiClient(load())
        self.host = str(self._client.configuration.host)

    def now(self) -> float:
        """Returns the seconds since the epoch by the server's clock. Times of the server's objects are compared with this clock, not
        with ours."""
        return time.time() + self._ahead

    def close(self) -> None:
        self._client.close()

    def get(self, path: str, shape: type[Shape] = Item, **query: Any) -> Any:
        """Returns an object, or another value of that shape. Raises `ApiError`, `Unreachable`."""
        return self._json("GET", path, query, shape)

    def find(self, path: str, shape: type[Shape] = Item, missing: Collection[int] = (404,), **query: Any) -> Any:
        """Returns the result of `get`; None if the status of the refusal is one of `missing`."""
        return self._json("GET", path, query, shape, missing=missing)

    def items(self, path: str, **query: Any) -> list[dict[str, Any]]:
        """Returns all objects of a list. Raises `ApiError`, `Unreachable`."""
        return self.get(path, Listing, **query)["items"] or []

    def jobs(self, namespace: str, **query: Any) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """Yields kind and jobs of each kind that the cluster serves and that the user may list. Raises `ApiError` if no kind answers, and
        one is refused."""
        answered = False
        for kind in KINDS:
            listing = self.find(path_of(namespace, kind), Listing, (403, 404), **query)
            if listing is not None:
                answered = True
                yield kind, [{**item, "kind": kind} for item in listing["items"] or []]
        for kind in () if answered else KINDS:
            self.find(path_of(namespace, kind), Listing, **query)

    def create(
        self, path: str, body: Any, shape: type[Shape] = Item, missing: Collection[int] = (), **query: Any
    ) -> Any:
        """Sends a POST with strict field validation: an unknown field is an error, and not silently dropped. `missing` as in `find`."""
        return self._json("POST", path, {"fieldValidation": "Strict", **query}, shape, body, missing)

    def patch(self, path: str, body: Any) -> Any:
        return self._json("PATCH", path, {}, Shape, body)

    def delete(self, path: str, body: Any) -> Any:
        """Deletes an object, if it is there."""
        return self._json("DELETE", path, {}, Shape, body, missing=(404,))

    def _json(
        self, method: str, path: str, query: dict[str, Any], shape: type[Shape], body: Any = None,
        missing: Collection[int] = (),
    ) -> Any:  # fmt: skip
        response = self._send(method, path, query, self.timeout, body, missing=missing)
        try:
            return checked(response.data, shape) if response.status < 300 else None
        except ValueError as error:  # the server may have executed the request
            raise Unreachable(
                f"{self.host} answers {method} {path} with what a Kubernetes API server does not say ({error}): "
                "check the server's address, and what stands between, then try again"
            ) from None

    def _send(
        self, method: str, path: str, query: dict[str, Any], timeout: float, body: Any = None,
        stream: bool = False, missing: Collection[int] = (),
    ) -> urllib3.BaseHTTPResponse:  # fmt: skip
        """Returns the server's good answer, or one whose status is in `missing`. Renews an expired token once. Raises `ApiError`,
        `Unreachable`."""
        for is_renewed in (False, True):
            response = self._attempt(method, path, query, timeout, body, stream)
            # The server treats a client without credentials as a user without rights.
            unknown = response.status == 401 or (response.status == 403 and f'"{ANONYMOUS}"' in _failure(response)[0])
            if is_renewed or not unknown:
                break
            response.release_conn()
            expired, self._client = self._client, kube.ApiClient(self._load())
            expired.close()
        if response.headers.get("Content-Type", "").startswith("text/html") and response.status != 401:
            response.close()
            raise Unreachable(
                f"{self.host} answers {method} {path} with a web page ({response.status}): "
                "check the server's address, and what stands between, then try again"
            )
        if unknown:
            response.close()
            raise LoggedOut(f"{self.host} does not accept the credentials (expired?): log in again, then retry")
        if response.status < 300 or response.status in missing:
            return response
        message, reason = _failure(response)
        response.release_conn()
        message = message or f"{method} {path}: HTTP {response.status}"
        if response.status in RETRIED:
            failure = Failing if response.status >= 500 else Unreachable
            raise failure(f"{self.host} answers {response.status}: {message}: check the cluster, then try again")
        raise ApiError(response.status, reason, message, path)

    def _attempt(
        self, method: str, path: str, query: dict[str, Any], timeout: float, body: Any, stream: bool
    ) -> urllib3.BaseHTTPResponse:
        """Returns the server's answer, whatever its status, after up to `attempts` attempts. Raises `Unreachable`.

        No attempt begins when `timeout` seconds are over, but for one after a pause that the server asks for.
        """
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/merge-patch+json" if method == "PATCH" else "application/json"
        parameters = [(name, value) for name, value in query.items() if value is not None]
        _, url, headers, *_ = self._client.param_serialize(
            method, path, query_params=parameters, header_params=headers, auth_settings=["BearerToken"]
        )
        seconds, wait = min(seconds_to_answer(), timeout), self._sleep
        if seconds <= 0:
            raise Unreachable(f"{self.host} was given no time to answer: try again")
        end = time.monotonic() + seconds

        class Bounded(urllib3.Retry):
            def is_exhausted(self) -> bool:
                return super().is_exhausted() or time.monotonic() >= end

            def sleep(self, response: urllib3.BaseHTTPResponse | None = None) -> None:
                asked = None
                with contextlib.suppress(urllib3.exceptions.InvalidHeader):  # such as `1.5`: as if there were none
                    asked = self.get_retry_after(response) if response is not None else None
                wait(min(asked or self.get_backoff_time(), max(0.0, seconds_to_answer())))

        retry = Bounded(
            self.attempts - 1, redirect=0, status_forcelist=RETRIED, allowed_methods=None, raise_on_status=False,
            backoff_factor=0.2, backoff_jitter=0.2, retry_after_max=30,
        )  # fmt: skip
        try:
            response: urllib3.BaseHTTPResponse = self._client.rest_client.pool_manager.request(
                method, url, headers=headers, body=None if body is None else json.dumps(body), preload_content=not stream,
                timeout=urllib3.Timeout(connect=min(seconds, CONNECT_SECONDS), read=seconds), retries=retry,
            )  # fmt: skip
        except urllib3.exceptions.HTTPError as error:
            reason = str(getattr(error, "reason", None) or error).rpartition(": ")[2]
            reason = reason[:120] or type(error).__name__
            raise Unreachable(
                f"{self.host} cannot be reached ({reason}): check the network and the cluster, then try again"
            ) from None
        with contextlib.suppress(KeyError, TypeError, ValueError):  # a proxy may leave the time out
            self._ahead = email.utils.parsedate_to_datetime(response.headers["Date"]).timestamp() - time.time()
        return response

    def log(self, path: str, seconds: float, **query: Any) -> Iterator[str]:
        """Yields the lines of a container's log. Ends if the stream ends, breaks, or is silent for `seconds`."""
        response = self._send("GET", path, query, seconds, stream=True)
        pieces = LineSplitter()
        try:
            for chunk in response.stream(1 << 16, decode_content=True):
                yield from (line.decode(errors="replace") for line in pieces.of(chunk))
        except (urllib3.exceptions.HTTPError, OSError):
            return  # the caller knows the last line that it got, and requests the rest again, with a partial line
        finally:
            response.close()
        if rest := pieces.rest():
            yield rest.decode(errors="replace")


def _failure(response: urllib3.BaseHTTPResponse) -> tuple[str, str]:
    """Returns the message and the reason of a refusal. A proxy gives neither."""
    answer: dict[str, Any] = {}
    with contextlib.suppress(ValueError, urllib3.exceptions.HTTPError):
        answer = checked(response.data, Explained)
    message = str(answer.get("message") or response.reason or "")
    return " ".join(message.split())[:2000], str(answer.get("reason") or "")


def load_configuration(context: str | None) -> tuple[Callable[[], kube.Configuration], str]:
    """Returns (a loader of the configuration, the namespace that it names). Raises `UserError` if there is no configuration."""
    # The user's settings take precedence over the pod's defaults.
    inside = context is None and not os.environ.get("KUBECONFIG") and NAMESPACE_FILE.exists()

    def load() -> kube.Configuration:
        configuration, failures = kube.Configuration(), logging.handlers.BufferingHandler(1000)
        if inside:
            kubeconfig.load_incluster_config(client_configuration=configuration)
            return configuration
        failures.setLevel(logging.ERROR)
        logging.getLogger().addHandler(failures)
        try:
            kubeconfig.load_kube_config(
                config_file=os.environ.get("KUBECONFIG"), context=context, client_configuration=configuration
            )
        except _UNREADABLE as error:
            reason = first_line(error)[:200]
            raise UserError(f"cannot read the kubeconfig ({reason}): set KUBECONFIG, or choose --context") from None
        finally:
            logging.getLogger().removeHandler(failures)
        if failures.buffer:  # the plugin failed, and the client would continue without credentials
            reason = " ".join(failures.buffer[0].getMessage().removeprefix("exec: ").split())[:500]
            raise LoggedOut(f"the kubeconfig's credential plugin failed ({reason}): log in again, then retry")
        configuration.refresh_api_key_hook = None  # expired credentials are read again when the server refuses them
        return configuration

    if inside:
        return load, NAMESPACE_FILE.read_text(encoding="utf-8").strip()
    try:
        contexts, current = kubeconfig.list_kube_config_contexts(os.environ.get("KUBECONFIG"))
    except _UNREADABLE:
        return load, "default"
    chosen = next((item for item in contexts if item["name"] == context), current) if context else current
    return load, str(chosen.get("context", {}).get("namespace") or "default")
