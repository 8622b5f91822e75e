"""How an API server says no: a Status that names what it is about (`recordings/failures.jsonl`)."""

from __future__ import annotations

import re
from typing import Any

TOLD = (403, 404, 409, 422)
"""Only these failures are about an object or a kind."""


def failure(
    status: int, reason: str, message: str, path: re.Match[str] | None, about: dict[str, str]
) -> dict[str, Any]:
    """`about`: what the failure is about, where the path does not say it."""
    value = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message}
    if path is not None and status in TOLD:
        group = path["group"].rpartition("/")[0]
        details = {"name": path["name"], "group": group, "kind": path["plural"], **about}
        value["details"] = {key: text for key, text in details.items() if text}
    return {**value, "reason": reason, "code": status}
