"""Where samples come from. A source of ours is one function → Raw, and one row in `SOURCES`; of one that reads files, (root,
download, **options), and a row in `FILES`; of one that generates its samples, (**options).

What reads a user's own data (`OWN`) has settings of its own (`data.options`) and gives a `Stream`: its samples need not
fit into the memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

import filelock
import torch
from torch.utils.data import Dataset

from ...config import Data, settings
from ...contract import UserError
from ...imported import check_options
from . import arrays, builtin, function, images
from .raw import Raw, Stream

SOURCES: dict[str, Callable[..., Raw]] = {
    "digits": builtin.digits, "synthetic": builtin.synthetic, "classification": builtin.classification,
    "cifar10": builtin.cifar10, "fashion_mnist": builtin.fashion_mnist,
}  # fmt: skip
OWN: dict[str, Any] = {"images": images, "arrays": arrays}
"""Each a module with `Options`, a section; `open_stream(root, options, workers)` → Stream; `files_of(root, options)` → paths."""
FILES: dict[str, Callable[[Path], list[Path]]] = {
    "cifar10": builtin.cifar10_files, "fashion_mnist": builtin.fashion_mnist_files,
}  # fmt: skip
"""The files that a source of ours reads. The other ones are generated, and need no folder."""
Stamps: TypeAlias = list[Any]
"""[number of a source's files, their bytes, a hash of each one's name, size and time]. If it changes, the shards are made again."""


def ours(name: str) -> bool:
    """Whether reading this source runs no code beyond this package."""
    return name in SOURCES or name in OWN


def needs_root(name: str) -> bool:
    return name in FILES or name in OWN


def code_of(name: str) -> list[str]:
    """A hash of the code of a user's own source; empty for a built-in source. Raises `UserError`."""
    return [] if ours(name) else [function.code_of(name)]


def stream(data: Data) -> Stream:
    """The config's source in pieces, both splits as they are.

    Raises:
        UserError: an unknown option, or data that is missing or corrupt; while the pieces are read, too.
    """
    name, root, options = data.source, Path(data.root), data.options
    if name in OWN:
        opened: Stream = OWN[name].open_stream(root, _options(name, options), data.workers)
        return opened
    if name not in SOURCES:
        return function.open_stream(name, root, options)
    source, given = SOURCES[name], {"root": root, "download": data.download} if name in FILES else {}
    check_options(options, source, f"data.options: {name}", given)
    for option, value in options.items():
        expected = type(inspect.signature(source).parameters[option].default)
        if not isinstance(value, expected) and not (expected is float and type(value) is int):
            raise UserError(f"data.options.{option} must be {expected.__name__}, got {value!r}")
    try:
        return source(**given, **options).stream()
    except PermissionError as error:
        raise UserError(f"cannot read {error.filename} as user {os.getuid()}: {error.strerror}") from None


def load(name: str, root: Path, download: bool, options: dict[str, Any]) -> Raw:
    """The named source, in memory. Raises `UserError` for an unknown option, and for data that is missing or corrupt."""
    return stream(Data(source=name, root=str(root), download=download, options=options)).gathered()


def _options(name: str, options: dict[str, Any]) -> Any:
    return settings.build(OWN[name].Options, options, f"source {name}", "data.options.")


def stamps(name: str, root: Path, options: dict[str, Any]) -> Stamps:
    """Those of the source's files as they are; empty if it is generated, or if the files are gone."""
    paths: list[Path] = FILES[name](root) if name in FILES else []
    if name in OWN:
        paths = OWN[name].files_of(root, _options(name, options))
    entries = []
    for path in paths:
        with contextlib.suppress(OSError):  # of a broken link: reading it raises the error
            about = path.stat()
            entries.append((os.path.relpath(path, root), about.st_size, about.st_mtime_ns))
    if not entries:
        return []
    digest = hashlib.sha256(repr(sorted(entries)).encode("utf-8", "backslashreplace"))
    return [len(entries), sum(size for _, size, _ in entries), digest.hexdigest()]


class SourceDataset(Dataset[tuple[Any, int]]):
    """(sample, label) of a source by its name: `SourceDataset("cifar10", "train", "data", download=True)`.

    A sample is a float32 image [c, h, w] in 0 … 1, or a float32 feature vector [f], after `transform`. `classes` are the
    names of the labels. Where several processes of a node begin at once, one of them downloads.

    Args:
        source: a value of `data.source`, e.g. `digits`, `cifar10`, `images` or `package.module:function`, which is called.
        root: folder of the data, of the sources that need one.
        options: of the source, e.g. `{"n": 100}`.
        transform: is called with each sample.

    Raises:
        UserError: there is no such source, or its data is missing or damaged.
    """

    def __init__(
        self, source: str, split: Literal["train", "test"] = "train", root: Path | str = "data", download: bool = False,
        options: dict[str, Any] | None = None, transform: Callable[[torch.Tensor], Any] | None = None,
    ) -> None:  # fmt: skip
        if not ours(source) and ":" not in source:
            raise UserError(f"unknown source {source!r}{settings.nearest(source, [*SOURCES, *OWN])}")
        raw = _load_once(source, Path(root), download, options or {})
        samples, labels = raw.train if split == "train" else raw.test
        self.samples, self.labels = torch.as_tensor(samples), torch.as_tensor(labels)
        self.classes, self.transform = raw.classes, transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        sample = self.samples[index]
        if sample.ndim == 3:
            sample = sample.permute(2, 0, 1).float() / 255
        return (self.transform(sample) if self.transform else sample), int(self.labels[index])


def _load_once(name: str, root: Path, download: bool, options: dict[str, Any]) -> Raw:
    """`load` for every process of a node at once: one of them downloads while the others wait. Raises `UserError`."""
    try:
        return load(name, root, False, options)
    except UserError:
        if not download or name not in FILES:
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
