"""Mean and standard deviation of training samples beside those that a recipe normalises with."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.training.config import Data

_NEAR = 0.02


def fits(mean: Sequence[float], std: Sequence[float], data: Data) -> bool:
    """Whether the recipe's own numbers are near those of the samples."""
    return all(
        len(configured) in (1, len(measured))
        and all(abs(a - b) < _NEAR for a, b in zip(_as_many(configured, measured), measured))
        for configured, measured in ((data.mean, mean), (data.std, std))
    )


def comparison(mean: Sequence[float], std: Sequence[float], data: Data) -> str:
    """One line with both. If the recipe's values do not fit, the line says how to set those of the samples.

    They are not set silently: they are part of what a run is.
    """
    mean_text, std_text = (f"[{','.join(f'{number:.4f}' for number in numbers)}]" for numbers in (mean, std))
    measured = f"mean {mean_text}, standard deviation {std_text} of the training samples"
    if fits(mean, std, data):
        return measured
    recipe_values = "gives none" if (data.mean, data.std) == ([0.0], [1.0]) else f"has {data.mean} and {data.std}"
    return f"{measured}; the recipe {recipe_values}: set data.mean={mean_text} data.std={std_text}"


def _as_many(numbers: Sequence[float], like: Sequence[float]) -> Sequence[float]:
    return list(numbers) * len(like) if len(numbers) == 1 else numbers
