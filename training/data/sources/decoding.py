"""Image files become pieces of a split; those that are broken are named and counted, up to a bound."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, Field

from lockstep.training.config.settings import Section
from lockstep.training.config.types import Items, Number
from lockstep.training.contract import UserError
from lockstep.training.data.decoders import Decoders, Item
from lockstep.training.data.sources.raw import Piece, rows_of_a_piece

MOST_SIDE = 4096


def _size(value: int | list[int]) -> list[int]:
    sides = value if isinstance(value, list) else [value, value]
    if len(sides) != 2 or not all(1 <= side <= MOST_SIDE for side in sides):
        raise ValueError(f"must be a number of pixels, or [height, width], of 1 … {MOST_SIDE}, got {value}")
    return sides


Size = Annotated[int | Items[int], AfterValidator(_size)]
Share = Annotated[Number, Field(ge=0, lt=1)]


class Decoding(Section):
    """What is done to image files."""

    size: Size = Field(default=32, validate_default=True)
    """Pixels that an image is scaled to, by its shorter side, and then cut to at its centre: a number, or `[height, width]`."""
    max_broken: Share = 0.01
    """Share of the files that may be broken; they are named and left out. Above it, the data is refused."""


class Bound:
    """Counts the files that cannot be used.

    Raises:
        UserError: they are more than a share of all.
    """

    def __init__(self, share: float, total: int, left_out: dict[str, str]) -> None:
        self.share, self.total, self.left_out = share, total, left_out
        self._look()

    def add(self, name: str, reason: str) -> None:
        self.left_out[name] = reason
        self._look()

    def _look(self) -> None:
        if len(self.left_out) > self.share * self.total:
            first = [f"{name} ({reason})" for name, reason in list(self.left_out.items())[:5]]
            raise UserError(
                f"{len(self.left_out)} of {self.total} image files cannot be used, and data.options.max_broken={self.share:g} "
                f"allows {int(self.share * self.total)}: {', '.join(first)}{' …' if len(self.left_out) > 5 else ''}"
            )


def decoded_pieces(
    items: Iterable[Item], options: Decoding, workers: int, bound: Bound, one_more: Callable[[], None]
) -> Generator[Piece, None, None]:
    """The images in their order, without those that are broken.

    Args:
        one_more: called for each image, broken or not.

    Raises:
        UserError: too many are broken.
    """
    height, width = options.size  # type: ignore[misc]
    most = rows_of_a_piece(height * width * 3)
    with Decoders(height, width, workers) as decoders:
        pixels, labels = bytearray(), []
        for item, result in decoders.decode(items):
            one_more()
            if isinstance(result, str):
                bound.add(item.name, result)
                continue
            pixels += result
            labels.append(item.label)
            if len(labels) == most:
                yield _piece(pixels, labels, height, width)
                pixels, labels = bytearray(), []
        if labels:
            yield _piece(pixels, labels, height, width)


def _piece(pixels: bytearray, labels: list[int], height: int, width: int) -> Piece:
    return np.frombuffer(pixels, np.uint8).reshape(-1, height, width, 3), np.array(labels, np.int64)
