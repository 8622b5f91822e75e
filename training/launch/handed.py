"""What a job hands the `Session` that its program opens: run directory and settings, which a recipe's job gets as arguments."""

from __future__ import annotations

import json
import os
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.training.contract import ENV_SESSION, RUN_FILE, UserError


@dataclass(frozen=True, slots=True)
class Handed:
    run_dir: str = ""
    """Where the run is kept, in place of the script's own folder; "": there."""
    settings: tuple[str, ...] = ()
    """NAME=VALUE, stronger than the script's own."""
    fresh: str = ""
    """The word of a start over (`RunDirectory.open`); "": the run goes on."""
    expected: bool = False
    """Whether somebody asked for settings or a start over: a program without a Session would not see them."""

    def text(self) -> str:
        return json.dumps({name: value for name, value in asdict(self).items() if value}, sort_keys=True)

    @classmethod
    def of(cls, text: str) -> Handed:
        """Raises `UserError` for a text that is not `text()`'s."""
        try:
            values = json.loads(text)
            handed = cls(**{**values, "settings": tuple(values.get("settings", ()))})
        except (ValueError, TypeError, AttributeError):
            handed = None
        if handed is None or not all(
            isinstance(part, str) for part in (handed.run_dir, handed.fresh, *handed.settings)
        ):
            raise UserError(f"{ENV_SESSION} holds {text[:60]!r}: unset it, or give it what `lockstep run` sets")
        return handed

    @classmethod
    def take(cls, env: MutableMapping[str, str]) -> Handed:
        """What the job has handed over. Only the first call gets it: any further Session has its own folder.

        Raises:
            UserError: the variable holds something else.
        """
        text = env.pop(ENV_SESSION, None)
        return cls.of(text) if text is not None else cls()

    def unused(self) -> str:
        """A warning if the program has ended and opened no Session with these settings, else ""."""
        if not self.expected or not self.run_dir or os.path.exists(Path(self.run_dir, RUN_FILE)):
            return ""
        return (
            f"the program opened no Session in {self.run_dir}: the job's overrides and fresh reach a program by its "
            "lockstep.Session alone (docs/own-training.md)"
        )
