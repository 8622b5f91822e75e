"""What a run has said in its events.jsonl, also while it is writing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def events(run_dir: Path, *kinds: str) -> list[dict[str, Any]]:
    """The events of these kinds, of all without one. A line without its end is being written, and is left for later."""
    path = run_dir / "events.jsonl"
    text = path.read_text() if path.exists() else ""
    found = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [event for event in found if not kinds or event["event"] in kinds]
