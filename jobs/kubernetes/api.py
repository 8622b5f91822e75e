"""Talking to a Kubernetes API server so that what goes wrong on the way is either mended or said in one line.

The official client brings kubeconfig, credentials and TLS; this adds retries with a bound, one renewal of an expired
token, and pages. Answers are plain JSON: building the client's objects for 10,000 pods takes seconds.
"""

from __future__ import annotations

import contextlib
import email.utils
import json
import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import urllib3
import yaml
from kubernetes import client as kube
from kubernetes import config as kubeconfig

from lockstep.training.contract import UserError

from ..logs import STAMPED, Pieces
from ..manifest import get
from ..status import LoggedOut, Unreachable, seconds_to_answer
from .answers import ApiError, Gone, Item, Listing, Shape, checked

RETRIED = (429, 500, 502, 503, 504)
PAGE = 500
_UNREADABLE = (kubeconfig.ConfigException, yaml.YAMLError, OSError, ValueError, TypeError, KeyError, AttributeError)
"""What reading a kubeconfig may raise."""
ANONYMOUS = "system:anonymous"
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class Api:
    """One API server.

    Args:
        load: makes the client's configuration from the kubeconfig; called again when a token has expired.
        timeout: seconds to wait for an answer to one question, all attempts together.
        attempts: how often a request is sent before the error counts.
    """

    def __init__(
        self,
        load: Callable[[], kube.Configuration],
        timeout: float = 20.0,
        attempts: int = 5,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._load, self.timeout, self.attempts, self._sleep = load, timeout, attempts, sleep
        self._ahead = 0.0
        self._client = self._connect()

    def _connect(self) -> kube.ApiClient:
        configuration = self._load()
        configuration.retries = urllib3.Retry(0, redirect=0)  # this class retries, and says so when it gives up
        return kube.ApiClient(configuration)

    @property
    def host(self) -> str:
        return str(self._client.configuration.host)

    def now(self) -> float:
        """Seconds since the epoch by the server's clock: what its objects say is compared with that, not with ours."""
        return time.time() + self._ahead

    def close(self) -> None:
        self._client.close()

    def get(self, path: str, shape: type[Shape] = Item, accept: str = "application/json", **query: Any) -> Any:
        """An object, or what else has that shape. Raises `ApiError`, `Unreachable`."""
        return self._json("GET", path, query, shape, accept=accept)

    def find(self, path: str, shape: type[Shape] = Item, **how: Any) -> Any:
        """`get`; None where it is not there."""
        try:
            return self.get(path, shape, **how)
        except ApiError as error:
            if error.status != 404:
                raise
            return None

    def create(self, path: str, body: Any, shape: type[Shape] = Item, **query: Any) -> Any:
        """POST with strict field validation: an unknown field is an error, not silently dropped."""
        return self._json("POST", path, {"fieldValidation": "Strict", **query}, shape, body)

    def patch(self, path: str, body: Any) -> Any:
        return self._json("PATCH", path, {}, Shape, body)

    def delete(self, path: str, body: Any) -> Any:
        return self._json("DELETE", path, {}, Shape, body)

    def _json(
        self, method: str, path: str, query: dict[str, Any], shape: type[Shape], body: Any = None,
        accept: str = "application/json",
    ) -> Any:  # fmt: skip
        response = self._send(method, path, query, body, self.timeout, accept=accept)
        try:
            return checked(response.data, shape)
        except ValueError as error:  # what was asked for may have been done
            raise Unreachable(
                f"{self.host} answers {method} {path} with what a Kubernetes API server does not say ({error}): "
                "check the server's address, and what stands between, then try again"
            ) from None
        finally:
            response.release_conn()

    def _send(
        self,
        method: str,
        path: str,
        query: dict[str, Any],
        body: Any,
        timeout: float,
        stream: bool = False,
        accept: str = "application/json",
    ) -> urllib3.BaseHTTPResponse:
        problem, renewed, attempt, waited = "was given no time to answer", False, 0, 0.0
        while attempt < self.attempts and (left := min(seconds_to_answer(), timeout - waited)) > 0:
            pause = min(8.0, 0.2 * 2**attempt) * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, not a secret
            attempt += 1
            asked = time.monotonic()
            try:
                response = self._once(method, path, query, body, left, stream, accept)
            except urllib3.exceptions.HTTPError as error:
                problem = _network_problem(error, left)
            else:
                if not renewed and _unknown(response):
                    renewed = True
                    attempt -= 1
                    response.release_conn()
                    before, self._client = self._client, self._connect()
                    before.close()
                    continue
                if response.status not in RETRIED:
                    return self._checked(response, method, path)
                problem = f"answers {response.status}: {_message(response)}"
                with contextlib.suppress(ValueError):
                    pause = max(pause, min(30.0, float(response.headers.get("Retry-After", 0))))
                response.release_conn()
            waited += time.monotonic() - asked
            if attempt < self.attempts:
                self._sleep(min(pause, max(0.0, seconds_to_answer())))
        raise Unreachable(
            f"{self.host} {problem} ({attempt} attempts): check the network and the cluster, then try again"
        )

    def _once(
        self, method: str, path: str, query: dict[str, Any], body: Any, timeout: float, stream: bool, accept: str
    ) -> urllib3.BaseHTTPResponse:
        headers = {"Accept": accept}
        if body is not None:
            headers["Content-Type"] = "application/merge-patch+json" if method == "PATCH" else "application/json"
        parameters = [(name, value) for name, value in query.items() if value is not None]
        request = self._client.param_serialize(
            method, path, query_params=parameters, header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        response: urllib3.BaseHTTPResponse = self._client.call_api(
            *request, _request_timeout=(min(timeout, 10.0), timeout)
        ).response
        with contextlib.suppress(TypeError, ValueError):  # a proxy may leave the time out
            said = email.utils.parsedate_to_datetime(response.headers["Date"])
            self._ahead = said.timestamp() - time.time()
        if not stream:
            response.data  # noqa: B018 - reads the body here, where a dropped connection is retried
        return response

    def _checked(self, response: urllib3.BaseHTTPResponse, method: str, path: str) -> urllib3.BaseHTTPResponse:
        if response.headers.get("Content-Type", "").startswith("text/html") and response.status != 401:
            response.close()
            raise Unreachable(
                f"{self.host} answers {method} {path} with a web page ({response.status}): "
                "check the server's address, and what stands between, then try again"
            )
        if response.status < 300:
            return response
        message, reason = _message(response), _field(response, "reason")
        response.release_conn()
        if _unknown(response):
            raise LoggedOut(f"{self.host} does not accept the credentials (expired?): log in again, then retry")
        if response.status == 410:
            raise Gone(message)
        raise ApiError(response.status, reason, message or f"{method} {path}: HTTP {response.status}")

    def pages(self, path: str, **query: Any) -> Iterator[dict[str, Any]]:
        """All objects of a list, a page at a time. A list that expires half-way begins again, without doubles."""
        seen: set[str] = set()
        for _ in range(3):
            token: str | None = None
            try:
                while True:
                    page = self.get(path, Listing, **{"limit": PAGE, **query, "continue": token})
                    for item in page["items"] or []:  # null, where a list of metadata is empty
                        if item["metadata"]["uid"] not in seen:
                            seen.add(item["metadata"]["uid"])
                            yield item
                    token = get(page, "metadata", "continue")
                    if not token:
                        return
            except Gone:
                continue
        raise Unreachable(f"{self.host} gave an incomplete list of {path} three times: try again")

    def log(self, path: str, seconds: float, **query: Any) -> Iterator[str]:
        """Lines of a container's log. Ends where the stream ends, breaks, or is silent for `seconds`."""
        response = self._send("GET", path, query, None, seconds, stream=True)
        pieces = Pieces(b"\n", STAMPED)
        try:
            for chunk in response.stream(1 << 16, decode_content=True):
                yield from (line.decode(errors="replace") for line in pieces.of(chunk))
        except (urllib3.exceptions.HTTPError, OSError):
            return  # dropped: the caller knows how far it came, and asks again; half a line is asked for again too
        finally:
            response.close()
        if rest := pieces.rest():
            yield rest.decode(errors="replace")


def _unknown(response: urllib3.BaseHTTPResponse) -> bool:
    """Whether the server does not know who asks. Without credentials it takes everybody for somebody who may do nothing."""
    return response.status == 401 or (response.status == 403 and f'"{ANONYMOUS}"' in _message(response))


def load_configuration(context: str | None) -> tuple[Callable[[], kube.Configuration], str]:
    """(a loader of the configuration, the namespace it names). Raises `UserError` where there is none."""
    # What somebody has set beats what the pod was given.
    if context is None and not os.environ.get("KUBECONFIG") and NAMESPACE_FILE.exists():
        namespace = NAMESPACE_FILE.read_text(encoding="utf-8").strip()

        def inside() -> kube.Configuration:
            configuration = kube.Configuration()
            kubeconfig.load_incluster_config(client_configuration=configuration)
            return configuration

        return inside, namespace

    def outside() -> kube.Configuration:
        configuration, failures = kube.Configuration(), _Errors()
        logging.getLogger().addHandler(failures)
        try:
            kubeconfig.load_kube_config(
                config_file=os.environ.get("KUBECONFIG"), context=context, client_configuration=configuration
            )
        except _UNREADABLE as error:
            reason = (str(error) or type(error).__name__).splitlines()[0][:200]
            raise UserError(f"cannot read the kubeconfig ({reason}): set KUBECONFIG, or choose --context") from None
        finally:
            logging.getLogger().removeHandler(failures)
        if failures.said:
            reason = " ".join(failures.said[0].removeprefix("exec: ").split())[:500]
            raise LoggedOut(f"the kubeconfig's credential plugin failed ({reason}): log in again, then retry")
        configuration.refresh_api_key_hook = None  # what has expired is asked for again when the server says so
        return configuration

    try:
        contexts, current = kubeconfig.list_kube_config_contexts(os.environ.get("KUBECONFIG"))
    except _UNREADABLE:
        return outside, "default"
    chosen = next((item for item in contexts if item["name"] == context), current) if context else current
    return outside, str(chosen.get("context", {}).get("namespace") or "default")


class _Errors(logging.Handler):
    """What the client logs of a credential plugin that fails; it goes on without credentials."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def _network_problem(error: urllib3.exceptions.HTTPError, seconds: float) -> str:
    reason = getattr(error, "reason", None) or error
    if isinstance(reason, urllib3.exceptions.ReadTimeoutError):
        return f"did not answer within {round(seconds, 1):g} s"
    if isinstance(reason, urllib3.exceptions.NameResolutionError):
        return "cannot be reached (no address is known for its name)"
    if isinstance(reason, urllib3.exceptions.ConnectTimeoutError) and not isinstance(
        reason, urllib3.exceptions.NewConnectionError
    ):
        return "cannot be reached in time"
    return f"cannot be reached ({str(reason).rpartition(': ')[2][:120] or type(reason).__name__})"


def _message(response: urllib3.BaseHTTPResponse) -> str:
    return " ".join((_field(response, "message") or str(response.reason or "")).split())[:2000]


def _field(response: urllib3.BaseHTTPResponse, name: str) -> str:
    with contextlib.suppress(ValueError, urllib3.exceptions.HTTPError):
        value = json.loads(response.data)
        return str(value.get(name) or "") if isinstance(value, dict) else ""
    return ""
