"""lockstep settings [RECIPE]: lists every setting with its meaning and default. Imports no torch."""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
import typing
from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import BaseModel

from lockstep.training import config as configuration
from lockstep.training.cli import add_set
from lockstep.training.config import settings
from lockstep.training.contract import EXIT_DONE

from . import parser

M = TypeVar("M", bound=BaseModel)


def main(argv: list[str]) -> int:
    """Prints the list. Raises `UserError` for wrong arguments."""
    parsed = parser("settings")
    parsed.add_argument(
        "recipe", nargs="?", help="show the values of this recipe, and mark those that are not the defaults"
    )
    add_set(parsed, "change settings of the recipe, e.g. --set epochs=2 lr=0.1")
    args = parsed.parse_args(argv)
    chosen = settings.flatten(configuration.load(args.recipe, args.assignments)) if args.recipe else {}
    for name, type_name, default, text in documentation(configuration.Config):
        value = chosen.get(name, default)
        note = "" if value == default else f", default {settings.written(default)}"
        print(f"{name} = {settings.written(value)}  ({type_name}{note})\n    {text}")
    return EXIT_DONE


def described(model: type[M]) -> type[M]:
    """Returns the model, whose settings and those of its groups have the text under them as their description.

    The text is read only when it is printed: pydantic's own reading takes a fifth of every command's start.
    """
    texts: dict[str, str] = {}
    for kind in reversed(
        [one for one in model.__mro__ if issubclass(one, settings.Section) and one is not settings.Section]
    ):
        with contextlib.suppress(OSError, TypeError):  # a model that was made at run time has no source
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
            assert isinstance(tree, ast.ClassDef)
            for line, text in zip(tree.body, tree.body[1:]):
                match line, text:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                        texts[name] = inspect.cleandoc(words)
    for name, field in model.model_fields.items():
        field.description = texts.get(name, field.description)
        for inner in models_in(field.annotation):
            described(inner)
    model.model_rebuild(force=True)
    return model


def models_in(hint: Any) -> Iterator[type[BaseModel]]:
    """Yields the models that a field may hold, also within a list or as an alternative to null."""
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        yield hint
    for part in typing.get_args(hint):
        yield from models_in(part)


def documentation(model: type[BaseModel]) -> Iterator[tuple[str, str, Any, str]]:
    """Yields (dotted name, type, default, docstring) of each setting."""
    for name, field in settings.leaves(described(model)):
        default = field.get_default(call_default_factory=True)
        yield name, settings.type_name(field.annotation), default, " ".join((field.description or "").split())


def json_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Returns the JSON Schema of a YAML file that holds a `model`, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **described(model).model_json_schema()}
