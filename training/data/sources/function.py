"""`source: package.module:function`: a user's own function, which is imported and called.

    def samples(split: str, root: Path, n: int = 1000):      # `root` is data.root, n is data.options.n
        for part in …:
            yield images, labels                             # or returns them.

    CLASSES = ["cat", "dog"]                                 # in the same module, if the classes have names.

`split` is `train` or `test`. Pieces are as a shard needs them: uint8 images [n, h, w, c] or float vectors [n, f] with whole
numbers [n]. It runs where its user names it in a recipe, and nowhere without.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
from collections.abc import Generator
from pathlib import Path
from typing import Any

from ... import files
from ...config import settings
from ...config.settings import add_working_directory, imported
from ...contract import UserError
from .raw import Piece, Stream

_MAX_BYTES = 64 << 20


def open_stream(name: str, root: Path, options: dict[str, Any]) -> Stream:
    """Imports the function; reading the stream calls it, once for each split.

    Raises:
        UserError: there is no such function, it takes no `split`, or not these options. While the stream is read: a piece is
            invalid. Errors of the function itself are not caught.
    """
    function = imported(name, "the source")
    if not inspect.isfunction(function) or function.__module__ != name.partition(":")[0]:
        raise UserError(f"the source {name} is not a function of that module, whose changes would be noticed")
    signature = inspect.signature(function)
    given = {"root": root} if "root" in signature.parameters else {}
    try:
        signature.bind(split="train", **given, **options)
    except TypeError as error:
        raise UserError(f"the source {name} cannot be called with `split` and data.options: {error}") from None
    classes = function.__globals__.get("CLASSES")
    if classes is not None and not (
        isinstance(classes, (list, tuple)) and all(isinstance(class_name, str) for class_name in classes)
    ):
        raise UserError(f"{function.__module__}.CLASSES is {settings.shown(classes)}, expected a list of names")

    def pieces(split: str) -> Generator[Piece, None, None]:
        try:
            result = function(split=split, **given, **options)
            for number, piece in enumerate([result] if isinstance(result, tuple) else result):
                if not (isinstance(piece, tuple) and len(piece) == 2):
                    raise UserError(f"{name}: piece {number} is a {type(piece).__name__}, expected (samples, labels)")
                yield piece
        except OSError as error:  # not one of the disk that shards are written to
            raise UserError(f"the source {name} failed: {error}") from error

    return Stream(pieces, list(classes) if classes is not None else None)


def code_of(name: str) -> str:
    """Returns the sha256 of the file of the function's module: other code makes other shards. (Its imports are not covered.)

    Imports the packages that the module lies in, and not the module. Raises `UserError` if it does not exist.
    """
    module = name.partition(":")[0]
    add_working_directory()
    try:
        spec = importlib.util.find_spec(module)
        origin = spec.origin if spec is not None else None
        if origin is None or not Path(origin).is_file():
            raise UserError(
                f"cannot find the module of the source {name}: put it where Python looks, or start in its folder"
            )
        return hashlib.sha256(files.read(Path(origin), _MAX_BYTES)).hexdigest()
    except (ImportError, ValueError, OSError) as error:
        raise UserError(f"cannot find the module of the source {name}: {error}") from None
