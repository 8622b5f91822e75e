"""All that a checkpoint holds, and how it is gathered from the ranks and distributed to them again.

A gathered state is `{"shared": …, "ranks": [{"rng", "buffers", "average_buffers", "losses", "sync"}, …]}`: parameters, optimizer
and cursor are the same on all ranks; batch statistics, generators and a strategy's own state are not. Parameters, and what
the optimizer keeps for them, are keyed by name. A parameter that several modules share is stored once; `aliases` has its other names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import generators
from ..observe.clock import StepClock
from ..optim.ema import Ema
from ..parallel.exchange import broadcast_tree, gather_trees, reduced, scatter_trees
from ..parallel.names import plain, plain_name
from ..parallel.world import World
from ..sync.base import GradientSync
from .user_state import UserState

_COUNTS = ("attempts", "failures", "preemptions", "stopped_of")
"""The names in the history that count something."""


@dataclass(slots=True)
class Cursor:
    """Where the run is: `step` steps of epoch `epoch` are done. A resume needs no more than these two integers."""

    epoch: int = 0
    step: int = 0


@dataclass(slots=True)
class TrainState:
    world: World
    model: nn.Module
    optimizers: Mapping[str, torch.optim.Optimizer]
    sync: GradientSync
    ema: Ema | None
    cursor: Cursor
    clock: StepClock
    losses: torch.Tensor
    """float64 [2 + names]: the sum of this rank's losses in the epoch, its number of samples, and the sums that `user_state.measured`
    names; under `exact` those of all ranks."""
    history: dict[str, Any]
    """Plain values that the run carries along: best and last accuracy, restarts, preemptions."""
    user_state: UserState = field(default_factory=UserState)
    """The state of the script."""
    canary: dict[str, Any] = field(default_factory=dict)
    """Results that show whether another machine computes the same bits (`run/logical_workers.py`); empty: no check is wanted."""
    evaluating: list[str] = field(default_factory=list)
    """The modules that are in evaluation mode where the cursor stands, for `gather`."""

    @property
    def of_all(self) -> bool:
        """Whether each rank has what all have measured of a step: their losses, and the mean of their batch statistics."""
        return self.sync.batch_parts is not None

    def over_ranks(self, losses: torch.Tensor) -> torch.Tensor:
        """The sum of `losses` over the ranks, on the CPU. Collective, unless each has that of all."""
        losses = losses.cpu().clone()
        if not self.of_all:
            dist.all_reduce(losses)
        return losses


def gather(state: TrainState) -> dict[str, Any] | None:
    """The whole state on rank 0. Elsewhere it may be None. Collective.

    Its tensors are the live ones: copy them before the next step.
    """
    rank_state: dict[str, Any] = {
        "rng": state.user_state.cursor_generators or state.user_state.capture(state.world.device),
        "buffers": _buffers(state.model),
        "average_buffers": _buffers(state.ema.average) if state.ema else {},
        "losses": state.losses,
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


def _transient(model: nn.Module) -> list[str]:
    """The buffers that the model's `state_dict` leaves out."""
    return [
        plain_name(model, f"{prefix}.{name}".lstrip("."))
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in sorted(module._non_persistent_buffers_set)
    ]


def scatter(gathered: dict[str, Any] | None, state: TrainState, source: int = 0) -> list[str]:
    """Gives every rank its part of the gathered state, which rank `source` has read from a checkpoint. Collective.

    At another world size than it was saved at, every rank gets the mean of the saved batch statistics; generators keep
    their fresh values, or under `exact` get those of rank 0, and those of the script that all ranks have alike get their states;
    and a strategy makes of the saved ranks' states what it can (`merged_state`).

    Returns:
        The names of the script's generators that begin anew, although they were saved.

    Raises:
        ValueError: the checkpoint has other parameters, shapes or optimizer groups than this run.
    """
    gathered = gathered if state.world.rank == source else None
    saved_by = broadcast_tree(None if gathered is None else len(gathered["ranks"]), state.world, source)
    same_size = saved_by == state.world.size
    ranks = None if gathered is None else gathered["ranks"]
    if same_size:  # each gets its own part alone
        rank_state = scatter_trees(ranks, state.world, source)
    else:
        rank_state = broadcast_tree(None if ranks is None else _merged(ranks, state.sync), state.world, source)
        if rank_state["misfit"] is not None:
            raise ValueError(rank_state["misfit"])
    shared = broadcast_tree(None if gathered is None else gathered["shared"], state.world, source)
    _check_forms(shared, rank_state["losses"])
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
    if state.ema:
        _copy(shared["average"], _parameters(state.ema.average), state.sync.copy_into_shard)
    alike = state.of_all
    if same_size or alike:
        state.user_state.restore(rank_state["rng"], state.world.device)
        anew = []
    else:
        anew = state.user_state.restore_alike(rank_state["own"], state.world)
    mine = same_size or alike or state.world.leader
    losses = rank_state["losses"].to(state.losses, copy=True)
    state.losses = losses if mine else torch.zeros_like(losses)
    state.sync.load_state_dict(rank_state["sync"])
    state.user_state.load(shared["kept"], rank_state["kept"] if same_size else None)
    if alike and not same_size:
        state.user_state.epoch_generators = rank_state["epoch_generators"]
    state.canary = shared["canary"]
    _copy(rank_state["buffers"], _buffers(state.model))
    if state.ema:
        _copy(rank_state["average_buffers"], _buffers(state.ema.average))
    return anew


def _check_forms(shared: dict[str, Any], losses: torch.Tensor) -> None:
    """Raises `ValueError` for what no save has written. Its writer may seal anything, and the run would fail at the first step."""
    (epoch, step), kept, history = shared["cursor"], shared["kept"], shared["history"]
    counts = {"epoch": epoch, "step": step, "steps": kept["steps"], "samples": kept["samples"]}
    counts |= {name: history[name] for name in _COUNTS if name in history}
    for name, count in counts.items():
        if type(count) is not int or not 0 <= count < 1 << 63:
            raise ValueError(f"its count of {name} is {count!r:.40}")
    if losses.shape != (2 + len(kept["measured"]),):
        raise ValueError(f"its sums of losses have the shape {list(losses.shape)}, not [{2 + len(kept['measured'])}]")
    for saved in (shared["optimizer"], *shared["further_optimizers"].values()):
        rates = [group[name] for group in saved["param_groups"] for name in ("lr", "initial_lr") if name in group]
        for rate in rates:
            if not (type(rate) in (int, float) or (isinstance(rate, torch.Tensor) and rate.numel() == 1)):
                raise ValueError(f"it has the learning rate {rate!r:.40}")


def _merged(ranks: list[dict[str, Any]], sync: GradientSync) -> dict[str, Any]:
    """The state with which every rank starts at another world size. `misfit`: why the saved parts cannot be merged, or None.

    Only the rank that read the checkpoint merges, so that the parts of all saved ranks need not be sent.
    """
    try:
        losses = [rank["losses"] for rank in ranks]
        first, *others = [rank["rng"].get("own", {}) for rank in ranks]
        alike = {
            name
            for name, saved in first.items()
            if all(generators.comparable(own.get(name)) == generators.comparable(saved) for own in others)
        }
        return {
            "losses": losses[0] if sync.batch_parts is not None else sum(losses), "buffers": mean_of([rank["buffers"] for rank in ranks]),
            "average_buffers": mean_of([rank["average_buffers"] for rank in ranks]),
            "sync": sync.merged_state([rank["sync"] for rank in ranks]), "misfit": None,
            "own": {name: saved if name in alike else None for name, saved in first.items()},
            "rng": ranks[0]["rng"], "epoch_generators": ranks[0]["kept"]["epoch_generators"],
        }  # fmt: skip
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        return {"misfit": f"{type(error).__name__}: {error}"}


def evaluated_weights(gathered: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The weights that evaluation used: the average where there is one, with batch statistics averaged over the ranks.

    The names are those of a `state_dict`: a parameter that several modules share has an entry for each of its names.
    """
    shared, ranks = gathered["shared"], gathered["ranks"]
    weights, buffers = ("average", "average_buffers") if shared["average"] else ("model", "buffers")
    tensors = {**shared[weights], **mean_of([rank[buffers] for rank in ranks])}
    tensors |= {alias: tensors[name] for alias, name in shared["aliases"].items()}
    return {name: tensor for name, tensor in tensors.items() if name not in shared["transient"]}


def mean_of(buffers: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The mean over the ranks of each floating-point buffer, in its own type; of others (counters), rank 0's value.

    Args:
        buffers: of each rank, by name; all ranks have the same names and shapes.
    """
    means = {}
    for name, first in buffers[0].items():
        if first.is_floating_point() and not all(torch.equal(rank[name], first) for rank in buffers):
            means[name] = torch.stack([rank[name].double() for rank in buffers]).mean(0).to(first.dtype)
        else:
            means[name] = first
    return means


@torch.no_grad()
def averaged_buffers(model: nn.Module, world: World) -> dict[str, torch.Tensor]:
    """Copies of the model's buffers, averaged over the ranks in one collective. The model keeps its own."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    floating = [buffer for buffer in buffers.values() if buffer.is_floating_point()]
    if world.size > 1 and floating:
        flat = torch.cat([buffer.reshape(-1).double() for buffer in floating])
        if flat.is_cuda:
            dist.all_reduce(flat)
        else:
            flat = reduced(flat, world)
        flat /= world.size
        for buffer, piece in zip(floating, flat.split([buffer.numel() for buffer in floating])):
            buffer.copy_(piece.view(buffer.shape))
    return buffers


@torch.no_grad()
def _copy(
    saved: Mapping[str, torch.Tensor],
    targets: Mapping[str, torch.Tensor],
    write: Callable[[torch.Tensor, torch.Tensor], object] = torch.Tensor.copy_,
) -> None:
    if saved.keys() != targets.keys():
        different = sorted(saved.keys() ^ targets.keys())
        raise ValueError(f"the checkpoint belongs to another model: {different[0]} is in only one of the two")
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
    """A full `state_dict` of an optimizer, with names instead of numbers.

    Args:
        names: the parameter names of each group.
    """
    name_of = {
        number: name
        for group, group_names in zip(state["param_groups"], names)
        for number, name in zip(group["params"], group_names)
    }
    return {
        **state,
        "state": {name_of[key]: kept for key, kept in state["state"].items() if key in name_of},
        "own": {key: kept for key, kept in state["state"].items() if key not in name_of},
        "param_groups": [{**group, "params": group_names} for group, group_names in zip(state["param_groups"], names)],
    }


def _load_optimizers(shared: dict[str, Any], state: TrainState) -> None:
    """The checkpoint's groups hold: a script may have added some, or moved a parameter, in the middle of the run.

    Raises:
        ValueError: the checkpoint has other optimizers, or an optimizer that does not fit.
    """
    first, *further = state.optimizers
    saved_by_name = {first: shared["optimizer"], **shared["further_optimizers"]}
    if different := sorted({*further} ^ shared["further_optimizers"].keys()):
        where = "the script" if different[0] in further else "the checkpoint"
        raise ValueError(f"the optimizer {different[0]} is in {where} only")
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
        numbered = _by_number(saved)
        # A setting that the checkpoint does not have is the optimizer's own: its schedule, say, is new.
        live = optimizer.state_dict()["param_groups"]
        groups = [{**new, **old} for old, new in zip(numbered["param_groups"], live)]
        state.sync.load_optimizer_state(optimizer, {**numbered, "param_groups": groups})


def _by_number(saved: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `_by_name`. Raises `ValueError` for the state of a parameter that is in no group."""
    names = [name for group in saved["param_groups"] for name in group["params"]]
    number = {name: position for position, name in enumerate(names)}
    if unknown := saved["state"].keys() - number:
        raise ValueError(f"the optimizer has no parameter {min(unknown)}")
    return {
        **{key: value for key, value in saved.items() if key != "own"},
        "state": {**{number[name]: kept for name, kept in saved["state"].items()}, **saved["own"]},
        "param_groups": [{**group, "params": [number[n] for n in group["params"]]} for group in saved["param_groups"]],
    }


def parameter_names(sync: GradientSync, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The names of the parameters in each of the optimizer's groups.

    Raises:
        ValueError: a tensor is not a parameter of the model.
    """
    names = {id(parameter): name for name, parameter in _parameters(sync.model).items()}
    groups = sync.parameter_groups(optimizer)
    strange = next((p for group in groups for p in group if id(p) not in names), None)
    if strange is not None:
        raise ValueError(
            f"the optimizer has a parameter of shape {list(strange.shape)} that is not in the replicated model: put it into the model "
            "before run.replicate()"
        )
    return [[names[id(parameter)] for parameter in group] for group in groups]


def _aliases(model: nn.Module) -> dict[str, str]:
    """The other names of shared parameters and buffers: alias → the name under which the checkpoint holds the tensor."""
    first = {id(tensor): name for name, tensor in (_parameters(model) | _buffers(model)).items()}
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    names = {plain_name(model, name): first[id(tensor)] for name, tensor in every}
    return {name: original for name, original in names.items() if name != original}
