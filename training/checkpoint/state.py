"""The content of a checkpoint: `gather` collects it from the ranks, and `scatter` distributes it to them again.

A gathered state is `{"shared": …, "ranks": [{"rng", "buffers", "extra", "average_buffers", "losses", "last", "sync"}, …]}`. Parameters,
optimizer and cursor are the same on all ranks; batch statistics, `get_extra_state` of modules, generators and a strategy's own state are
not. Parameters, and what the optimizer keeps for them, are keyed by name. A parameter that several modules share is stored once; `aliases`
has its other names.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn

from .. import generators
from ..data.pytree import mapped
from ..observe.steps import StepClock
from ..optim.ema import Ema
from ..parallel.exchange import all_gather_trees, broadcast_tree, gather_trees, scatter_trees
from ..parallel.names import plain, plain_name
from ..parallel.packing import split
from ..parallel.world import World
from ..sync.base import GradientSync

_PLAIN = ("steps", "samples", "data", "logged", "logged_in_epoch", "measured", "rates", "groups", "tables", "variables")
"""Plain values of `UserState`, which are the same on every rank."""


@dataclass(slots=True)
class Cursor:
    """The position of the run: `step` steps of epoch `epoch` are done. A resume needs only these two integers."""

    epoch: int = 0
    step: int = 0


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be saved and restored: a scheduler, a loader's cursor, a metric."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class UserState:
    """The objects of `Session.keep`, by name, and plain values.

    Objects' states are trees of tensors, numpy arrays, numbers, texts and None.
    """

    def __init__(self) -> None:
        self.objects: dict[str, Stateful] = {}
        """Objects that are the same on every rank: rank 0's states are saved, and all ranks get them back."""
        self.rank_objects: dict[str, Stateful] = {}
        """Objects that differ between ranks: each rank's state is saved, and the same rank gets it back."""
        self.generators: dict[str, Any] = {}
        """Random generators of the script. Each rank's states are saved, as those of the program's generators (`capture`)."""
        self.values: dict[str, Any] = {}
        """Values of the script, the same on every rank."""
        self.summary: dict[str, Any] = {}
        """Values of the script for summary.json. The same on every rank."""
        self.steps = self.samples = 0
        """Optimizer steps, and samples of all ranks, since the run began."""
        self.data: dict[str, Any] = {}
        """The division of the current epoch into batches. A resume within the epoch needs the same division."""
        self.logged: dict[str, float] = {}
        """The last value that the script logged under each name."""
        self.logged_in_epoch: dict[str, float] = {}
        """The last logged value under each name, of the current epoch only."""
        self.measured: list[str] = []
        """Names of the numbers that the function of a step returns with its loss."""
        self.rates: dict[str, float] = {}
        """Name of a group (`named_groups`) → its learning rate from the script."""
        self.groups: dict[str, str] = {}
        """Name of an optimizer → sha256 of the parameters in its groups from the script."""
        self.tables: dict[str, str] = {}
        """Name of a table in a module's attribute (`run/replica.py`) → its digest at replication."""
        self.variables: dict[str, str] = {}
        """Name of a variable of the script that has changed (`run/variables.py`) → its digest at the save."""
        self.epoch_generators: dict[str, Any] | None = None
        """This rank's generators at the start of the current epoch; None: no epoch is under way."""
        self.cursor_generators: dict[str, Any] | None = None
        """This rank's generators at the cursor; None: the current ones."""

    def add(self, objects: Mapping[str, Any], of_rank: bool = False) -> None:
        """Adds objects by name. Raises `TypeError` if no checkpoint can hold an object's state, `ValueError` for a name in use."""
        for name, stateful in objects.items():
            if name in self.objects or name in self.rank_objects or name in self.generators:
                raise ValueError(f"keep({name}=…) was called twice with this name: give the second one another name")
            if generators.is_generator(stateful):
                self.generators[name] = stateful
                continue
            if not isinstance(stateful, Stateful):
                raise TypeError(
                    f"keep({name}=…) is a {type(stateful).__name__} without state_dict() and load_state_dict(): "
                    "put plain values into run.values"
                )
            check_tree(stateful.state_dict(), f"keep({name}=…)")
            (self.rank_objects if of_rank else self.objects)[name] = stateful

    def capture(self, device: torch.device) -> dict[str, Any]:
        """Returns the states of the program's generators and of the script's (`restore` takes them)."""
        process = {name: generators.state_of(one) for name, one in generators.of_process(device).items()}
        return {**process, "own": {name: generators.state_of(one) for name, one in self.generators.items()}}

    def restore(self, states: dict[str, Any], device: torch.device) -> None:
        """Restores the states from `capture`; a generator without a saved state keeps its own. Raises `ValueError`, `TypeError`."""
        for present, saved in ((generators.of_process(device), states), (self.generators, states["own"])):
            for name in present.keys() & saved.keys():
                self._give(name, present[name], saved[name])

    @staticmethod
    def _give(name: str, generator: Any, state: Any) -> None:
        try:
            generators.set_state(generator, state)
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            raise ValueError(f"{name} is a generator of another kind than the one that was saved, {error}") from error

    def restore_alike(self, states: dict[str, Any], world: World) -> list[str]:
        """Restores the script's generators at another number of ranks, if they are the same on all ranks. Collective.

        Args:
            states: name → state; None: the saved states were not the same on all ranks.

        Returns:
            The names of the saved generators that are not restored.
        """
        own = {name: generators.comparable_state(generator) for name, generator in self.generators.items()}
        mine = {name: zlib.crc32(repr(state).encode()) for name, state in own.items()}
        prints = all_gather_trees(mine, world)
        anew = []
        for name in sorted(self.generators.keys() & states.keys()):
            if states[name] is None or any(others.get(name) != mine[name] for others in prints):
                anew.append(name)
            else:
                self._give(name, self.generators[name], states[name])
        return anew

    def has(self, wanted: object) -> bool:
        """Returns whether this object is kept, by identity, so that a resume restores its state."""
        return any(wanted is kept for kept in (*self.objects.values(), *self.rank_objects.values()))

    def shared_state(self) -> dict[str, Any]:
        """Returns the shared part of the state, for rank 0."""
        return {
            "objects": {name: stateful.state_dict() for name, stateful in self.objects.items()},
            **{name: getattr(self, name) for name in ("values", "summary", *_PLAIN)},
        }

    def rank_state(self) -> dict[str, Any]:
        """Returns this rank's part of the state. Raises `TypeError`, on all ranks alike, for a value that no checkpoint can hold."""
        check_tree(self.values, "run.values")
        check_tree(self.summary, "run.summary")
        return {
            "objects": {name: stateful.state_dict() for name, stateful in self.rank_objects.items()},
            "epoch_generators": self.epoch_generators,
        }

    def load(self, shared: dict[str, Any], rank: dict[str, Any] | None) -> None:
        """Restores the objects' states. `rank`: this rank's saved part; None: the checkpoint has another world size.

        Raises:
            ValueError: the checkpoint has other objects than the script keeps now.
        """
        _load(self.objects, shared["objects"])
        for held, saved in ((self.values, shared["values"]), (self.summary, shared["summary"])):  # by the script, too
            held.clear()
            held.update(saved)
        for name in _PLAIN:
            setattr(self, name, shared[name])
        if rank is not None:
            _load(self.rank_objects, rank["objects"])
            self.epoch_generators = rank["epoch_generators"]
        elif self.rank_objects:
            name = next(iter(self.rank_objects))
            raise ValueError(f"{name} is each rank's own, and the number of ranks has changed")


def _load(objects: dict[str, Stateful], states: dict[str, Any]) -> None:
    _check_names(objects, states)
    for name, stateful in objects.items():
        stateful.load_state_dict(states[name])


def _check_names(ours: Collection[str], saved: Collection[str], kind: str = "") -> None:
    """Raises a `ValueError` that says who alone has a name."""
    if different := sorted({*ours} ^ {*saved}):
        where = "this run" if different[0] in ours else "the checkpoint"
        raise ValueError(f"{kind}{different[0]} is in {where} only")


def check_tree(tree: Any, place: str) -> None:
    """Raises a `TypeError` that names the first value that no checkpoint can hold, and its place."""
    try:
        split(tree)
    except TypeError as error:
        raise TypeError(
            f"{place}/{error}: use tensors, numpy arrays of numbers, numbers, texts, lists and dictionaries"
        ) from None


@dataclass(slots=True)
class TrainState:
    world: World
    model: nn.Module
    optimizers: Mapping[str, torch.optim.Optimizer]
    sync: GradientSync
    ema: Ema | None
    clock: StepClock
    losses: torch.Tensor
    """float64 [2 + names]: the sum of this rank's losses in the epoch, its number of samples, and the sums that `user_state.measured`
    names. Under `exact` they are those of all ranks."""
    cursor: Cursor = field(default_factory=Cursor)
    history: dict[str, Any] = field(default_factory=dict)
    """Plain values of the run: best and last accuracy, restarts, preemptions."""
    user_state: UserState = field(default_factory=UserState)
    """The state of the script."""
    last: torch.Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))
    """Like `losses`, of the last step alone."""
    canary: dict[str, Any] = field(default_factory=dict)
    """Results that show whether another machine computes the same bits (`run/logical_workers.py`); empty: no check is wanted."""
    evaluating: list[str] = field(default_factory=list)
    """The modules in evaluation mode at the cursor, for `gather`."""

    @property
    def models(self) -> list[nn.Module]:
        """The model, and the average of its weights if there is one."""
        return [self.model] if self.ema is None else [self.model, self.ema.average]

    @property
    def of_all(self) -> bool:
        """Whether each rank has the losses of all ranks, and the mean of their batch statistics, after each step."""
        return self.sync.batch_parts is not None

    def over_ranks(self, losses: torch.Tensor) -> torch.Tensor:
        """Returns the sum of `losses` over the ranks, on the CPU. Collective, unless each rank has the sum already (`of_all`)."""
        losses = losses.cpu().clone()
        if not self.of_all:
            dist.all_reduce(losses)
        return losses


def gather(state: TrainState) -> dict[str, Any] | None:
    """Returns the whole state on rank 0. Elsewhere it may be None. Collective.

    Its tensors are the live ones: copy them before the next step.
    """
    rank_state: dict[str, Any] = {
        "rng": state.user_state.cursor_generators or state.user_state.capture(state.world.device),
        "buffers": _buffers(state.model),
        "extra": {name: module.get_extra_state() for name, module in with_extra_state(state.model).items()},
        "average_buffers": _buffers(state.ema.average) if state.ema else {},
        "losses": state.losses,
        "last": state.last[:2],
        "sync": state.sync.state_dict(),
        "kept": state.user_state.rank_state(),
    }
    ranks = gather_trees(rank_state, state.world)
    model = state.sync.full_parameters(state.model)
    average = state.sync.full_parameters(state.ema.average) if state.ema else {}
    optimizers = {name: state.sync.optimizer_state(optimizer) for name, optimizer in state.optimizers.items()}
    if ranks is None or model is None or average is None:
        return None
    named = {
        name: _by_name(saved, parameter_names(state.sync, state.optimizers[name]))
        for name, saved in optimizers.items()
        if saved is not None
    }
    first = next(iter(named))
    shared = {
        "model": plain(state.model, model),
        "average": plain(state.model, average),
        "aliases": _aliases(state.model),
        "frozen": [name for name, parameter in _parameters(state.model).items() if not parameter.requires_grad],
        "evaluating": [plain_name(state.model, name) for name in state.evaluating],
        "transient": _transient(state.model),
        "optimizer": named.pop(first),
        "further_optimizers": named,
        "cursor": [state.cursor.epoch, state.cursor.step],
        "trained_seconds": state.clock.trained,
        "history": state.history,
        "kept": state.user_state.shared_state(),
        "canary": state.canary,
    }
    return {"shared": shared, "ranks": ranks}


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return plain(model, dict(model.named_parameters()))


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return plain(model, dict(model.named_buffers()))


def with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules that get and set a state besides parameters and buffers, by name."""
    of_torch = {nn.Module.get_extra_state, nn.Module.set_extra_state}
    named = model.named_modules()
    has = {path: one for path, one in named if not of_torch & {type(one).get_extra_state, type(one).set_extra_state}}
    return plain(model, has)


def check_extra_state(model: nn.Module) -> None:
    """Raises `TypeError` if no checkpoint can hold what `get_extra_state` of a module returns."""
    for name, module in with_extra_state(model).items():
        check_tree(module.get_extra_state(), f"{name or type(module).__name__}.get_extra_state()")


def _transient(model: nn.Module) -> list[str]:
    """Returns the buffers that the model's `state_dict` leaves out."""
    return [
        plain_name(model, f"{prefix}.{name}".lstrip("."))
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in sorted(module._non_persistent_buffers_set)
    ]


def scatter(gathered: dict[str, Any] | None, state: TrainState, source: int = 0) -> list[str]:
    """Restores every rank from its part of the gathered state, which rank `source` has read from a checkpoint. Collective.

    If the world size has changed, every rank gets the mean of the saved batch statistics, and rank 0's extra state of modules. Generators
    keep their fresh values, or under `exact` get those of rank 0. Generators of the script that are the same on all ranks get their states.
    A strategy merges the saved ranks' states as far as it can (`merged_state`).

    Returns:
        The names of the script's saved generators that are not restored.

    Raises:
        ValueError: the checkpoint has other parameters, shapes or optimizer groups than this run.
    """
    gathered = gathered if state.world.rank == source else None
    shared, ranks = (None, None) if gathered is None else (gathered["shared"], gathered["ranks"])
    same_size = broadcast_tree(None if ranks is None else len(ranks), state.world, source) == state.world.size
    if same_size:  # each gets its own part alone
        rank_state = scatter_trees(ranks, state.world, source)
    else:
        rank_state = broadcast_tree(None if ranks is None else _merged(ranks, state.sync), state.world, source)
        if rank_state["misfit"] is not None:
            raise ValueError(rank_state["misfit"])
    shared = broadcast_tree(shared, state.world, source)
    parameters = _parameters(state.model)
    _copy(shared["model"], parameters, state.sync.copy_into_shard)
    frozen, evaluating = set(shared["frozen"]), set(shared["evaluating"])
    for name, parameter in parameters.items():
        parameter.requires_grad_(name not in frozen)
    for name, module in state.model.named_modules():
        module.training = plain_name(state.model, name) not in evaluating
    _load_optimizers(shared, state)
    state.cursor.epoch, state.cursor.step = shared["cursor"]
    state.clock.trained = float(shared["trained_seconds"])
    state.history.update(shared["history"])
    alike = state.of_all
    if same_size or alike:
        state.user_state.restore(rank_state["rng"], state.world.device)
        anew = []
    else:
        anew = state.user_state.restore_alike(rank_state["own"], state.world)
    mine = same_size or alike or state.world.leader
    for name in ("losses", "last"):
        sums = rank_state[name].to(state.losses, copy=True)
        setattr(state, name, sums if mine else torch.zeros_like(sums))
    state.sync.load_state_dict(rank_state["sync"])
    state.user_state.load(shared["kept"], rank_state["kept"] if same_size else None)
    if alike and not same_size:
        state.user_state.epoch_generators = rank_state["epoch_generators"]
    state.canary = shared["canary"]
    _copy(rank_state["buffers"], _buffers(state.model))
    if state.ema:
        _copy(shared["average"], _parameters(state.ema.average), state.sync.copy_into_shard)
        _copy(rank_state["average_buffers"], _buffers(state.ema.average))
    extra = with_extra_state(state.model)
    _check_names(extra, rank_state["extra"], "the extra state of the module ")
    for name, module in extra.items():
        module.set_extra_state(rank_state["extra"][name])
    return anew


def _merged(ranks: list[dict[str, Any]], sync: GradientSync) -> dict[str, Any]:
    """Returns the state with which every rank starts at another world size. Its `misfit`: why the saved parts cannot be merged, or None.

    Only the rank that has read the checkpoint merges, so that the parts of all saved ranks are not sent.
    """
    try:
        sums = [torch.cat([rank["last"], rank["losses"]]) for rank in ranks]
        last, losses = (sums[0] if sync.batch_parts is not None else sum(sums)).tensor_split([2])  # type: ignore[union-attr]
        first, *others = [rank["rng"]["own"] for rank in ranks]
        alike = {
            name
            for name, saved in first.items()
            if all(generators.comparable(own.get(name)) == generators.comparable(saved) for own in others)
        }
        return {
            "losses": losses, "last": last, "buffers": mean_of([rank["buffers"] for rank in ranks]),
            "average_buffers": mean_of([rank["average_buffers"] for rank in ranks]),
            "sync": sync.merged_state([rank["sync"] for rank in ranks]), "misfit": None,
            "own": {name: saved if name in alike else None for name, saved in first.items()},
            "rng": ranks[0]["rng"], "extra": ranks[0]["extra"], "epoch_generators": ranks[0]["kept"]["epoch_generators"],
        }  # fmt: skip
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        return {"misfit": f"{type(error).__name__}: {error}"}


def mean_of(buffers: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Returns the mean over the ranks of each floating-point buffer, in the buffer's type, and rank 0's value of others (counters).

    Args:
        buffers: for each rank name → buffer; all ranks have the same names and shapes.
    """
    means = dict(buffers[0])
    for name, first in buffers[0].items():
        if first.is_floating_point() and not all(torch.equal(rank[name], first) for rank in buffers):
            means[name] = torch.stack([rank[name].double() for rank in buffers]).mean(0).to(first.dtype)
    return means


def averaged_buffers(model: nn.Module, world: World) -> dict[str, torch.Tensor]:
    """Returns the mean of the model's buffers over the ranks (`mean_of`), on the CPU. The model's buffers stay unchanged. Collective."""
    ranks = gather_trees({name: buffer.cpu() for name, buffer in model.named_buffers()}, world)
    return dict(broadcast_tree(None if ranks is None else mean_of(ranks), world))


@torch.no_grad()
def _copy(
    saved: Mapping[str, torch.Tensor],
    targets: Mapping[str, torch.Tensor],
    write: Callable[[torch.Tensor, torch.Tensor], object] = torch.Tensor.copy_,
) -> None:
    _check_names(targets.keys(), saved.keys(), "the checkpoint belongs to another model: ")
    for name, target in targets.items():
        if saved[name].shape != target.shape:
            raise ValueError(f"the checkpoint has {name} of shape {list(saved[name].shape)}, not {list(target.shape)}")
        write(target, saved[name])


# The optimizer's state by the names of the parameters; torch numbers them.
#
# torch:    {"state": {0: {"momentum_buffer": …}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
# by name:  {"state": {"conv1.weight": {"momentum_buffer": …}}, "own": {}, "param_groups": [{"lr": 0.1, "params": ["conv1.weight", …]}]}
#
# `own` holds state that some optimizers keep for no parameter, such as a step count.
#


def _by_name(state: dict[str, Any], names: list[list[str]]) -> dict[str, Any]:
    """Returns a full `state_dict` of an optimizer, with names instead of numbers.

    Args:
        names: the parameter names of each group.
    """
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    name_of = dict(zip(numbers, itertools.chain.from_iterable(names)))
    return {
        **state,
        "state": {name_of[key]: kept for key, kept in state["state"].items() if key in name_of},
        "own": {key: kept for key, kept in state["state"].items() if key not in name_of},
        "param_groups": [{**group, "params": group_names} for group, group_names in zip(state["param_groups"], names)],
    }


def _load_optimizers(shared: dict[str, Any], state: TrainState) -> None:
    """Loads the checkpoint's optimizers with their groups: a script may add a group, or move a parameter, in the middle of a run.

    Raises:
        ValueError: the checkpoint has other optimizers, or an optimizer that does not fit.
    """
    first, *further = state.optimizers
    saved_by_name = {first: shared["optimizer"], **shared["further_optimizers"]}
    _check_names(further, shared["further_optimizers"], "the optimizer ")
    parameters = _parameters(state.model)
    for name, optimizer in state.optimizers.items():
        saved = saved_by_name[name]
        names = [name for group in saved["param_groups"] for name in group["params"]]
        unknown = next((name for name in names if name not in parameters), None)
        if unknown is not None or len({*names}) < len(names):
            raise ValueError(
                f"the checkpoint's groups of parameters do not fit the model: {unknown or 'a name is double'}"
            )
        state.sync.regroup(
            optimizer,
            [{**group, "params": [parameters[name] for name in group["params"]]} for group in saved["param_groups"]],
        )
        states = dict(saved["state"])
        for name in states.keys() & names:
            if parameters[name].dtype != shared["model"][name].dtype:
                states[name] = _as_dtype(states[name], parameters[name].dtype)
        numbered = _by_number({**saved, "state": states})
        # A setting that the checkpoint does not have is the optimizer's own: its schedule, say, is new.
        live = optimizer.state_dict()["param_groups"]
        groups = [{**new, **old} for old, new in zip(numbered["param_groups"], live)]
        state.sync.load_optimizer_state(optimizer, {**numbered, "param_groups": groups})


def _as_dtype(entries: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Returns the entries in the dtype of their parameter. `step` has its own."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return {name: value if name == "step" else mapped(value, cast) for name, value in entries.items()}


def _by_number(saved: dict[str, Any]) -> dict[str, Any]:
    """Returns the inverse of `_by_name`. Raises `ValueError` for the state of a parameter that is in no group."""
    names = [name for group in saved["param_groups"] for name in group["params"]]
    number = {name: position for position, name in enumerate(names)}
    if unknown := saved["state"].keys() - number:
        raise ValueError(f"the optimizer has no parameter {min(unknown)}")
    return {
        **{key: value for key, value in saved.items() if key != "own"},
        "state": {**{number[name]: kept for name, kept in saved["state"].items()}, **saved["own"]},
        "param_groups": [{**group, "params": [number[n] for n in group["params"]]} for group in saved["param_groups"]],
    }


def parameter_names(sync: GradientSync, optimizer: torch.optim.Optimizer, called: str = "optimizer") -> list[list[str]]:
    """Returns the names of the parameters in each of the optimizer's groups.

    Raises:
        ValueError: a tensor is not a parameter of the model.
    """
    names = {id(parameter): name for name, parameter in _parameters(sync.model).items()}
    groups = sync.parameter_groups(optimizer)
    for number, (known, live) in enumerate(zip(groups, optimizer.param_groups)):
        strange = next((parameter for parameter in (*known, *live["params"]) if id(parameter) not in names), None)
        if strange is not None:
            raise ValueError(
                f"{called}.param_groups[{number}] has a parameter of shape {list(strange.shape)} that is not in the replicated model: put "
                "it into the model, or, if a layer was replaced, take its old parameters out of the group and of optimizer.state"
            )
    return [[names[id(parameter)] for parameter in group] for group in groups]


def _aliases(model: nn.Module) -> dict[str, str]:
    """Returns the other names of shared parameters and buffers: alias → the name under which the checkpoint holds the tensor."""
    first = {id(tensor): name for name, tensor in (_parameters(model) | _buffers(model)).items()}
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    names = {plain_name(model, name): first[id(tensor)] for name, tensor in every}
    return {name: original for name, original in names.items() if name != original}
