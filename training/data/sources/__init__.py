"""Where samples come from. A source is one function (root, download, options) → Raw, and one row in `SOURCES`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock

from training.config import settings
from training.contract import UserError
from training.data.sources.cifar10 import cifar10
from training.data.sources.cifar10 import files_of as cifar10_files
from training.data.sources.fashion_mnist import fashion_mnist
from training.data.sources.fashion_mnist import files_of as fashion_mnist_files
from training.data.sources.generated import classification, digits, synthetic
from training.data.sources.raw import Raw

__all__ = ["FILES", "GENERATED", "SOURCES", "Raw", "load", "load_once"]

SOURCES: dict[str, Callable[..., Raw]] = {
    "digits": digits, "synthetic": synthetic, "classification": classification,
    "cifar10": cifar10, "fashion_mnist": fashion_mnist,
}  # fmt: skip

FILES: dict[str, Callable[[Path], list[Path]]] = {
    "cifar10": cifar10_files, "fashion_mnist": fashion_mnist_files,
}  # fmt: skip
"""The files that a source reads, where it reads some."""
GENERATED = frozenset({"digits", "synthetic", "classification"})
"""Sources that need no folder of their own."""


def load(name: str, root: Path, download: bool, options: dict[str, Any], split: str = "honest") -> Raw:
    """The named source. With `split` "exercise", the first tenth of all its samples is both what trains and what tests.

    Raises `UserError` for an unknown option, and for data that is missing or corrupt.
    """
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
        raw = source(root, download, **options)
    except PermissionError as error:
        raise UserError(
            f"cannot read {error.filename}: {error.strerror}; give this user (id {os.getuid()}) the right to"
        ) from None
    if split == "honest":
        return raw
    (samples, labels), tenth = raw.train, max((len(raw.train[1]) + len(raw.test[1])) // 10, 1)
    return Raw((samples[:tenth], labels[:tenth]), (samples[:tenth], labels[:tenth]), raw.classes)


def load_once(name: str, root: Path, download: bool, options: dict[str, Any]) -> Raw:
    """`load` for every process of a node at once: one of them downloads while the others wait. Raises `UserError`."""
    if name not in SOURCES:
        raise UserError(f"unknown source {name!r}{settings.nearest(name, SOURCES)}")
    try:
        return load(name, root, False, options)
    except UserError:
        if not download or name in GENERATED:
            raise
    try:
        root.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(root / f".{name}.lock", timeout=1800):
            return load(name, root, True, options)
    except filelock.Timeout:
        raise UserError(f"another process has downloaded {name} to {root} for half an hour: see what it does") from None
    except OSError as error:
        raise UserError(f"cannot download {name} to {root}: {error.strerror}") from None
