"""`source: package.module:function`: a user's own function, which is imported and called.

    def samples(split: str, root: Path, n: int = 1000):      # `root` is data.root, n is data.options.n
        for part in …:
            yield images, labels                             # or returns them

    CLASSES = ["cat", "dog"]                                 # in the same module, where the classes have names

`split` is `train` or `test`. Pieces are as a shard needs them: uint8 images [n, h, w, c] or float vectors [n, f] with whole
numbers [n]. It runs where its user names it in a recipe, and nowhere without.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.training import files
from lockstep.training.config import settings
from lockstep.training.contract import UserError
from lockstep.training.data.sources.raw import Piece, Stream, rows_of_a_piece

_MOST_BYTES = 64 << 20


def open_stream(name: str, root: Path, options: dict[str, Any]) -> Stream:
    """Imports the function; reading the stream calls it, once for each split.

    Raises:
        UserError: there is no such function, it takes no `split`, or not these options; while it is read, for a piece
            that is not one. What the function itself raises goes through.
    """
    function, module = _function(name)
    known = inspect.signature(function).parameters
    free = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    for option in options:
        if option in ("split", "root") or (option not in known and not free):
            raise UserError(
                f"data.options: {name} has no option {option!r}{settings.nearest(option, set(known) - {'split', 'root'})}"
            )
    arguments = {**options, **({"root": root} if "root" in known else {})}
    try:
        inspect.signature(function).bind(split="train", **arguments)
    except TypeError as error:
        raise UserError(f"data.options: {name} cannot be called with them: {error}") from None
    classes = getattr(module, "CLASSES", None)
    if classes is not None and not (
        isinstance(classes, (list, tuple)) and all(isinstance(class_name, str) for class_name in classes)
    ):
        raise UserError(f"{name.partition(':')[0]}.CLASSES is {settings.shown(classes)}, expected a list of names")

    def pieces(split: str) -> Generator[Piece, None, None]:
        result = function(split=split, **arguments)
        if not isinstance(result, tuple) and not isinstance(result, Iterable):
            raise UserError(f"{name} gives a {type(result).__name__}, expected (samples, labels), or pieces of them")
        for number, piece in enumerate([result] if isinstance(result, tuple) else result):
            if not (isinstance(piece, tuple) and len(piece) == 2):
                raise UserError(f"{name}: piece {number} is a {type(piece).__name__}, expected (samples, labels)")
            yield from _cut(*piece)

    return Stream(pieces, list(classes) if classes is not None else None)


def _cut(samples: Any, labels: Any) -> Generator[Piece, None, None]:
    """Cuts a large piece into several. The caller checks the pieces."""
    if not (
        isinstance(samples, np.ndarray)
        and isinstance(labels, np.ndarray)
        and samples.ndim
        and samples.shape[:1] == labels.shape
    ):
        yield samples, labels
        return
    rows = rows_of_a_piece(samples[:1].nbytes)
    for low in range(0, len(labels), rows):
        yield samples[low : low + rows], labels[low : low + rows]


def code_of(name: str) -> str:
    """sha256 of the file of the function's module: other code makes other shards. (Of what it imports nothing is known.)

    Imports the packages that the module lies in, and not the module. Raises `UserError` where it cannot be found.
    """
    module = name.partition(":")[0]
    _add_working_directory()
    try:
        spec = importlib.util.find_spec(module)
        origin = spec.origin if spec is not None else None
        if origin is None or not Path(origin).is_file():
            raise UserError(
                f"cannot find the module of the source {name}: put it where Python looks, or start in its folder"
            )
        return hashlib.sha256(files.read(Path(origin), _MOST_BYTES)).hexdigest()
    except (ImportError, ValueError, OSError) as error:
        raise UserError(f"cannot find the module of the source {name}: {error}") from None


def _function(name: str) -> tuple[Callable[..., Any], Any]:
    module_name, _, function_name = name.partition(":")
    _add_working_directory()
    try:
        module = importlib.import_module(module_name)
        function = getattr(module, function_name)
    except (ImportError, AttributeError, ValueError, TypeError, OSError) as error:
        raise UserError(f"cannot import the source {name}: {error}") from None
    if not inspect.isfunction(function) or "split" not in inspect.signature(function).parameters:
        raise UserError(f"the source {name} is not a function with a parameter `split`")
    if function.__module__ != module_name:
        raise UserError(
            f"the source {name} is defined in {function.__module__}: name it there, so that changes of its code are noticed"
        )
    return function, module


def _add_working_directory() -> None:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # `-m lockstep.training` has it, a console script has not
