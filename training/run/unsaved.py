"""What a script has by itself, and a save loses: what it trains outside of its session, and what the ranks do not have alike. It is named
in warnings."""

from __future__ import annotations

import contextlib
import gc
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..checkpoint.state import TrainState, parameter_names
from ..checkpoint.user_state import Stateful
from ..contract import named
from ..parallel.exchange import all_gather_trees, same_on_all
from ..parallel.names import plain
from ..resilience.closeness import fingerprint, sums_of_bits
from .run import Run
from .tables import first_of, storage, storages

SCORES = ("accuracy", "loss")
"""How the name of a score ends. What else is logged may be a rank's own: a time, a rate, the size of its memory."""


class Unsaved:
    """Warns of each once, at a save.

    Args:
        moved: gives a sentence for each thing that has moved since the loop began, and is in no checkpoint.
        changed: the same, at each save.
    """

    def __init__(self, run: Run, moved: Callable[[], list[str]], changed: Callable[[], list[str]]) -> None:
        self._run, self._changed = run, changed
        self.moved: Callable[[], list[str]] | None = moved
        """None: what the script trains outside of the session was named."""
        self.logged: dict[str, float] = {}
        """What this rank has logged since the last save."""

    def look(self) -> None:
        """Collective."""
        state, world = self._run.state, self._run.world
        moved, self.moved = self.moved, None
        outside = [] if moved is None else [*trained_outside(state), *moved()]
        sentences = {sentence: sentence for sentence in [*outside, *self._changed()]}
        if world.size > 1 and not same_on_all(mine := self._alike(), world):
            sentences |= unequal(all_gather_trees(mine, world))
        self.logged.clear()
        for about, sentence in sentences.items():
            self._run.warn(sentence, about)

    def _alike(self) -> dict[str, str]:
        """What all ranks have alike, by the call that says so."""
        kept = self._run.user_state
        objects = {f"run.keep({name}=…)": _print(stateful.state_dict()) for name, stateful in kept.objects.items()}
        values = {f"run.values[{name!r}]": _print(value) for name, value in kept.values.items()}
        scores = (*SCORES, self._run.scores.rule.name)
        logged = {name: value for name, value in self.logged.items() if name.endswith(scores)}
        return {**objects, **values, **{f"run.log({name}=…)": f"{value:.4g}" for name, value in logged.items()}}


def unequal(of_ranks: Sequence[dict[str, str]]) -> dict[str, str]:
    """Returns a sentence for each call for which a rank has something else than rank 0. A rank may lack it.

    Args:
        of_ranks: by the call, what stands for its value, or the value itself where it was logged.
    """
    sentences = {}
    for call, first in of_ranks[0].items():
        others = [rank for rank, found in enumerate(of_ranks) if found.get(call, first) != first]
        if others and call.startswith("run.log"):
            sentences[call] = (
                f"{call} gets {first} on rank 0 and {of_ranks[others[0]][call]} on rank {others[0]}, and rank 0's alone is written: if "
                "each has measured samples of its own, add them up by run.sum()"
            )
        elif others:
            sentences[call] = (
                f"{call} is not the same on rank {named(others)} as on rank 0, whose alone is saved: compute it from the same samples on "
                "all ranks, or keep each rank's own by run.keep_of_rank()"
            )
    return sentences


@torch.no_grad()
def _print(tree: Any) -> str:
    """What stands for the tensors, arrays, numbers and texts of a state. A tensor that the ranks have in parts is left out."""
    leaves = tree_leaves(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not hasattr(leaf, "placements")]
    arrays = [zlib.crc32(leaf.tobytes()) for leaf in leaves if isinstance(leaf, np.ndarray)]
    others = [
        f"{leaf:.4g}" if isinstance(leaf, float) else repr(leaf)
        for leaf in leaves
        if not isinstance(leaf, (torch.Tensor, np.ndarray))
    ]
    return str(zlib.crc32(repr([sums_of_bits(tensors).tolist(), arrays, others]).encode()))


def trained_outside(state: TrainState) -> list[str]:
    """Returns a sentence for each optimizer and weight that a resume loses or that the ranks train apart. Collective."""
    parameters, optimizers = _alive(state)
    if optimizers:  # one that the script has replaced may wait for the garbage collector
        del parameters, optimizers
        gc.collect()
        parameters, optimizers = _alive(state)
    known = plain(state.model, dict(state.model.named_parameters()))
    used = {p for optimizer in optimizers for p in _parameters(optimizer)}
    sentences = [_unused(known, used, state)]
    for optimizer in optimizers:
        if not state.user_state.has(optimizer):
            name = _name_of(optimizer) or "by hand"
            first = next((n for n, p in known.items() if p in _parameters(optimizer)), "")
            sentences.append(
                f"the optimizer {name} ({type(optimizer).__name__}{first and f' over {first}'}) does not come from run.optimizer(), so no "
                f"checkpoint holds its state: make it by run.optimizer(), or call run.keep({name if name.isidentifier() else 'other'}=…)"
            )
    learned = {p for p in parameters if p.requires_grad and p.is_leaf and p.grad is not None}
    return [*filter(None, sentences), *_weights_outside((learned | used) - {*known.values()}, used, state)]


def _parameters(optimizer: torch.optim.Optimizer) -> set[torch.Tensor]:
    groups = getattr(optimizer, "param_groups", ())  # none where its constructor has failed
    return {p for group in groups for p in group["params"] if p.requires_grad}


def _alive(state: TrainState) -> tuple[list[nn.Parameter], list[torch.optim.Optimizer]]:
    """All parameters of this process, and the optimizers that no session has made and no wrapper of an optimizer holds."""
    things: list[object] = [
        *state.optimizers.values(),
        *state.user_state.objects.values(),
        *state.user_state.rank_objects.values(),
    ]
    wrapped = {
        id(inner)
        for thing in things
        if not isinstance(thing, torch.optim.lr_scheduler.LRScheduler)
        for inner in getattr(thing, "__dict__", {}).values()
    }
    # The `__class__` of an object is not asked: a proxy may compute it.
    alive = [thing for thing in gc.get_objects() if issubclass(type(thing), (nn.Parameter, torch.optim.Optimizer))]
    optimizers = [thing for thing in alive if not issubclass(type(thing), nn.Parameter)]
    by_hand = [one for one in optimizers if not hasattr(one, "sync") and id(one) not in wrapped and _parameters(one)]
    return [thing for thing in alive if issubclass(type(thing), nn.Parameter)], by_hand


def _unused(known: dict[str, nn.Parameter], used: set[torch.Tensor], state: TrainState) -> str:
    """Names the parameters that require a gradient and are in no optimizer."""
    ours = {
        name
        for optimizer in state.optimizers.values()
        for group in parameter_names(state.sync, optimizer)
        for name in group
    }
    unused = [name for name, p in known.items() if p.requires_grad and name not in ours and p not in used]
    if not unused:
        return ""
    return (
        f"{first_of(unused)} require a gradient, and no optimizer has them: give them to run.optimizer(), or freeze them by "
        "requires_grad_(False)"
    )


def _weights_outside(learned: set[torch.Tensor], used: set[torch.Tensor], state: TrainState) -> list[str]:
    """Names the learned weights that differ between the ranks, or that no checkpoint holds. Collective.

    Args:
        learned: weights of no replicated model.
        used: those of them that an optimizer moves, and others.
    """
    of_rank = storages(states_of(state.user_state.rank_objects))
    held = storages([states_of(state.user_state.objects), dict(state.user_state.values)])
    outside = {_name_of(p) or f"a parameter of shape {list(p.shape)}": p for p in learned if storage(p) not in of_rank}
    every = all_gather_trees({name: fingerprint(nn.ParameterList([p])) for name, p in outside.items()}, state.world)
    sentences = []
    for name, parameter in outside.items():
        apart = len({prints.get(name, every[0].get(name)) for prints in every}) > 1
        lost = parameter in used and storage(parameter) not in held
        if apart or lost:
            problems = ["differs between the ranks"] * apart + ["is in no checkpoint"] * lost
            sentences.append(
                f"{name} is trained outside of every replicated model: it {' and '.join(problems)}. Make it a parameter of the model "
                "before run.replicate()"
            )
    return sorted(sentences)


def states_of(objects: dict[str, Stateful]) -> list[Any]:
    return [stateful.state_dict() for stateful in objects.values()]


def _name_of(thing: object) -> str | None:
    """The script's name for an optimizer or a weight: of a variable, of an attribute, or within a module."""
    for names in variables():
        for name, value in names.items():
            if value is thing:
                return name
            if issubclass(type(value), nn.Module) and "_modules" in vars(value):  # else it is not constructed
                for inner, parameter in value.named_parameters():
                    if parameter is thing:
                        return f"{name}.{inner}"
    for holder in gc.get_referrers(thing):
        with contextlib.suppress(Exception):  # of a proxy, whose attributes may raise
            for name, value in (holder if issubclass(type(holder), dict) else vars(holder)).items():
                if value is thing and isinstance(name, str):
                    return name
    return None


def variables() -> Iterator[dict[str, Any]]:
    """The variables of the functions that are running, innermost first, without ours."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if not frame.f_globals.get("__name__", "").startswith("lockstep."):
            yield {**frame.f_locals}
            yield {**frame.f_globals}
