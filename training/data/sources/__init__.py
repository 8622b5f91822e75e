"""The sources of samples. A built-in source is one function → Raw, and one row in `SOURCES`. A source that reads files takes (root,
**options), and has a row in `FILES`. A source that generates its samples takes (**options).

`images` and a user's own function return a `Stream`: their samples need not fit into memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import ValidationError, validate_call

from ...config import Data, settings
from ...contract import UserError
from . import builtin, function, images
from .raw import Raw, Stream

SOURCES: dict[str, Callable[..., Raw]] = {
    "digits": builtin.digits, "synthetic": builtin.synthetic, "classification": builtin.classification,
    "cifar10": builtin.cifar10, "fashion_mnist": builtin.fashion_mnist,
}  # fmt: skip
FILES = {"cifar10": ("cifar-10-batches-bin", "cifar-10-batches-py"), "fashion_mnist": ("FashionMNIST/raw",)}
"""Name of a built-in source → the folders of its files, below `data.root`. The other sources are generated."""
Stamps: TypeAlias = list[Any]
"""[number of a source's files, their bytes, a hash of each one's name, size and time]: a part of the name of the shards' folder."""


def ours(name: str) -> bool:
    """Returns whether this source runs only code of this package."""
    return ":" not in name


def code_of(name: str) -> list[str]:
    """Returns a hash of the code of a user's own source; [] for a built-in source. Raises `UserError`."""
    return [] if ours(name) else [function.code_of(name)]


def stream(data: Data) -> Stream:
    """Returns the config's source in pieces, with both splits of the source.

    With `split` "exercise" both are the first tenth of all samples, which are in memory.

    Raises:
        UserError: an unknown option, or data that is missing or corrupt; while the pieces are read, too.
    """
    if data.split == "exercise":
        return stream(data.model_copy(update={"split": "honest"})).gathered().exercise().stream()
    name, root, options = data.source, Path(data.root), data.options
    if name == "images":
        return images.open_stream(root, _options(options), data.workers)
    if name not in SOURCES:
        return function.open_stream(name, root, options)
    source, given = SOURCES[name], {"root": root} if name in FILES else {}
    if given.keys() & options:
        raise UserError(f"data.options.root of {name} is none of its options: set data.root")
    try:
        raw: Raw = validate_call(config={"strict": True})(source)(**given, **options)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"data.options.{first['loc'][0]} of {name}: {first['msg']}, got {first['input']!r}") from None
    return raw.stream()


def load(name: str, root: Path, options: dict[str, Any]) -> Raw:
    """Returns the named source in memory. Raises `UserError` for an unknown option, and for missing or corrupt data."""
    return stream(Data(source=name, root=str(root), options=options)).gathered()


def _options(options: dict[str, Any]) -> images.Options:
    return settings.build(images.Options, options, "source images", "data.options.")


def stamps(data: Data) -> Stamps:
    """Returns the stamps of the source's current files; [] if it is generated, or if the files are gone."""
    name, root, options = data.source, Path(data.root), data.options
    paths = [path for folder in FILES.get(name, ()) for path in (root / folder).glob("*")]
    if name == "images":
        paths = images.files_of(root, _options(options))
    entries = []
    for path in paths:
        with contextlib.suppress(OSError):  # of a broken link: reading it raises the error
            about = path.stat()
            entries.append((os.path.relpath(path, root), about.st_size, about.st_mtime_ns))
    if not entries:
        return []
    digest = hashlib.sha256(repr(sorted(entries)).encode("utf-8", "backslashreplace"))
    return [len(entries), sum(size for _, size, _ in entries), digest.hexdigest()]
