"""What a set of shards holds, for people: counts of each class, shape, mean and deviation, and some images on one sheet."""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
import torch

from lockstep.training.config import Data
from lockstep.training.data.shards import Manifest, Samples

SHEET = "contact-sheet.png"
_CLASSES, _EACH = 20, 10
_SIDE, _GAP, _NAMES = 64, 4, 120
"""Pixels of an image's longer side, between two, and for the classes' names."""


def described(manifest: Manifest, data: Data) -> Iterator[str]:
    """Lines about shards, and about how a recipe's normalisation fits them."""
    files = sum(len(part) for part in manifest.splits.values())
    samples_name = "images" if len(manifest.shape) == 3 else "samples"
    yield (
        f"{manifest.directory}: {manifest.source}, {manifest.count('train')} training and {manifest.count('test')} test "
        f"{samples_name} in {files} files, sha256 {manifest.checksum[:12]}…"
    )
    layout = "uint8 [height, width, channels]" if len(manifest.shape) == 3 else "float32 [features]"
    yield f"each {list(manifest.shape)}, {layout}"
    if manifest.num_left_out:
        yield manifest.left_out_message()
    counts = {
        split: np.bincount(_labels(manifest, split), minlength=len(manifest.classes)) for split in manifest.splits
    }
    width = max(5, *map(len, manifest.classes))
    yield f"{'class':{width}} {'train':>9} {'test':>9}"
    for number, name in enumerate(manifest.classes):
        yield f"{name:{width}} {counts['train'][number]:9d} {counts['test'][number]:9d}"
    if manifest.mean is not None:
        yield manifest.statistics(data)


def contact_sheet(manifest: Manifest) -> bytes | None:
    """A PNG with the first training images of each of the first classes, a row for a class; None if the samples are feature vectors."""
    if len(manifest.shape) != 3:
        return None
    from PIL import Image, ImageDraw

    samples = Samples.open(manifest, "train", 0, manifest.count("train"), verify=False)
    labels = _labels(manifest, "train")
    height, width, channels = manifest.shape
    scale = _SIDE / max(height, width)
    tall, wide = max(round(height * scale), 1), max(round(width * scale), 1)
    shown = manifest.classes[:_CLASSES]
    sheet = Image.new("RGB", (_NAMES + _EACH * (wide + _GAP), len(shown) * (tall + _GAP) + _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for row, name in enumerate(shown):
        top = _GAP + row * (tall + _GAP)
        draw.text((_GAP, top), name.encode("ascii", "replace").decode()[:18], "black")  # the font has no other letters
        ids = torch.from_numpy(np.flatnonzero(labels == row)[:_EACH])
        for column, image in enumerate(samples.take(ids)[0].numpy()):
            picture = Image.fromarray(image[..., :3] if channels >= 3 else image[..., 0])
            method = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BILINEAR
            sheet.paste(picture.resize((wide, tall), method), (_NAMES + column * (wide + _GAP), top))
    file = io.BytesIO()
    sheet.save(file, "PNG")
    return file.getvalue()


def _labels(manifest: Manifest, split: str) -> np.ndarray:
    samples = Samples.open(manifest, split, 0, manifest.count(split), verify=False)
    return torch.cat(samples.labels).numpy()
