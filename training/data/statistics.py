"""Mean and standard deviation of training samples beside those that a recipe normalises with."""

from __future__ import annotations

from collections.abc import Sequence

from training.config import Data

_NEAR = 0.02


def fits(mean: Sequence[float], std: Sequence[float], data: Data) -> bool:
    """Whether the recipe's own numbers are near those of the samples."""
    return all(
        len(theirs) in (1, len(ours)) and all(abs(a - b) < _NEAR for a, b in zip(_as_many(theirs, ours), ours))
        for theirs, ours in ((data.mean, mean), (data.std, std))
    )


def told(mean: Sequence[float], std: Sequence[float], data: Data) -> str:
    """A line with both; where the recipe's do not fit, with the words that set the samples' own.

    They are not set silently: they are part of what a run is.
    """
    own, spread = (f"[{','.join(f'{number:.4f}' for number in numbers)}]" for numbers in (mean, std))
    found = f"mean {own}, standard deviation {spread} of the training samples"
    if fits(mean, std, data):
        return found
    given = "gives none" if (data.mean, data.std) == ([0.0], [1.0]) else f"has {data.mean} and {data.std}"
    return f"{found}; the recipe {given}: set data.mean={own} data.std={spread}"


def _as_many(numbers: Sequence[float], others: Sequence[float]) -> Sequence[float]:
    return list(numbers) * len(others) if len(numbers) == 1 else numbers
