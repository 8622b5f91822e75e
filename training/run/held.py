"""Tensors and random generators that variables of the script hold: what moves and is in no checkpoint, a resume loses. It is named at
the first save. So are numbers that a replicated model has in attributes, at any save.

A copy of the weights is a module that is not replicated, such as a teacher, or a dictionary or list of tensors like the parameters. A
tensor by itself counts where it is changed in place, as a centre or a queue: one that is assigned anew may be a batch.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdRef

from .. import generators
from ..checkpoint.state import TrainState
from ..parallel.names import plain, plain_name
from .replica import Several
from .tables import first_of, storage, storages
from .unsaved import states_of, variables

MOST, DEPTH, ITEMS = 5000, 3, 100
"""Objects that are looked at, attributes below a variable, and items of a dictionary or list whose items are looked at."""
_OPAQUE = (types.ModuleType, types.FunctionType, type, str, bytes, int, float, torch.Tensor, torch.optim.Optimizer)


class Held:
    """What the variables hold when the loop begins."""

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._before = self._looked()

    def moved(self) -> list[str]:
        """Returns a sentence for each that has moved since then, and is in no checkpoint. Of tensors by themselves the first is named:
        one that sums up may be set to zero before it is read."""
        now, sentences, in_place = self._looked(), [], False
        for name, (drawing, marks) in self._before.items():
            later, draws = now.get(name, (drawing, marks))[1], drawing is not None
            # A generator that is seeded anew, or a tensor that is made anew, depends on nothing earlier.
            if later == marks or later[0] != marks[0]:
                continue
            is_tensor = not draws and bool(marks[0])
            if is_tensor and in_place:
                continue
            in_place = in_place or is_tensor
            keeps = f"hand it to run.keep({name if name.isidentifier() else 'other'}={name})"
            if draws:
                sentences.append(
                    f"{name} draws numbers, and no checkpoint has its state, so a start that resumes draws others: {keeps}"
                )
                continue
            unless = ", unless it is set anew before it is read" if is_tensor else ""
            sentences.append(
                f"{name} moves, and no checkpoint has it, so a start that resumes begins with another{unless}: make it a module, "
                f"and {keeps}"
            )
        return sentences

    def _looked(self) -> dict[str, tuple[Any, list[Any]]]:
        """`_look`. It only warns, so it says nothing where an object of the script raises, whatever that is."""
        try:
            return self._look()
        except Exception:  # noqa: BLE001 - a property, or a subclass of a tensor or a dictionary, may raise anything
            return {}

    def _look(self) -> dict[str, tuple[Any, list[Any]]]:
        """By their names: the generator, or None for tensors, which are not kept alive; what is another where they are made anew; and what
        changes where they move."""
        state, kept = self._state, self._state.user_state
        several = state.sync.parts if isinstance(state.sync, Several) else []
        models = [
            plain(model, dict(model.named_parameters())) for model in (state.model, *(part.model for part in several))
        ]
        average = {} if state.ema is None else dict(state.ema.average.named_parameters())
        ours = [*models[0].values(), *average.values(), *state.model.buffers()]
        held = storages([ours, states_of(kept.objects), states_of(kept.rank_objects), dict(kept.values)])
        found: dict[str, tuple[Any, list[Any]]] = {}
        for name, value in _reachable({**kept.objects, **kept.rank_objects}):
            if generators.is_generator(value):
                if not any(value is one for one in kept.generators.values()):
                    seed = value.initial_seed() if isinstance(value, torch.Generator) else None
                    found[name] = value, [(id(value), seed), generators.comparable(generators.state_of(value))]
                continue
            is_tensor = issubclass(type(value), torch.Tensor)
            tensors = [value] if is_tensor else _weights(value, models)
            tensors = [t for t in tensors if storage(t) not in held and not t.is_inference()]  # these count no changes
            if tensors and not (is_tensor and value.requires_grad):
                marks = [(WeakIdRef(tensor), tensor._version) for tensor in tensors]
                found[name] = None, [[ref for ref, _ in marks if is_tensor], *marks]
        return found


class Settings:
    """Numbers, switches and texts that the modules of the replicated models have in attributes, at the first save: a first pass may set
    what later ones leave, such as the longest sequence."""

    def __init__(self, state: TrainState) -> None:
        self._model = state.model
        self._before: dict[str, Any] | None = None

    def moved(self) -> list[str]:
        """Returns a sentence for those that have changed since then, each once."""
        now = self._now()
        if self._before is None:
            self._before = now
        names = [name for name, value in self._before.items() if now.get(name, value) != value]
        for name in names:
            del self._before[name]
        if not names:
            return []
        return [
            f"the attribute {first_of(names)} of the model changes, and no checkpoint has it, so a start that resumes begins with the "
            "first value: make it a buffer (register_buffer), or set it from run.steps or the epoch"
        ]

    def _now(self) -> dict[str, Any]:
        return {
            f"{plain_name(self._model, path)}.{name}".lstrip("."): value
            for path, module in self._model.named_modules()
            for name, value in vars(module).items()
            if type(value) in (bool, int, float, str) and value == value and name not in ("training", "call_super_init")
        }


def _weights(value: Any, models: list[dict[str, nn.Parameter]]) -> list[torch.Tensor]:
    """The tensors of what may be a copy of the weights of one of these models."""
    if issubclass(type(value), nn.Module):
        return [*value.parameters(), *value.buffers()] if "_modules" in vars(value) else []
    if not issubclass(type(value), (dict, list, tuple)) or len(value) > len(models[0]):
        return []
    is_dict = issubclass(type(value), dict)
    tensors = list(value.values() if is_dict else value)
    if not tensors or not all(issubclass(type(one), torch.Tensor) for one in tensors):
        return []
    if is_dict:
        return tensors if any(value.keys() & model.keys() for model in models) else []
    shapes = [one.shape for one in tensors]
    for model in models:
        trained = [p.shape for p in model.values() if p.requires_grad]
        every = [p.shape for p in model.values()]
        if shapes in (trained, every):
            return tensors
    return []


def _reachable(kept: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What the variables of the running functions hold, and attributes and items below them, without what these kept objects hold:
    a state may be made of copies."""
    named = ((name, value) for names in variables() for name, value in names.items() if name[:2] != "__")
    yield from _below(named, {id(value): value for _, value in _below(kept.items(), {})})


def _below(named: Iterable[tuple[str, Any]], known: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    """These values, and attributes and items below them, without those that are known."""
    waiting = deque((name, value, 0) for name, value in named)
    seen: dict[int, Any] = {}
    while waiting and len(seen) < MOST:
        name, value, depth = waiting.popleft()
        kind = type(value)
        if issubclass(kind, torch.Tensor) and not issubclass(kind, nn.Parameter):
            yield name, value
        if value is None or issubclass(kind, _OPAQUE) or kind.__module__.startswith("lockstep."):
            continue
        if id(value) in seen or id(value) in known:
            continue
        seen[id(value)] = value
        yield name, value
        if depth == DEPTH or issubclass(kind, nn.Module):
            continue
        waiting.extend((inner, one, depth + 1) for inner, one in _inside(name, value))


def _inside(name: str, value: Any) -> list[tuple[str, Any]]:
    """The items or attributes of a value."""
    if issubclass(type(value), dict):
        named = [(key, one) for key, one in dict.items(value) if type(key) in (str, int)]
        return [(f"{name}[{key!r}]", one) for key, one in named[:ITEMS]]
    if issubclass(type(value), (list, tuple)):
        return [(f"{name}[{number}]", one) for number, one in enumerate(value[:ITEMS])]
    try:
        attributes = object.__getattribute__(value, "__dict__")  # a proxy may compute it
    except AttributeError:
        return []
    return [(f"{name}.{attribute}", one) for attribute, one in list(attributes.items())]
