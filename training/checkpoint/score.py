"""The scores of a run: which number says how good its weights are, which is the best so far, and what each was measured on."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..contract import UserError

KeepBest: TypeAlias = "bool | Mapping[str, str]"
"""The setting `checkpoint.keep_best`: {name: max or min}; true means {accuracy: max}."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The number that is a run's score, and whether it is better where it is higher (1) or lower (-1)."""

    name: str
    sign: int

    @classmethod
    def of(cls, keep_best: KeepBest) -> Rule:
        """A run that keeps no best checkpoint has its accuracy as score all the same."""
        name, better = ("accuracy", "max") if isinstance(keep_best, bool) else next(iter(keep_best.items()))
        return cls(name, 1 if better == "max" else -1)

    def best(self, scores: Mapping[int, float]) -> int | None:
        """The step with the best score, the newest of several. `scores`: by step."""
        return max(scores, key=lambda step: (self.sign * scores[step], step), default=None)

    def better(self, value: float, than: float | None) -> bool:
        return math.isfinite(value) and (than is None or self.sign * value > self.sign * than)


def chosen(
    steps: Collection[int], wanted: int | Rule, score: Callable[[int, Rule], float | None], where: object
) -> int:
    """The step of the checkpoint that is wanted: that step itself, or the best by a rule.

    Args:
        steps: of all checkpoints that there are.
        score: of one of them; None: it was not measured by that rule.
        where: they are, for the error.

    Raises:
        UserError: it is not there. Another one never stands in for it.
    """
    there = f"there are {', '.join(map(str, sorted(steps)))}"
    if isinstance(wanted, int):
        if wanted not in steps:
            raise UserError(f"{where} has no checkpoint of step {wanted}; {there}")
        return wanted
    best = wanted.best({step: value for step in steps if (value := score(step, wanted)) is not None})
    if best is None:
        raise UserError(f"no checkpoint of {where} has a score ({wanted.name}): choose one with --step; {there}")
    return best


class Scores:
    """The scores of one attempt that this rank knows.

    Args:
        history: the run's, which goes into every checkpoint. It holds the best scores so far (`best_NAME`), and the best that
            a checkpoint was saved with (`saved_NAME`): the weights of a score may be gone before they can be saved.
    """

    def __init__(self, history: dict[str, Any], keep_best: KeepBest) -> None:
        self.rule, self._history, self._keeps = Rule.of(keep_best), history, keep_best is not False
        self._step, self._value = -1, math.nan
        """The last score, and the step after which it was measured."""
        self._new = self._unsaved = False
        """Whether it came after the last boundary; whether it is better than that of any checkpoint."""

    def note(self, numbers: Mapping[str, float], step: int) -> None:
        """Numbers that were measured on the weights after `step`."""
        for rule in (self.rule, Rule.of(True)):  # the best accuracy is reported, whatever is kept
            if rule.name in numbers:
                self._raise("best", rule, numbers[rule.name])
        if self.rule.name in numbers:
            value = numbers[self.rule.name]
            if step != self._step or self.rule.better(value, self._value):
                self._value = value
            self._unsaved = self.rule.better(self._value, self._history.get(f"saved_{self.rule.name}"))
            self._step, self._new = step, self._keeps

    def _raise(self, which: str, rule: Rule, value: float) -> None:
        if rule.better(value, self._history.get(f"{which}_{rule.name}")):
            self._history[f"{which}_{rule.name}"] = value

    @property
    def best_name(self) -> str:
        """As `history` and summary.json have it."""
        return f"best_{self.rule.name}"

    @property
    def best(self) -> float | None:
        """The best score of the run so far; None: none was noted."""
        return self._history.get(self.best_name)

    def asks(self, step: int) -> bool | None:
        """Whether the state after `step` is to be saved for its score. None: no score came since the last call."""
        new, self._new = self._new, False
        return self._unsaved and self._step == step if new else None

    def of(self, step: int) -> float | None:
        """The score of the weights after `step`; None where they were not measured."""
        return self._value if step == self._step and math.isfinite(self._value) else None

    def saved(self, step: int) -> None:
        """A checkpoint of the state after `step` is about to be gathered."""
        if step == self._step:
            self._raise("saved", self.rule, self._value)
            self._unsaved = False
