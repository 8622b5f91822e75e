"""The settings of a loop of one's own: the script's, and above them those of the command line and of the job."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.training.config import OwnSettings, settings
from lockstep.training.contract import UserError


def own_settings(
    script: str, config: Mapping[str, Any], given: Mapping[str, Any], overrides: Sequence[str]
) -> OwnSettings:
    """`given` by name, then `overrides` as NAME=VALUE; `config.NAME=VALUE` changes one of the script's own.

    Raises:
        UserError: an unknown setting, or a value of another type than the script's own.
    """
    values = copy.deepcopy({**given, "script": script, "config": dict(config)})
    if isinstance(values.get("sync"), str):
        values["sync"] = {"name": values["sync"]}
    for name, value in settings.assignments(OwnSettings, overrides):
        settings.put(values, name.split("."), _like(config, name, value) if name.startswith("config") else value)
    return settings.build(OwnSettings, values, "Session")


def check_overrides(overrides: Sequence[str]) -> None:
    """The part that is known without the script: names, and values of ours. Raises `UserError`."""
    values = settings.override({"script": "program"}, OwnSettings, overrides)
    settings.build(OwnSettings, values, "overrides")


def _like(config: Mapping[str, Any], name: str, value: Any) -> Any:
    """`value`, where the script has a setting of this name and type. Raises `UserError`."""
    known = settings.dotted(config)
    own = name.removeprefix("config.")
    if own not in known:
        hint = settings.nearest(own, known) if known else ": its Session is given no config"
        raise UserError(f"--set {name}: the script has no setting {own!r} in config{hint}")
    before = list(known[own]) if isinstance(known[own], tuple) else known[own]
    if type(before) is float and type(value) is int:
        return float(value)
    if before is not None and type(value) is not type(before):
        raise UserError(f"--set {name}: expected {_kind(before)} like the script's {before!r}, got {value!r}")
    return value


def _kind(value: Any) -> str:
    kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", list: "a list"}
    return kinds.get(type(value), "a value")
