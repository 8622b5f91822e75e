"""Imports a user's network, strategy or source by its path `package.module:name`, and checks the options before the call."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any

from ..contract import UserError
from . import settings


def imported(name: str, kind: str) -> Any:
    """Returns the object of that name, from the working directory or an installed package.

    Raises:
        UserError: the import fails. `kind` describes the object in the message.
    """
    module, _, member = name.partition(":")
    add_working_directory()
    try:
        return getattr(importlib.import_module(module), member)
    except (ImportError, AttributeError, ValueError, TypeError, OSError, RuntimeError) as error:
        raise UserError(f"cannot import {kind} {name}: {error}") from None


def add_working_directory() -> None:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # `-m lockstep.training` has it, a console script has not


def check_options(options: Iterable[str], function: Callable[..., Any], name: str, given: Collection[str] = ()) -> None:
    """Raises `UserError` for an option that is no parameter of the function, or one of those that it is `given`."""
    parameters = inspect.signature(function).parameters
    free = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for option in options:
        if option in given or (option not in parameters and not free):
            raise UserError(f"{name} has no option {option!r}{settings.nearest(option, set(parameters) - set(given))}")
