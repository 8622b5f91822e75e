"""What a script trains outside of its session: no checkpoint holds it, or the ranks train it apart. It is named at the first save."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..checkpoint.kept import Stateful
from ..checkpoint.state import TrainState, parameter_names
from ..parallel.exchange import all_gather_trees
from ..parallel.names import plain
from ..resilience.closeness import fingerprint


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
        if not state.kept.has(optimizer):
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
    things: list[object] = [*state.optimizers.values(), *state.kept.objects.values(), *state.kept.rank_objects.values()]
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
    more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
    return (
        f"{unused[0]}{more} require a gradient, and no optimizer has them: give them to run.optimizer(), or freeze them by "
        "requires_grad_(False)"
    )


def _weights_outside(learned: set[torch.Tensor], used: set[torch.Tensor], state: TrainState) -> list[str]:
    """Names the learned weights that differ between the ranks, or that no checkpoint holds. Collective.

    Args:
        learned: weights of no replicated model.
        used: those of them that an optimizer moves, and others.
    """
    of_rank = _storages(_states(state.kept.rank_objects))
    held = _storages([_states(state.kept.objects), dict(state.kept.values)])
    outside = {
        _name_of(p) or f"a parameter of shape {list(p.shape)}": p
        for p in learned
        if p.device.type != "meta" and _storage(p) not in of_rank
    }
    every = all_gather_trees({name: fingerprint(nn.ParameterList([p])) for name, p in outside.items()}, state.world)
    sentences = []
    for name, parameter in outside.items():
        apart = len({prints.get(name, every[0].get(name)) for prints in every}) > 1
        lost = parameter in used and _storage(parameter) not in held
        if apart or lost:
            problems = ["differs between the ranks"] * apart + ["is in no checkpoint"] * lost
            sentences.append(
                f"{name} is trained outside of every replicated model: it {' and '.join(problems)}. Make it a parameter of the model "
                "before run.replicate()"
            )
    return sorted(sentences)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _storages(tree: Any) -> set[int]:
    return {_storage(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}


def _states(objects: dict[str, Stateful]) -> list[Any]:
    return [stateful.state_dict() for stateful in objects.values()]


def _name_of(thing: object) -> str | None:
    """The script's name for an optimizer or a weight: of a variable, of an attribute, or within a module."""
    for variables in _variables():
        for name, value in variables.items():
            if value is thing:
                return name
            if issubclass(type(value), nn.Module) and "_modules" in vars(value):  # else it is not constructed
                for inner, parameter in value.named_parameters():
                    if parameter is thing:
                        return f"{name}.{inner}"
    for holder in gc.get_referrers(thing):
        with contextlib.suppress(TypeError):
            for name, value in (holder if isinstance(holder, dict) else vars(holder)).items():
                if value is thing and isinstance(name, str):
                    return name
    return None


def _variables() -> Iterator[dict[str, Any]]:
    """The variables of the functions that are running, innermost first, without ours."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if not frame.f_globals.get("__name__", "").startswith("lockstep."):
            yield {**frame.f_locals}
            yield {**frame.f_globals}
