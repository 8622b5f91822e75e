"""Where samples come from. A source of ours is one function (root, download, options) → Raw, and one row in `SOURCES`.

What reads a user's own data (`OWN`) has settings of its own (`data.options`) and gives a `Stream`: its samples need not
fit into the memory.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import filelock

from lockstep.training.config import Data, settings
from lockstep.training.contract import UserError
from lockstep.training.data.sources import arrays, function, images
from lockstep.training.data.sources.cifar10 import cifar10
from lockstep.training.data.sources.cifar10 import files_of as cifar10_files
from lockstep.training.data.sources.fashion_mnist import fashion_mnist
from lockstep.training.data.sources.fashion_mnist import files_of as fashion_mnist_files
from lockstep.training.data.sources.generated import classification, digits, synthetic
from lockstep.training.data.sources.raw import Piece, Raw, Stream, numbered

__all__ = [
    "GENERATED", "OWN", "SOURCES", "Piece", "Raw", "Stamps", "Stream", "code_of", "load", "load_once", "needs_root", "numbered",
    "ours", "stamps", "stream",
]  # fmt: skip

SOURCES: dict[str, Callable[..., Raw]] = {
    "digits": digits, "synthetic": synthetic, "classification": classification,
    "cifar10": cifar10, "fashion_mnist": fashion_mnist,
}  # fmt: skip
OWN: dict[str, Any] = {"images": images, "arrays": arrays}
"""Each a module with `Options`, a section; `open_stream(root, options, workers)` → Stream; `files_of(root, options)` → paths."""
FILES: dict[str, Callable[[Path], list[Path]]] = {
    "cifar10": cifar10_files, "fashion_mnist": fashion_mnist_files,
}  # fmt: skip
"""The files that a source of ours reads, where it reads some."""
GENERATED = frozenset({"digits", "synthetic", "classification"})
"""Sources that need no folder of their own."""
Stamps: TypeAlias = dict[str, list[Any]]
"""Size and time of a source's files. If they change, the shards are made again."""
_MOST_STAMPS = 64


def ours(name: str) -> bool:
    """Whether reading this source runs no code beyond this package."""
    return name in SOURCES or name in OWN


def needs_root(name: str) -> bool:
    return name not in GENERATED and ours(name)


def code_of(name: str) -> list[str]:
    """A hash of the code of a user's own source; empty for a built-in source. Raises `UserError`."""
    return [] if ours(name) else [function.code_of(name)]


def stream(data: Data) -> Stream:
    """The config's source in pieces, both splits as they are.

    Raises:
        UserError: an unknown option, or data that is missing or corrupt; while the pieces are read, too.
    """
    root = Path(data.root)
    if data.source in OWN:
        module = OWN[data.source]
        return module.open_stream(root, _options(data.source, data.options), data.workers)
    if not ours(data.source):
        return function.open_stream(data.source, root, data.options)
    return load(data.source, root, data.download, data.options).stream()


def _options(name: str, options: dict[str, Any]) -> Any:
    return settings.build(OWN[name].Options, options, f"source {name}", "data.options.")


def stamps(name: str, root: Path, options: dict[str, Any]) -> Stamps:
    """Name → [size, mtime in ns] of each of the source's files, or one entry for all of many.

    Empty if the source is generated, or if the files are gone.
    """
    paths: list[Path] = FILES[name](root) if name in FILES else []
    if name in OWN:
        paths = OWN[name].files_of(root, _options(name, options))
    entries: Stamps = {}
    for path in paths:
        try:
            about = path.stat()
        except OSError:  # a broken link: reading it raises the error
            continue
        entries[os.path.relpath(path, root)] = [about.st_size, about.st_mtime_ns]
    if len(entries) <= _MOST_STAMPS:
        return entries
    digest = hashlib.sha256(repr(sorted(entries.items())).encode("utf-8", "backslashreplace"))
    return {f"{len(entries)} files": [sum(size for size, _ in entries.values()), digest.hexdigest()]}


def load(name: str, root: Path, download: bool, options: dict[str, Any], split: str = "honest") -> Raw:
    """The named source, in memory. With `split` "exercise", the first tenth of all its samples is both what trains and what tests.

    Raises `UserError` for an unknown option, and for data that is missing or corrupt.
    """
    if name not in SOURCES:
        raw = stream(Data(source=name, root=str(root), download=download, options=options)).gathered()
    else:
        raw = _load_ours(name, root, download, options)
    if split == "honest":
        return raw
    (samples, labels), tenth = raw.train, max((len(raw.train[1]) + len(raw.test[1])) // 10, 1)
    return Raw((samples[:tenth], labels[:tenth]), (samples[:tenth], labels[:tenth]), raw.classes)


def _load_ours(name: str, root: Path, download: bool, options: dict[str, Any]) -> Raw:
    source = SOURCES[name]
    known = {
        parameter.name: parameter
        for parameter in list(inspect.signature(source).parameters.values())[2:]
    }  # fmt: skip
    for option, value in options.items():
        if option not in known:
            raise UserError(f"data.options: {name} has no option {option!r}{settings.nearest(option, known)}")
        expected = type(known[option].default)
        if not isinstance(value, expected) and not (expected is float and type(value) is int):
            raise UserError(f"data.options.{option} must be {expected.__name__}, got {value!r}")
    try:
        return source(root, download, **options)
    except PermissionError as error:
        raise UserError(
            f"cannot read {error.filename}: {error.strerror}; give this user (id {os.getuid()}) permission to read it"
        ) from None


def load_once(name: str, root: Path, download: bool, options: dict[str, Any]) -> Raw:
    """`load` for every process of a node at once: one of them downloads while the others wait. Raises `UserError`."""
    if name not in SOURCES and name not in OWN and ":" not in name:
        raise UserError(f"unknown source {name!r}{settings.nearest(name, [*SOURCES, *OWN])}")
    try:
        return load(name, root, False, options)
    except UserError:
        if not download or name in GENERATED or name not in SOURCES:
            raise
    try:
        root.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(root / f".{name}.lock", timeout=1800):
            return load(name, root, True, options)
    except filelock.Timeout:
        raise UserError(
            f"another process has downloaded {name} to {root} for half an hour: check that process"
        ) from None
    except OSError as error:
        raise UserError(f"cannot download {name} to {root}: {error.strerror}") from None
