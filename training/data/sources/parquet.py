"""`source: parquet`: images in Parquet files as Hugging Face lays them out.

A column of struct<bytes, path> (or of plain bytes) holds image files, another one their labels. Where the files say the
names of the classes, these are used.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from training import extras, files
from training.contract import UserError
from training.data.decoders import Item
from training.data.progress import progress
from training.data.sources.class_folders import shown
from training.data.sources.decoding import Bound, Decoding, Share, decoded_pieces
from training.data.sources.raw import Piece, Stream

_ROWS = 64
"""Of image files in memory at once."""


class Options(Decoding):
    train: str = "data/train-*.parquet"
    """Files of the training images, below `data.root` or absolute: a path, in which `*` stands for any part of a name."""
    test: str | None = None
    """The same for the test images; null: a share of the training images is held out."""
    held_out: Share = 0.1
    """Share of the images that test where there are no test files, chosen by a hash of file name and row."""
    image: str = "image"
    """The column with the image files."""
    label: str = "label"
    """The column with the labels, whole numbers."""


def open_stream(root: Path, options: Options, workers: int) -> Stream:
    """Raises `UserError` where pyarrow is not installed, a file is missing or damaged, or a column is not what is expected."""
    extras.require("pyarrow")
    paths = {"train": _paths(root, options.train), "test": _paths(root, options.test or options.train)}
    counts, classes = {}, None
    for path in dict.fromkeys([*paths["train"], *paths["test"]]):
        counts[path], names = _about(path, options)
        classes = classes or names
    total = sum(counts.values())
    bound = Bound(options.max_broken, total, {})

    def items(split: str) -> Iterator[Item]:
        for path in paths[split]:
            for row, (content, label) in enumerate(_rows(path, options)):
                name = f"{shown(path.name)}:{row}"
                if options.test is None and (_share(name) < options.held_out) != (split == "test"):
                    continue
                if content is None:
                    bound.add(name, "it has no bytes: only images inside the Parquet file are read")
                    continue
                yield Item(content, label, name)

    def pieces(split: str) -> Generator[Piece, None, None]:
        with progress(f"decoding {split} images", sum(counts[path] for path in paths[split])) as one_more:
            yield from decoded_pieces(items(split), options, workers, bound, one_more)

    return Stream(pieces, classes, bound.left_out)


def files_of(root: Path, options: Options) -> list[Path]:
    """The files that there are."""
    return [path for name in (options.train, options.test) if name is not None for path in _matching_files(root, name)]


def _matching_files(root: Path, name: str) -> list[Path]:
    pattern = name if Path(name).is_absolute() else f"{glob.escape(str(root))}/{name}"
    return [Path(path) for path in sorted(glob.glob(pattern))]


def _paths(root: Path, name: str) -> list[Path]:
    if not (paths := _matching_files(root, name)):
        raise UserError(f"no file {root / name}: name the Parquet files in data.options.train and test")
    return paths


def _share(name: str) -> float:
    """In 0 … 1, drawn from file name and row."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A `pyarrow.parquet.ParquetFile`. Raises `UserError` for a damaged one, also while it is read."""
    import pyarrow
    from pyarrow import parquet

    try:
        with files.regular(path) as file, parquet.ParquetFile(file, pre_buffer=False) as opened:
            yield opened
    except (OSError, pyarrow.ArrowException) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise UserError(f"cannot read {path}: {reason[:300]}") from None


def _about(path: Path, options: Options) -> tuple[int, list[str] | None]:
    """(its rows, names of the classes where it has them) of a file whose columns are what is expected."""
    from pyarrow import types

    with _opened(path) as file:
        schema = file.schema_arrow
        for column in (options.image, options.label):
            if schema.get_field_index(column) < 0:
                raise UserError(
                    f"{path} has no column {column!r}, but {', '.join(schema.names[:20])}: name it in data.options"
                )
        image, label = schema.field(options.image).type, schema.field(options.label).type
        content = image.field("bytes").type if types.is_struct(image) and image.get_field_index("bytes") >= 0 else image
        if not (types.is_binary(content) or types.is_large_binary(content)):
            raise UserError(
                f"{path}: column {options.image!r} is {image}, expected struct<bytes, path> or bytes of image files"
            )
        if not types.is_integer(label):
            raise UserError(f"{path}: column {options.label!r} is {label}, expected whole numbers")
        return file.metadata.num_rows, _names(schema.metadata or {}, options.label)


def _names(metadata: dict[bytes, bytes], label: str) -> list[str] | None:
    try:
        names = json.loads(metadata[b"huggingface"])["info"]["features"][label]["names"]
    except (KeyError, ValueError, TypeError, RecursionError):
        return None
    return [str(name) for name in names] if isinstance(names, list) and names else None


def _rows(path: Path, options: Options) -> Iterator[tuple[bytes | None, int]]:
    row = 0
    with _opened(path) as file:
        for batch in file.iter_batches(batch_size=_ROWS, columns=[options.image, options.label]):
            images, labels = batch.column(options.image).to_pylist(), batch.column(options.label).to_pylist()
            for image, label in zip(images, labels):
                if label is None:
                    raise UserError(f"{path} has no label in row {row}: every image needs one")
                yield image["bytes"] if isinstance(image, dict) else image, label
                row += 1
