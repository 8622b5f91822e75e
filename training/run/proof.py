"""Proves under `sync.name=exact`, by example, that the function of a step depends on its samples alone.

At some steps every rank calls the function twice more with the samples of its first part. Both calls begin with the same buffers and
generators. The function must return the same loss twice, must not change weights and buffers, and must leave the same values in the
attributes of the modules. After a start or a save the rank calls it once more, to find collectives. The ranks then compare the
attributes that the second call has not assigned, and the arguments of the function.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from .. import generators
from ..contract import UserError, named
from ..data import order, pytree
from ..parallel.packing import as_bytes, tensor_bytes
from ..resilience.closeness import sums_of_bits
from .undo import Watching

FIRST_STEPS = 3
"""First steps of a run, each with a proof: at the very first a moving average may still equal its source."""
EVERY = 256
"""Later steps per proof, on average. A proof takes at most as long as a step, if each rank has one part."""
_MOST_BYTES = 1 << 24
"""Bytes of an attribute that is hashed, at most. Ranks compare a larger attribute by the sum of its bits."""
_DEPTH = 5
"""Levels of lists and dictionaries in an attribute that are read."""
OF_TORCH = {*vars(nn.Module()), "_flat_weights"}
"""Attributes of modules that belong to torch."""

Refuse = Callable[[str, str], UserError]


def due(seed: int, step: int) -> bool:
    """Returns whether the seed draws a proof at this step. The same on all ranks, and at every start."""
    return step < FIRST_STEPS or order.key(seed, step, order.Salt.PROOF) % EVERY == 0


class Proof:
    """The proof of one step, on one rank.

    Args:
        refuse: makes the error of the strategy.
        alone: the parameters and buffers that no call may change, by name.
        before: the batch statistics that the step began with.
        after_save: whether to look for collectives, too.
    """

    def __init__(
        self, model: nn.Module, refuse: Refuse, alone: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor],
        after_save: bool,
    ) -> None:  # fmt: skip
        self.model, self._refuse, self._after_save = model, refuse, after_save
        self.alone, self._before = alone, before
        self.record: Any = None
        """The record that the ranks compare: digests of the attributes that the second call has not assigned, and of the batch statistics;
        and `_arguments`. None: this rank has no part."""
        self._arguments: list[list[Any]] = []
        """[number of the argument, digest, whether it may be a table] for each tensor that is cut into parts."""

    def look_for_collectives(self, call: Callable[[], torch.Tensor]) -> UserError | None:
        """Calls the function after a start or a save. Returns the error for its first collective, which does not run; None: none."""
        watching = Watching()
        if self._after_save:
            with contextlib.suppress(Exception), watching:  # an error of the function's own comes again
                call()
        if watching.collective is None:
            return None
        return self._refuse(
            f"takes no collective inside the function of a step, and this one calls {watching.collective}",
            "each rank calls the function for each of its own parts. Compare samples within a part, or use sync.name=flat",
        )

    def prove(self, call: Callable[[], torch.Tensor]) -> UserError | None:
        """Calls the function twice. Returns the error for its first fault; None: the proof holds."""
        alone = {name: tensor for name, tensor in self.alone.items() if has_bytes(tensor)}
        contents = sums_of_bits(alone.values())
        losses = [call().detach().double().view(1)]
        first = attributes(self.model)
        with _assignments(self.model) as assigned:
            losses.append(call().detach().double().view(1))
        second = attributes(self.model)
        statistics = zip(self._before, sums_of_bits(self._before.values()).tolist())
        states = {name: value for name, value in second.items() if name not in assigned}
        self.record = [states | {name: str(total) for name, total in statistics}, self._arguments]
        moved = (sums_of_bits(alone.values()) != contents).tolist()
        for (name, tensor), has_moved in zip(alone.items(), moved):
            if has_moved:
                return changed(self._refuse, name, isinstance(tensor, nn.Parameter))
        for name, value in second.items():
            if first.get(name, value) != value:
                return self._refuse(
                    f"needs a network that keeps nothing from one forward pass to the next, and each pass moves its attribute {name}",
                    "ranks make different numbers of passes. Change it after run.step(…), on all ranks alike",
                )
        if not torch.equal(*(loss.view(torch.int64) for loss in losses)):
            return self._refuse(
                f"needs a function that gives the same loss for the same samples, and this one gave {float(losses[0]):.9g}, then "
                f"{float(losses[1]):.9g}",
                "draw random numbers from the generators of torch, numpy and Python (torch.randn, np.random, random), which are seeded "
                "for each part, not from one of your own, and keep nothing from one call to the next",
            )
        return None

    def look_at_arguments(
        self, batch: tuple[Any, ...], samples: int, total: int, given: Callable[[Any], bool]
    ) -> UserError | None:
        """Records the arguments of the function. Returns the error for an argument that is not cut as the samples; None: all are.

        Args:
            given: whether `run.batches()` or `run.part()` has given an argument.
        """
        for number, argument in enumerate(batch, 1):
            for piece in pytree.pieces(argument):
                if len(piece) != samples:
                    return self._foreign(f"{number} has {len(piece)} entries", total)
                if isinstance(piece, torch.Tensor):
                    self._arguments.append([number, _digest(piece), not given(piece) and _rows_differ(piece)])
        return None

    def _foreign(self, what: str, total: int) -> UserError:
        return self._refuse(
            f"cuts each argument of the function as the {total} samples of the global batch, and argument {what}",
            "what does not belong to samples is no argument: the function may use it all the same",
        )

    def compare(self, records: list[Any], total: int) -> UserError | None:
        """Returns the error for an attribute that differs between ranks, or an argument that does not: ranks have different samples."""
        of_rank = {rank: record for rank, record in enumerate(records) if record is not None}
        states = {rank: states for rank, (states, _) in of_rank.items()}
        base = min(states)
        for name in sorted(set.intersection(*map(set, states.values()))):
            if other := [rank for rank, values in states.items() if values[name] != states[base][name]]:
                return self._refuse(
                    f"needs the same network on all ranks, and {name} has another value on rank {named(other)} than on rank {base}",
                    "set it alike on all ranks, and not from the samples of one",
                )
        arguments = list(zip(*(arguments for _, arguments in of_rank.values())))
        same = [of_ranks[0] for of_ranks in arguments if len({digest for _, digest, _ in of_ranks}) == 1]
        tables = [number for number, _, is_table in same if is_table]
        if tables and len(same) < len(arguments):
            return self._foreign(f"{tables[0]} has the same entries on all ranks", total)
        return None


def _rows_differ(tensor: torch.Tensor) -> bool:
    """Returns whether all rows of the tensor differ. A tensor of ones is no table."""
    if not has_bytes(tensor) or not tensor.numel():
        return False
    return len({row.numpy().tobytes() for row in tensor_bytes(tensor).view(len(tensor), -1)}) == len(tensor)


def changed(refuse: Refuse, name: str, is_parameter: bool) -> UserError:
    """Returns the error for a parameter or buffer that a call has changed."""
    if is_parameter:
        return refuse(
            f"needs weights that a step alone changes, and a forward or backward pass changes {name}",
            "the next part would begin with other ones. Change them after run.step(…), on all ranks alike",
        )
    return refuse(
        f"does not know how to put together the buffer {name}, which a forward pass changes",
        "each part begins with the same buffers, and only batch norm's are averaged over the parts. If a mean is right "
        f"for it, set sync.options.mean=[{name}]; else use sync.name=flat",
    )


def attributes(model: nn.Module) -> dict[str, str]:
    """Returns a text for each attribute of the modules, by name: of numbers, texts, tensors, arrays, generators, and of lists and
    dictionaries of these. Leaves out parameters, buffers and other objects."""
    return {name: text for name, value in attributes_of(model) if (text := text_of(value)) is not None}


def attributes_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the attributes of the modules by name, without parameters, buffers and torch's own attributes."""
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in OF_TORCH and id(value) not in own:
                yield f"{path}.{name}".lstrip("."), value


def text_of(value: Any, depth: int = _DEPTH) -> str | None:
    """Returns a text that equal values share: a digest, or the `repr`. None: values of this kind are not compared.

    Args:
        depth: levels of lists and mappings to read.
    """
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.generic)):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return _digest(value)
    if isinstance(value, np.ndarray):
        return None if value.dtype.hasobject else _digest(as_bytes(value.tobytes()))
    if generators.is_generator(value):
        return hashlib.sha256(repr(generators.comparable_state(value)).encode()).hexdigest()
    if not depth:
        return None
    if isinstance(value, Mapping):
        return repr([(str(key), text_of(inner, depth - 1)) for key, inner in value.items()])
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        texts = [text_of(inner, depth - 1) for inner in value]
        return repr(sorted(map(str, texts)) if isinstance(value, (set, frozenset)) else texts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return repr([text_of(getattr(value, field.name, None), depth - 1) for field in dataclasses.fields(value)])
    return None


def has_bytes(tensor: torch.Tensor) -> bool:
    """Returns whether `text_of` reads the numbers of the tensor, not only its shape."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    return plain and not (tensor.is_nested or tensor.is_meta or tensor.is_conj() or tensor.is_neg())


@torch.no_grad()
def _digest(tensor: torch.Tensor) -> str:
    about = f"{tensor.dtype}{'' if tensor.is_nested else [*tensor.shape]}"
    if not has_bytes(tensor):
        return about
    if tensor.numel() * tensor.element_size() > _MOST_BYTES:
        return f"{about}{sums_of_bits([tensor]).tolist()}"
    return about + hashlib.sha256(tensor_bytes(tensor).numpy().tobytes()).hexdigest()


@contextlib.contextmanager
def _assignments(model: nn.Module) -> Iterator[set[str]]:
    """Collects the names of the modules' attributes that the block assigns. An attribute that each pass assigns, such as the last
    attention, carries nothing into the next pass, so ranks may have different values there."""
    assign, names = nn.Module.__setattr__, {id(module): path for path, module in model.named_modules()}
    found: set[str] = set()

    def note(module: nn.Module, name: str, value: Any) -> None:
        found.add(f"{names.get(id(module), '')}.{name}".lstrip("."))
        assign(module, name, value)

    nn.Module.__setattr__ = note  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        nn.Module.__setattr__ = assign  # type: ignore[method-assign]
