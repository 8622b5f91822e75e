"""Where two plain values differ, in words."""

from __future__ import annotations

from typing import Any


def differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """`name: old → new` for each place where two plain values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in sorted({*old, *new}, key=str):
            found += differences(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else str(key))
        return found
    return [] if old == new else [f"{prefix}: {_short(old)} → {_short(new)}"]


def missing_from(wanted: Any, live: Any, prefix: str = "") -> list[str]:
    """`place: wanted → live` for what was asked for and is otherwise; what the server added does not count."""
    if isinstance(wanted, dict) and isinstance(live, dict):
        return [
            line for key in wanted for line in missing_from(wanted[key], live.get(key), f"{prefix}.{key}".lstrip("."))
        ]
    if isinstance(wanted, list) and isinstance(live, list) and len(wanted) == len(live):
        pairs = enumerate(zip(wanted, live))
        return [line for index, (old, new) in pairs for line in missing_from(old, new, f"{prefix}[{index}]")]
    return differences(wanted, live, prefix)


def _short(value: Any) -> str:
    text = "(default)" if value is None else str(value)
    return text if len(text) <= 80 else text[:77] + "..."
