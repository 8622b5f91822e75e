"""Modules of the product, imported at first use: the tests of job dispatch need no torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Inside:
    """The module `lockstep.NAME`. Setting an attribute sets it on the module."""

    def __init__(self, name: str) -> None:
        vars(self)["name"] = f"lockstep.{name}"

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self.name), attribute)

    def __setattr__(self, attribute: str, value: Any) -> None:
        setattr(import_module(self.name), attribute, value)
