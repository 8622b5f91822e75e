"""What a step adds up over its samples: the loss, and the numbers that its function returns with it (`loss, {"accuracy": hits}`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..contract import UserError
from ..observe.reading import mean_loss
from ..parallel.exchange import all_gather_trees, raise_together
from .attempt import Attempt
from .run import Run


class StepSums:
    """The sums of the step under way, which join those of the epoch (`TrainState.losses`) where the step moves the weights.

    The names of the numbers are those of the first step. All ranks call the same methods in the same order.
    """

    def __init__(self, run: Run, attempt: Attempt) -> None:
        self._run, self._attempt = run, attempt
        self.values = torch.zeros_like(run.state.losses)
        """float64 [2 + names], as in the state; under `exact` those of all ranks, once they are summed."""
        self._seen: dict[int, tuple[int, int, int | None]] = {}
        """Samples of this rank and of all that each optimizer has stepped on since the batch was given, and of which whole."""
        self._named = False
        """A step of this attempt has shown its names."""

    def begin(self) -> None:
        """A step begins, or is computed again."""
        self.values.zero_()

    def add(
        self, loss: torch.Tensor, numbers: Mapping[str, Any], samples: int, share: float, weight: float
    ) -> None:  # fmt: skip
        """Adds those of some of this rank's samples. Raises `UserError` for other names than before.

        Args:
            samples: 0: they stand in for none, and add nothing.
            share: multiplies the loss.
            weight: multiplies the numbers, which are sums over the samples.
        """
        self._expect(sorted(numbers))
        if not samples:
            return
        self.values[0].add_(loss.double() if share == 1.0 else loss.double() * share)
        for place, name in enumerate(self._run.kept.measured, 2):
            number = numbers[name]
            on_device = isinstance(number, torch.Tensor) and number.device == loss.device
            if not on_device and loss.is_cuda and torch.cuda.is_current_stream_capturing():
                raise ValueError(f"the function returns {name} as a number, which a replay would not compute again")
            self.values[place].add_(number.detach().reshape(()) if on_device else float(number), alpha=weight)

    def _expect(self, names: list[str]) -> None:
        kept, state = self._run.kept, self._run.state
        if names != kept.measured:
            if self._named or self._attempt.reading.within_epoch:
                raise UserError(
                    f"the function of a step returned {_listed(names)}, and the steps before {_listed(kept.measured)}: return the same "
                    "names in every step of a start"
                )
            kept.measured = names
            self.values = self.values.new_zeros(2 + len(names))
            state.losses = torch.cat([state.losses[:2], state.losses.new_zeros(len(names))])
        self._named = True

    def agree(self, refused: UserError | None = None) -> None:
        """Compares the names of all ranks, after the forward passes of an attempt's first step. A rank without samples learns them.
        The step notes that they are known, once no lost rank can make it compare them again.

        Collective where they are not. Raises `UserError` on all ranks.

        Args:
            refused: why this rank has left out its part of the step, so that it does not know the names.
        """
        if self._run.world.size == 1 or "numbers" in self._attempt.known:
            return
        raise_together(refused, self._run.world)
        every = all_gather_trees(self._run.kept.measured if self._named else None, self._run.world)
        known = {rank: names for rank, names in enumerate(every) if names is not None}
        first, names = next(iter(known.items()))
        for rank, others in known.items():
            if others != names:
                error = UserError(
                    f"the function of a step returned {_listed(names)} on rank {first}, and {_listed(others)} on rank {rank}: return "
                    "the same names on every rank"
                )
                error.shared = True
                raise error
        self._expect(names)

    def count(self, weighed: float | torch.Tensor) -> None:
        """The step has moved the weights. `weighed`: this rank's share of what the sums are divided by (`Run.loss_weight`)."""
        self.values[1].fill_(weighed)
        self._run.state.losses += self.values

    def begin_batch(self) -> None:
        """A batch is there."""
        self._seen.clear()

    def new_samples(
        self, optimizers: Iterable[torch.optim.Optimizer], samples: int, total: int, whole: int | None
    ) -> tuple[int, int]:  # fmt: skip
        """Samples of this rank and of all that this update adds: those of a batch count once, however many networks learn of it.

        Args:
            samples: of this rank in the step, and `total` those of all ranks.
            whole: the number of what `run.part` has cut last, all of whose part each update is of; None: it may be of a piece.
        """
        before = self._most()
        for optimizer in optimizers:
            mine, everywhere, last = self._seen.get(id(optimizer), (0, 0, None))
            if whole is None or whole != last:
                mine, everywhere = mine + samples, everywhere + total
            self._seen[id(optimizer)] = mine, everywhere, whole
        mine, everywhere = self._most()
        return mine - before[0], everywhere - before[1]

    def _most(self) -> tuple[int, int]:
        """Of this rank and of all, by the optimizer that has stepped on most."""
        seen = self._seen.values()
        return max((mine for mine, _, _ in seen), default=0), max((every for _, every, _ in seen), default=0)

    def mean_loss(self) -> float | None:
        """Of all ranks; None where the step moved no weight. Collective."""
        return mean_loss(*self._run.state.over_ranks(self.values[:2]).tolist())


def _listed(names: list[str]) -> str:
    return f"the numbers {', '.join(names)}" if names else "no numbers"
