"""Horovod's DistributedOptimizer over our own engine (`buckets.py`): any torch optimizer, whose `step` synchronises first.

Its errors have Horovod's types and meaning: a script that is wrong with Horovod is wrong here, too.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.training.data import partition
from lockstep.training.sync.buckets import Reducer


class _Distributed:
    """Mixed into the class of the user's optimizer, in front of it."""

    _reducer: Reducer

    def __init__(self) -> None:
        self._synchronized = False
        self._should_synchronize = True
        self._weighting_settled = False
        """Whether `set_samples` was called, or the user was warned that it was not."""

    def synchronize(self) -> None:
        """Returns when all gradients are reduced. A parameter that got none on this rank counts as zero."""
        self._reducer.synchronize()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """`step` inside does not synchronise: for scripts that did, to clip or unscale the gradients in between."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Backward passes whose gradients are added up before they are sent."""
        self._reducer.passes = passes
        self._reducer.reset()

    def set_samples(self, count: int) -> None:
        """The rank's batch has `count` samples, m_k of n: call it before `backward`, on all ranks. Collective.

        From here on gradients of mean losses are weighted m_k / n and summed, which gives exactly the gradient of the
        mean over the whole batch, however unequal the parts are. A rank without samples leaves `backward` out.
        Not part of Horovod.
        """
        total = torch.tensor(float(count), dtype=torch.float64)
        dist.all_reduce(total)
        if not total:
            raise ValueError("no rank has a sample")
        self._reducer.weight, self._reducer.factor, self._reducer.mean = count / float(total), 1.0, False
        self._weighting_settled = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:  # noqa: ARG002
        raise ValueError(
            "parameters that are added after DistributedOptimizer() are not reduced: add the group to the optimizer before wrapping it"
        )

    def step(self, closure: Any = None) -> Any:
        if not self._weighting_settled and partition.unequal_parts and self._reducer.size > 1:
            self._weighting_settled = True
            warnings.warn(
                "the ranks' parts of a batch differ in size, and the mean of their mean gradients is not that of the batch: "
                "call optimizer.set_samples(len(target)) before backward(), on all ranks",
                stacklevel=2,
            )
        if closure is not None:
            raise ValueError("a closure would compute gradients that are not synchronised: call step() without one")
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "step() synchronises again after synchronize(): call it inside optimizer.skip_synchronize()",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return super().step()  # type: ignore[misc]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if self._reducer.pending:
            raise AssertionError(
                "zero_grad() was called after backward() and before step() or synchronize(), while gradients are on "
                "their way: that is a race"
            )
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def reset_grad(self) -> None:
        """`zero_grad`, by the name that some scripts have for it."""
        self.zero_grad()


def distribute(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None,
    passes: int,
    factor: float,
    mean: bool,
) -> torch.optim.Optimizer:
    """A twin of `optimizer`, of a subclass of its class, that shares its state and reduces gradients before each step.

    Raises:
        ValueError: names that are not unique, or a parameter of the optimizer without a name.
    """
    params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if named_parameters is None:
        named = [(f"allreduce.noname.{number}", parameter) for number, parameter in enumerate(params)]
    else:
        named = _checked(list(named_parameters), params)
    cls = type(optimizer)
    twin: Any = object.__new__(type(cls.__name__, (_Distributed, cls), {}))
    twin.__dict__.update(optimizer.__dict__)
    _Distributed.__init__(twin)
    twin._reducer = Reducer(named, factor=factor, mean=mean, passes=passes)
    # A script that continues with the original optimizer must fail (on its second gradient), not train each rank alone.
    optimizer._reducer = twin._reducer  # type: ignore[attr-defined]
    return twin


def _checked(named: list[Any], params: list[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    if not all(isinstance(entry, tuple) and len(entry) == 2 for entry in named):
        raise ValueError("named_parameters must be (name, parameter) tuples, as model.named_parameters() gives them")
    twice = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if twice:
        raise ValueError(f"parameter names in named_parameters must be unique, found duplicates: {', '.join(twice)}")
    known = {id(parameter) for _, parameter in named}
    unnamed = [tuple(parameter.shape) for parameter in params if id(parameter) not in known]
    if unnamed:
        raise ValueError(
            f"named_parameters leaves {len(unnamed)} parameters of the optimizer without a name, of shapes {unnamed[:5]}"
        )
    held = {id(parameter) for parameter in params}
    return [(name, parameter) for name, parameter in named if id(parameter) in held]
