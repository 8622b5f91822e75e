"""`source: images`: a user's own images in class folders, decoded by several processes."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

from lockstep.training.contract import UserError
from lockstep.training.data.decoders import Item
from lockstep.training.data.progress import progress
from lockstep.training.data.sources.class_folders import listed, shown
from lockstep.training.data.sources.decoding import Bound, Decoding, Share, decoded_pieces
from lockstep.training.data.sources.raw import Piece, Stream


class Options(Decoding):
    train: str = "train"
    """Folder with one folder for each class, below `data.root` or absolute."""
    test: str | None = None
    """The same for the test images; null: a share of the training images is held out."""
    held_out: Share = 0.1
    """Share of the images that test where there is no test folder, chosen by a hash of each one's relative name."""


def open_stream(root: Path, options: Options, workers: int) -> Stream:
    """Raises `UserError` where the folders are not what is expected; while it is read, for too many broken files."""
    folder = _folder(root, options.train)
    training = listed(folder)
    total = len(training.entries) + len(training.refused)
    refused = dict(training.refused)
    folders = {"train": training.folder, "test": training.folder}
    if options.test is None:
        splits = {
            "train": [entry for entry in training.entries if entry.share >= options.held_out],
            "test": [entry for entry in training.entries if entry.share < options.held_out],
        }
        if not splits["test"] or not splits["train"]:
            raise UserError(
                f"{folder}: held_out={options.held_out} of {total} images leaves none for "
                f"{'testing' if splits['train'] else 'training'}: change data.options.held_out, or name a folder in data.options.test"
            )
    else:
        other = _folder(root, options.test)
        testing = listed(other, training.classes)
        splits = {"train": training.entries, "test": testing.entries}
        folders["test"] = testing.folder
        total += len(testing.entries) + len(testing.refused)
        refused |= {f"{options.test}/{name}": reason for name, reason in testing.refused.items()}
    bound = Bound(options.max_broken, total, refused)

    def pieces(split: str) -> Generator[Piece, None, None]:
        entries = splits[split]
        prefix = f"{options.test}/" if split == "test" and options.test is not None else ""
        with progress(f"decoding {split} images", len(entries)) as one_more:
            items = (
                Item(entry.path, entry.label, shown(prefix + entry.name), entry.expected_format, folders[split])
                for entry in entries
            )
            yield from decoded_pieces(items, options, workers, bound, one_more)

    return Stream(pieces, training.classes, bound.left_out)


def files_of(root: Path, options: Options) -> list[Path]:
    """The images, or none where the folders are not there."""
    paths: list[Path] = []
    for name in (options.train, options.test):
        if name is not None:
            try:
                paths += [entry.path for entry in listed(_folder(root, name)).entries]
            except UserError:
                continue
    return paths


def _folder(root: Path, name: str) -> Path:
    """Raises `UserError` for a folder that the shards would be written into."""
    folder = root / name
    if (root / "shards").resolve().is_relative_to(folder.resolve()):
        raise UserError(
            f"{folder} is the folder where shards are cached (data.root={root}): set data.root to its parent folder"
        )
    return folder
