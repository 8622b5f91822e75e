"""Evaluation: every sample counts once, and the result has the same bits at any number of ranks, under every strategy.

The batches do not depend on the number of ranks. One rank computes a batch, and each rank has a contiguous share of the batches. Their
results are added up in the order of the batches, in float64. After a few batches the ranks exchange their results. If a rank is lost,
the others divide the missing batches anew.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..contract import UserError
from ..data import order
from ..data.alike import check_alike
from ..data.batches import Seeded, loader
from ..data.pytree import to_device
from ..generators import RngScope
from ..parallel.exchange import all_gather_trees, raise_together
from ..parallel.world import World
from .bytecode import variables_of
from .run import Run

Sums = dict[str, torch.Tensor]
"""Name → sum, float64, 0-d or 1-d."""
Form = dict[str, list[int]]
"""Name → shape of a sum."""
Load = Callable[[list[int]], Iterator[Any]]
"""Function that yields the batches with these indices, in order."""
TOGETHER = 4
"""Batches of a rank between two exchanges of results. An exchange takes about a millisecond."""
ALONE = ""
"""The name of a result without a name."""
_COPIES = weakref.WeakKeyDictionary[nn.Module, int]()
"""Copy of a model that a script has → steps of the run when it was made."""
_WANTED = (
    "the function of evaluate() gives sums over its samples, each a number, a tensor of at most one dimension, or a dict of "
    "them by names; it gave "
)


def summed(
    function: Callable[..., Any], count: int, load: Load, world: World, seed: int,
    boundary: Callable[[], object] = lambda: None,
) -> Sums:  # fmt: skip
    """Returns the sums of a function's results over `count` ≥ 1 batches, on the CPU, the same on every rank. Collective.

    Args:
        function: called with each batch under `no_grad`; returns a number, a tensor of at most one dimension, or a dict of them.
        load: called for this rank's share, and again if the share changes.
        seed: seeds the function's random numbers, with the index of the batch.
        boundary: called after each batch, on every rank the same number of times.

    Raises:
        TypeError: the function returns another value, or other names or shapes for some batches.
    """
    known: dict[int, Sums] = {}
    form: Form | None = None
    rank_and_size, missing, batches = (-1, -1), deque[int](), iter(())
    drawing = RngScope(world.device, every=True)
    while len(known) < count:
        if rank_and_size != (world.rank, world.size):
            rank_and_size = world.rank, world.size
            numbers = [batch for batch in range(*order.bounds(count, *rank_and_size)) if batch not in known]
            missing, batches = deque(numbers), load(numbers)
        of_rank: dict[int, Sums] = {}
        error: Exception | None = None
        # So often on all ranks, also where one of them knows of a lost rank before another one.
        for _ in range(min(TOGETHER, count - len(known))):
            if missing and error is None:
                try:
                    with torch.no_grad(), drawing:  # what is drawn later, all ranks draw alike
                        drawing.seed(order.key(seed, missing[0], order.Salt.EVALUATION))
                        of_rank[missing.popleft()] = _checked(_call(function, next(batches)))
                except Exception as caught:  # noqa: BLE001 - raised below, on all ranks
                    error = caught
            boundary()
        raise_together(error, world)
        # On the CPU also this rank's own, which are not sent: not before, since that waits for the device.
        of_batches = {batch: {name: value.cpu() for name, value in sums.items()} for batch, sums in of_rank.items()}
        for new in all_gather_trees(of_batches, world):
            for batch, sums in new.items():
                form = form or _form_of(sums)
                if form != _form_of(sums):
                    raise TypeError(
                        f"{_WANTED}{form} for one batch, and {_form_of(sums)} for batch {batch}: of all batches it must give the same"
                    )
                known[batch] = sums
    return {name: _added([known[batch][name] for batch in range(count)]) for name in known[0]}


def noted(network: nn.Module, run: Run) -> nn.Module:
    """Returns a copy of the model, whose steps `check_copies` knows from now on."""
    _COPIES[network] = _steps(run)
    return network


def _steps(run: Run) -> int:
    """Returns the steps of the run; 0: its loop has not begun."""
    return run.user_state.steps if hasattr(run, "user_state") else 0


def check_copies(function: Callable[..., Any], run: Run) -> None:
    """Warns if a function measures a copy of the model from before the last step."""
    copies = [_COPIES[one] for one in variables_of(function) if issubclass(type(one), nn.Module) and one in _COPIES]
    if copies and max(copies) < _steps(run):
        run.warn(
            f"run.evaluate() measures the model as it was after step {max(copies)}, and the run is at step {_steps(run)}: call "
            "run.for_evaluation() before each evaluation, unless an earlier state is meant",
            "copy",
        )


def _call(function: Callable[..., Any], batch: Any) -> Any:
    return function(*batch) if isinstance(batch, (list, tuple)) else function(batch)


def _checked(result: Any) -> Sums:
    """Returns a result as float64 sums by name. Raises `TypeError` for a value that cannot be summed."""
    named = result if isinstance(result, Mapping) else {ALONE: result}
    try:
        sums = {name: torch.as_tensor(value, dtype=torch.float64).clone() for name, value in named.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{_WANTED}a {type(result).__name__} ({error})") from None
    if not sums or any(type(name) is not str or total.ndim > 1 for name, total in sums.items()):
        raise TypeError(f"{_WANTED}{_form_of(sums)}")
    return sums


def _form_of(sums: Sums) -> Form:
    return {name: list(total.shape) for name, total in sums.items()}


def _added(sums: list[torch.Tensor]) -> torch.Tensor:
    """Returns the sum, added one after the other: `torch.sum` takes another order."""
    return sum(sums, torch.zeros_like(sums[0]))


def of_dataset(
    function: Callable[..., Any], dataset: Any, size: int, world: World, seed: int, boundary: Callable[[], object],
    workers: int, collate: Callable[[list[Any]], Any] | None,
) -> Any:  # fmt: skip
    """Returns `summed` over batches of `size` samples of any map-style dataset, divided by its length. Collective.

    Raises:
        TypeError: as `summed`, or the dataset is not map-style.
        UserError: the dataset is empty or has different lengths on the ranks, or `size` is below 1.
    """
    check_alike(
        dataset, world, seed, workers, "run.evaluate()", "go over any other loader yourself, and add up with run.sum()"
    )
    if type(size) is not int or size < 1:
        raise UserError(f"batch_size is a number of samples from 1, got {size!r}")
    if not (total := len(dataset)):
        raise UserError("run.evaluate() needs the whole dataset on every rank, and got one without samples")

    seeded = Seeded(dataset, seed, 0, order.Salt.EVALUATED_SAMPLE)
    pins = world.device.type == "cuda" and workers > 0  # else a dataset may be on the device already

    def load(numbers: list[int]) -> Iterator[Any]:
        batches = [range(index * size, min((index + 1) * size, total)) for index in numbers]
        for batch in loader(seeded, batches, workers, collate, pins):
            yield to_device(batch, world.device)

    sums = summed(function, -(-total // size), load, world, seed, boundary)
    means = {name: value / total if value.ndim else value.item() / total for name, value in sums.items()}
    return means.get(ALONE, means)
