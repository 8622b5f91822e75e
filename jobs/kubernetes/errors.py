"""What an API server refuses, and as which error a person is told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lockstep.jobs.kubernetes.kinds import INSTALL
from lockstep.jobs.status import Unreachable
from lockstep.training.contract import UserError


class ApiError(Exception):
    """The server's refusal: HTTP status, its reason word, its message."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class Gone(Exception):
    """410: the resource version of a watch or of a page is too old. List again."""


@contextlib.contextmanager
def explained(host: str, kind: str = "") -> Iterator[None]:
    """The server's refusals as one line that says what to do. `kind`: of the object that was asked for."""
    try:
        yield
    except Gone:
        raise Unreachable(f"{host} no longer has the version that was asked for: try again") from None
    except ApiError as error:
        message = " ".join(str(error).split())
        if error.status == 403:
            raise UserError(_forbidden(message)) from None
        if error.status >= 500:
            raise Unreachable(f"{host} answers {error.status}: {message}") from None
        if error.status == 404 and kind in INSTALL and "namespace" not in message:
            raise UserError(
                f"the cluster does not have {kind}: install {INSTALL[kind]}, see `lockstep doctor k8s`"
            ) from None
        raise UserError(f"the cluster refuses ({error.status} {error.reason}): {message}") from None


def _forbidden(message: str) -> str:
    """403 is the answer to three things. What is forbidden stands before the reason, and may hold any word."""
    why = message.rpartition(" is forbidden: ")[2]
    if why.startswith("exceeded quota"):
        return f"the namespace's quota does not allow it: {message}; wait for other jobs to end, or ask for more"
    if "being terminated" in why or "is terminating" in why:
        return f"the namespace is being deleted: {message}; use another one, or wait until it is there again"
    return f"not allowed: {message}; ask for the rights in deploy/k8s/base/rbac.yaml"
