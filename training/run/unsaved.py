"""Warns of state of a script that a save loses: the script trains it outside its session, or it changes and is in no checkpoint, or it
differs between ranks.

A copy of the weights is a module that is not replicated (a teacher), or a dictionary or list of tensors like the parameters. A single
tensor counts if the script changes it in place, such as a centre or a queue. A tensor that is assigned anew may be a batch.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
import zlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdRef

from .. import generators
from ..checkpoint.state import Stateful, TrainState, parameter_names
from ..checkpoint.store import Rule
from ..contract import named
from ..parallel.exchange import all_gather_trees, is_same_on_all_ranks
from ..parallel.names import plain, plain_name
from ..parallel.packing import storage, storages
from ..resilience.closeness import differing_ranks, fingerprint, first_of, sums_of_bits
from .proof import attributes_of, text_of
from .replica import Several, tables_of
from .run import Run

SCORES = ("accuracy", "loss")
"""Endings of a score's name. Other logged numbers may differ between ranks: a time, a rate, a memory size."""
MOST, DEPTH, ITEMS = 5000, 3, 100
"""Limits: objects to inspect, levels of attributes below a variable, items of a dictionary or list."""
_OPAQUE = (types.ModuleType, type, str, bytes, int, float, torch.Tensor)


class Mark(NamedTuple):
    """A record of a variable's value, which shows whether the value has moved. It keeps no tensor alive."""

    generator: Any
    """The generator; None: the value holds tensors."""
    made: list[Any]
    """A list that differs if the value is created anew. Empty for copies of the weights."""
    state: list[Any]
    """A list that differs if the value moves. For tensors: (tensor, number of changes in place)."""
    is_module: bool = False


Marks = dict[str, Mark]
"""Name of the variable → its mark."""
Variables = list[tuple[str, Any]]
"""[(name, value)]: the script's variables, and what is below them."""


class Unsaved:
    """The checks at the start of the loop and at each save, which warn of each thing once. Variables are inspected at the first save, the
    second, the fourth, and so on."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.looks = 0
        """Number of saves so far that have run the checks."""
        _, self._held = _reached(run.state)
        """The marks of the variables at the start of the loop; after the first save, of copies of the weights that the loop has made."""
        self._known = set(self._held)
        """The names of all values that have been inspected."""
        self._settings: dict[str, Any] | None = None
        """The settings in the models' attributes at the first save. Only a first pass may set some, such as the longest sequence."""
        self.logged: dict[str, float] = {}
        """Numbers that this rank has logged since the last save."""

    def look(self) -> None:
        """Runs the checks of a save, and warns. Collective."""
        state, world = self._run.state, self._run.world
        self.looks += 1
        outside: list[str] = []
        if self.looks & (self.looks - 1) == 0:
            reached, now = _reached(state)
            outside += trained_outside(state, reached) if self.looks == 1 else []
            held, self._held = self._held, _copies(now, self._known)
            self._known |= now.keys()
            outside += [*_moved(held, now, in_loop=self.looks > 1), *_changed_in_place(self._held)]
        sentences = {sentence: sentence for sentence in [*outside, *self._changed_settings()]}
        if world.size > 1 and not is_same_on_all_ranks(mine := self._alike(), world):
            sentences |= unequal(all_gather_trees(mine, world))
        self.logged.clear()
        for about, sentence in sentences.items():
            self._run.warn(sentence, about)

    def _alike(self) -> dict[str, str]:
        """Returns the call that requires equal values on all ranks → a digest of its value, or the logged number."""
        kept = self._run.user_state
        objects = {f"run.keep({name}=…)": _print_of(stateful.state_dict()) for name, stateful in kept.objects.items()}
        values = {f"run.values[{name!r}]": _print_of(value) for name, value in kept.values.items()}
        scores = (*SCORES, Rule.of(self._run.config.checkpoint.keep_best).name)
        logged = {name: value for name, value in self.logged.items() if name.endswith(scores)}
        return {**objects, **values, **{f"run.log({name}=…)": f"{value:.4g}" for name, value in logged.items()}}

    def _changed_settings(self) -> Iterator[str]:
        """Yields a warning for numbers, switches and texts in attributes of models and optimizers that have changed, each once."""
        model = self._run.state.model
        values = {plain_name(model, name): value for name, value in attributes_of(model)}
        for name, optimizer in self._run.state.optimizers.items():
            values |= {f"{name}.{key}": value for key, value in vars(optimizer).items() if key[0] != "_"}
        now = {
            name: value for name, value in values.items() if type(value) in (bool, int, float, str) and value == value
        }
        before = self._settings = now if self._settings is None else self._settings
        if names := [name for name, value in before.items() if now.get(name, value) != value]:
            self._settings = {name: value for name, value in before.items() if name not in names}
            yield (
                f"the attribute {first_of(names)} changes, and no checkpoint has it, so a start that resumes begins with the first value: "
                "make it a buffer (register_buffer) or a part of the optimizer's state, or set it from run.steps or the epoch"
            )

    def compare_tables(self, made: Collection[Any]) -> None:
        """Warns of a table that differs between ranks, or from the last start. Collective.

        Args:
            made: the values in the modules at replication. A later pass may leave other values, such as the last attention.
        """
        model, kept, ids = self._run.state.model, self._run.user_state, {id(value) for value in made}
        tables = {plain_name(model, name): text_of(value) or "" for name, value in tables_of(model) if id(value) in ids}
        apart = differing_ranks(all_gather_trees(tables, self._run.world))
        before, kept.tables = kept.tables, tables
        mend = "make it a buffer (register_buffer), or draw it by a fixed seed"
        if apart:
            self._run.warn(
                f"the attribute {first_of([*apart])} of the model is another one on rank {named(next(iter(apart.values())))} than on rank "
                f"0, and run.replicate() sends parameters and buffers alone: unless it is to be a rank's own, {mend}"
            )
        changed = [name for name, digest in tables.items() if before.get(name, digest) != digest and name not in apart]
        if changed:
            self._run.warn(
                f"the attribute {first_of(changed)} of the model is another one than at the start before, and no checkpoint has it: {mend}"
            )


def unequal(of_ranks: Sequence[dict[str, str]]) -> dict[str, str]:
    """Returns call → warning, for each call whose value on a rank differs from rank 0's. A rank may lack the call.

    Args:
        of_ranks: for each rank: call → digest of its value, or the logged number.
    """
    sentences = {}
    for call, others in differing_ranks([{**of_ranks[0], **values} for values in of_ranks]).items():
        if call.startswith("run.log"):
            sentences[call] = (
                f"{call} gets {of_ranks[0][call]} on rank 0 and {of_ranks[others[0]][call]} on rank {others[0]}, and rank 0's alone is "
                "written: if each has measured samples of its own, add them up by run.sum()"
            )
        else:
            sentences[call] = (
                f"{call} is not the same on rank {named(others)} as on rank 0, whose alone is saved: compute it from the same samples on "
                "all ranks, or keep each rank's own by run.keep_of_rank()"
            )
    return sentences


@torch.no_grad()
def _print_of(tree: Any) -> str:
    """Returns a digest of the tensors, arrays, numbers and texts of a state. Leaves out tensors that are sharded over the ranks."""
    leaves = tree_leaves(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not hasattr(leaf, "placements")]
    arrays = [zlib.crc32(leaf.tobytes()) for leaf in leaves if isinstance(leaf, np.ndarray)]
    others = [
        f"{leaf:.4g}" if isinstance(leaf, float) else repr(leaf)
        for leaf in leaves
        if not isinstance(leaf, (torch.Tensor, np.ndarray))
    ]
    return str(zlib.crc32(repr([sums_of_bits(tensors).tolist(), arrays, others]).encode()))


def trained_outside(state: TrainState, reached: Variables) -> list[str]:
    """Returns a warning for each optimizer, schedule and weight that a resume loses or that the ranks train apart. Collective."""
    user_state, known = state.user_state, plain(state.model, dict(state.model.named_parameters()))
    kept, sentences = [*user_state.objects.items(), *user_state.rank_objects.items()], list[str]()
    used, names = set[torch.Tensor](), dict[torch.Tensor, str]()
    for name, value in (*reached, *kept):
        if issubclass(type(value), nn.Parameter):
            names.setdefault(value, name)
        elif issubclass(type(value), nn.Module) and "_modules" in vars(value):  # else it is not constructed
            for inner, parameter in value.named_parameters():
                names.setdefault(parameter, f"{name}.{inner}")
        elif issubclass(type(value), torch.optim.Optimizer) and not hasattr(value, "sync"):  # no session has made it
            moved = {p for group in getattr(value, "param_groups", ()) for p in group["params"] if p.requires_grad}
            used |= moved
            if moved and not user_state.has(value):
                first = next((f" over {n}" for n, p in known.items() if p in moved), "")
                sentences.append(
                    f"the optimizer {name} ({type(value).__name__}{first}) does not come from run.optimizer(), so no checkpoint "
                    f"holds its state: make it by run.optimizer(), or call {_keeps(name, '…')}"
                )
    ours = set[str]()
    for name, optimizer in state.optimizers.items():
        ours.update(*parameter_names(state.sync, optimizer))
        scheduled = any("initial_lr" in group for group in optimizer.param_groups)  # torch's schedules leave this mark
        if scheduled and not any(getattr(thing, "optimizer", None) is optimizer for _, thing in kept):
            sentences.append(
                f"a learning-rate schedule moves the rate of {name}, and no checkpoint has its place: run.keep(schedule=…) before the "
                "loop, or a start that resumes trains with other rates"
            )
    if unused := [name for name, p in known.items() if p.requires_grad and name not in ours and p not in used]:
        sentences.insert(
            0,
            f"{first_of(unused)} require a gradient, and no optimizer has them: give them to run.optimizer(), or freeze them by "
            "requires_grad_(False)",
        )
    learned = used | {p for p in names if p.requires_grad and p.is_leaf and p.grad is not None}
    of_rank = storages(_states_of(user_state.rank_objects))
    held = storages([_states_of(user_state.objects), dict(user_state.values)])
    outside = {
        names.get(p, f"a parameter of shape {list(p.shape)}"): p
        for p in learned - {*known.values()}
        if storage(p) not in of_rank
    }
    every = all_gather_trees({name: fingerprint(nn.ParameterList([p])) for name, p in outside.items()}, state.world)
    for name, parameter in sorted(outside.items()):
        apart = len({prints.get(name, every[0].get(name)) for prints in every}) > 1
        lost = parameter in used and storage(parameter) not in held
        if apart or lost:
            problems = ["differs between the ranks"] * apart + ["is in no checkpoint"] * lost
            sentences.append(
                f"{name} is trained outside of every replicated model: it {' and '.join(problems)}. Make it a parameter of the model "
                "before run.replicate()"
            )
    return sentences


def _states_of(objects: dict[str, Stateful]) -> list[Any]:
    return [stateful.state_dict() for stateful in objects.values()]


def _moved(before: Marks, now: Marks, in_loop: bool = False) -> Iterator[str]:
    """Yields a warning for each value that has moved and is in no checkpoint. Of single tensors it names only the first: a tensor that
    accumulates may be set to zero before it is read.

    Args:
        in_loop: whether the loop has made these values. Copies that it makes again and again are evaluated or compared.
    """
    in_place = False
    for name, mark in before.items():
        later = now.get(name, mark)
        # A generator that is seeded anew, or a tensor that is made anew, depends on nothing earlier.
        if later.state == mark.state or later.made != mark.made:
            continue
        if in_loop and _tensors(later).isdisjoint(_tensors(mark)):
            continue
        if mark.generator is not None:
            yield (
                f"{name} draws numbers, and no checkpoint has its state, so a start that resumes draws others: hand it to "
                f"{_keeps(name, name)}"
            )
            continue
        is_tensor = bool(mark.made)
        if not (is_tensor and in_place):
            yield _moves(name, may_be_set=is_tensor or in_loop)
        in_place = in_place or is_tensor


def _tensors(mark: Mark) -> set[Any]:
    return {tensor for tensor, _ in mark.state}


def _copies(marks: Marks, known: set[str]) -> Marks:
    """Returns the copies of the weights that the loop has made."""
    return {
        name: mark for name, mark in marks.items() if name not in known and mark.generator is None and not mark.made
    }


def _changed_in_place(copies: Marks) -> Iterator[str]:
    """Yields a warning for each copy of the weights that changes in place, such as the slow weights of a lookahead. A copy for one
    evaluation is written at most once, unless it is a module."""
    for name, mark in copies.items():
        if not mark.is_module and any(changes > 1 for _, changes in mark.state):
            yield _moves(name, may_be_set=True)


def _moves(name: str, may_be_set: bool) -> str:
    unless = ", unless it is set anew before it is read" if may_be_set else ""
    return (
        f"{name} moves, and no checkpoint has it, so a start that resumes begins with another{unless}: make it a module, and "
        f"hand it to {_keeps(name, name)}"
    )


def _keeps(name: str, value: str) -> str:
    return f"run.keep({name if name.isidentifier() else 'other'}={value})"


def _reached(state: TrainState) -> tuple[Variables, Marks]:
    """Returns the values of the running functions' variables, with the attributes and items below them, and the marks of those that no
    checkpoint holds. Leaves out the content of kept objects: a state may consist of copies. Returns nothing if an object of the script
    raises, since both only serve warnings."""
    user_state = state.user_state
    kept = [*state.optimizers.items(), *user_state.objects.items(), *user_state.rank_objects.items()]
    inside = [
        (name, vars(thing) if isinstance(thing, torch.optim.Optimizer) else thing)
        for name, thing in kept
        if not isinstance(thing, torch.optim.lr_scheduler.LRScheduler)  # it has an optimizer that need not be kept
    ]
    named = ((name, value) for names in _variables() for name, value in names.items() if name[:2] != "__")
    try:
        reached = list(_below(named, {id(value): value for _, value in _below(inside, {})}))
        return reached, dict(_marks(state, reached))
    except Exception:  # noqa: BLE001 - a property, or a subclass of a tensor or a dictionary, may raise anything
        return [], {}


def _marks(state: TrainState, reached: Variables) -> Iterator[tuple[str, Mark]]:
    kept = state.user_state
    several = state.sync.parts if isinstance(state.sync, Several) else []
    models = [
        plain(model, dict(model.named_parameters())) for model in (state.model, *(part.model for part in several))
    ]
    average = {} if state.ema is None else dict(state.ema.average.named_parameters())
    ours = [*models[0].values(), *average.values(), *state.model.buffers(), *state.sync.gradients()]
    held = storages([ours, _states_of(kept.objects), _states_of(kept.rank_objects), dict(kept.values)])
    for name, value in reached:
        if generators.is_generator(value):
            if not any(value is generator for generator in kept.generators.values()):
                seed = value.initial_seed() if isinstance(value, torch.Generator) else None
                yield name, Mark(value, [id(value), seed], [generators.comparable(generators.state_of(value))])
            continue
        is_tensor = issubclass(type(value), torch.Tensor)
        tensors = [value] if is_tensor else _weights(value, models)
        tensors = [t for t in tensors if storage(t) not in held and not t.is_inference()]  # these count no changes
        if tensors and not (is_tensor and value.requires_grad):
            versions = [(WeakIdRef(tensor), tensor._version) for tensor in tensors]
            yield (
                name,
                Mark(None, [ref for ref, _ in versions if is_tensor], versions, issubclass(type(value), nn.Module)),
            )


def _weights(value: Any, models: list[dict[str, nn.Parameter]]) -> list[torch.Tensor]:
    """Returns the tensors of a value that may be a copy of the weights of one of these models; [] for another value."""
    if issubclass(type(value), nn.Module):
        return [*value.parameters(), *value.buffers()] if "_modules" in vars(value) else []
    if not issubclass(type(value), (dict, list, tuple)) or len(value) > len(models[0]):
        return []
    named = value if issubclass(type(value), dict) else dict(enumerate(value))
    tensors = list(named.values())
    if not all(issubclass(type(tensor), torch.Tensor) for tensor in tensors):
        return []
    shapes = [tensor.shape for tensor in tensors]
    for model in models:
        trained, every = [p.shape for p in model.values() if p.requires_grad], [p.shape for p in model.values()]
        same = (name in model and tensor.shape == model[name].shape for name, tensor in named.items())
        if shapes in (trained, every) or any(same):
            return tensors
    return []


def _below(named: Iterable[tuple[str, Any]], known: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    """Yields these values, and the attributes and items below them, without the known ones."""
    waiting = deque((name, value, 0) for name, value in named)
    seen: dict[int, Any] = {}
    while waiting and len(seen) < MOST:
        name, value, depth = waiting.popleft()
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            yield name, value
        if value is None or issubclass(kind, _OPAQUE) or kind.__module__.startswith("lockstep."):
            continue
        if id(value) in seen or id(value) in known:
            continue
        seen[id(value)] = value
        yield name, value
        if depth == DEPTH or issubclass(kind, (nn.Module, torch.optim.Optimizer)):
            continue
        waiting.extend((inner, item, depth + 1) for inner, item in _inside(name, value))


def _inside(name: str, value: Any) -> list[tuple[str, Any]]:
    """Returns the items or attributes of a value, or what a function is bound to, with their names."""
    if issubclass(type(value), types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or ())  # a cell may be empty
        return [(f"{name}.{free}", item) for free, cell in cells for item in gc.get_referents(cell)]
    if issubclass(type(value), functools.partial):
        return [(f"{name}.func", value.func), (f"{name}.args", value.args), (f"{name}.keywords", value.keywords)]
    if issubclass(type(value), dict):
        named = [(key, item) for key, item in dict.items(value) if type(key) in (str, int)]
        return [(f"{name}[{key!r}]", item) for key, item in named[:ITEMS]]
    if issubclass(type(value), (list, tuple)):
        return [(f"{name}[{index}]", item) for index, item in enumerate(value[:ITEMS])]
    try:
        attributes = object.__getattribute__(value, "__dict__")  # a proxy may compute it
    except AttributeError:
        return []
    return [(f"{name}.{attribute}", item) for attribute, item in list(attributes.items())]


def _variables() -> Iterator[dict[str, Any]]:
    """Yields the variables of the running functions, innermost first, without ours."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if not frame.f_globals.get("__name__", "").startswith("lockstep."):
            yield {**frame.f_locals}
            yield {**frame.f_globals}
