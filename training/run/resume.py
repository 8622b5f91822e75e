"""The checkpoint that a start resumes from, and whether it fits the script's objects."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..checkpoint import store
from ..checkpoint.state import TrainState, UserState, parameter_names, with_extra_state
from ..contract import ENV_LIVE, UserError, first_line, to_stderr
from ..observe.metrics import Metrics
from ..observe.rundir import RunDirectory
from ..parallel.packing import pack, storage
from ..parallel.world import World
from ..sync.base import GradientSync
from .replica import named_groups

Groups = dict[str, list[list[str]]]
"""Name of the optimizer → the names of the parameters in each of its groups."""


def newest_checkpoint(
    directory: RunDirectory | None, world: World, metrics: Metrics, verified: Path | None
) -> Path | None:
    """Returns this rank's newest verified checkpoint; None: it has none. Raises `UserError` if all are corrupt.

    Args:
        verified: a checkpoint that was verified a moment ago.
    """
    if directory is None:
        return None
    store.clean(directory.checkpoints)

    def warn(message: str) -> None:
        metrics.corrupt_file("checkpoint")
        directory.event("corrupt_checkpoint", message=message)
        to_stderr(f"warning: rank {world.rank}: {message}")

    return store.newest_verified(directory.checkpoints, warn, verified)


def load(path: Path) -> dict[str, Any]:
    """Returns the gathered state of a verified checkpoint. Raises `UserError` if its files hold no state."""
    try:
        return dict(store.load(path))
    except (store.CorruptCheckpoint, TypeError, ValueError) as error:
        raise UserError(f"its checksums match, but {error} ({path}): restore it from a backup, or remove it") from None


@contextlib.contextmanager
def misfits_explained() -> Iterator[None]:
    """Turns errors in the block into `UserError`: the checkpoint verifies but does not fit the model, whose code has changed."""
    try:
        yield
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise UserError(
            f"the checkpoint does not fit the model or its optimizer ({type(error).__name__}: {first_line(error)}): "
            "resume with the code that wrote it, or start over in another run directory. A script that changes the model after "
            "run.replicate() makes the same change before it if run.resumed"
        ) from error


def check_live(sync: GradientSync, of_rank: Mapping[str, Any]) -> None:
    """Raises `UserError` if `launch --live` cannot continue this run without a lost rank."""
    if not os.environ.get(ENV_LIVE):
        return
    if sync.batch_parts is None:
        raise UserError(
            f"--live needs sync.name=exact, under which any ranks compute the same, and this run has {sync.settings.name}: set it, "
            "or leave out --live"
        )
    if not Path("/proc/self/fd").is_dir():
        raise UserError("--live needs Linux, which shows a process its connections: leave out --live")
    if of_rank:
        raise UserError(
            f"--live cannot continue without a lost rank's state, and keep_of_rank() has {next(iter(of_rank))}: leave out --live"
        )


class Made:
    """The learning rates and groups of the optimizers from the script, before a checkpoint changes them."""

    def __init__(self, sync: GradientSync, optimizers: dict[str, Any]) -> None:
        self._sync, self._optimizers = sync, optimizers
        groups = named_groups(optimizers)
        self._rates = {name: float(group.get("initial_lr", group.get("lr", 0.0))) for name, group in groups}
        self._groups = self._current()

    def _current(self) -> Groups:
        return {name: parameter_names(self._sync, optimizer) for name, optimizer in self._optimizers.items()}

    def compare(self, kept: UserState, warn: Callable[[str], None]) -> None:
        """Warns if the script has other learning rates or groups than at the last start. Those of the checkpoint hold."""
        rates, kept.rates = kept.rates, self._rates
        changed = [
            f"{name}: {rates[name]:g} → {rate:g}" for name, rate in self._rates.items() if rates.get(name, rate) != rate
        ]
        if changed:
            warn(
                f"the script has changed a learning rate ({', '.join(changed)}), and the checkpoint's stays, with its schedule: set it "
                "after run.keep() to train with another"
            )
        made, current = self._groups, self._current()
        digests = {name: hashlib.sha256(repr(groups).encode()).hexdigest() for name, groups in made.items()}
        before, kept.groups = kept.groups, digests
        changed = [
            name for name in made if before.get(name, digests[name]) != digests[name] and made[name] != current[name]
        ]
        if changed:
            warn(
                f"the script has changed the groups of parameters of {', '.join(changed)}, and those of the checkpoint hold: change them "
                "after run.keep(), or start over in another run directory"
            )


class Snapshot:
    """A copy of this rank's state, before code of the script that a start which resumes runs again. `put_back` undoes the code's changes in
    place: the script may hold a group or a tensor. So they count once.

    Args:
        again: whether the code runs for the second time, on a state that has its changes already. Then an optimizer may be given a group
            that it has. Else the run may end within the code, and is saved as it was before.
    """

    def __init__(self, state: TrainState, again: bool) -> None:
        self.again, self._kept, optimizers = again, state.user_state, [*state.optimizers.values()]
        modules = [module for model in state.models for module in model.modules()]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        # Some keep a state that is no parameter's.
        states = [one for optimizer in optimizers for one in optimizer.state.values()]
        self._modes = [(module, module.training) for module in modules]
        containers: list[Any] = [*groups, *(one for one in states if isinstance(one, dict))]
        containers += [one for module in modules for one in (module._modules, module._parameters, module._buffers)]
        containers += [one for optimizer in optimizers for one in (optimizer.state, optimizer.param_groups)]
        containers += [group["params"] for group in groups]
        self._containers = [(one, [*one] if isinstance(one, list) else {**one}) for one in containers]
        tensors = [tensor for model in state.models for tensor in (*model.parameters(), *model.buffers())]
        rates = [value for group in groups for name, value in group.items() if name != "params"]
        tensors += [leaf for leaf in tree_leaves([states, rates]) if isinstance(leaf, torch.Tensor)]
        self._tensors = [(tensor, tensor.detach(), tensor.requires_grad, _copy(_of_rank(tensor))) for tensor in tensors]
        self._extra = [(one, _copy(one.get_extra_state())) for one in with_extra_state(state.model).values()]
        objects = (*self._kept.objects.values(), *self._kept.rank_objects.values())
        # To ask a loader for its state may move it.
        asked = [one for one in objects if isinstance(one, nn.Module) or not hasattr(one, "__iter__")]
        self._objects = [(one, _copy(one.state_dict())) for one in asked]
        self._values = [(one, _copy(one)) for one in (self._kept.values, self._kept.summary)]
        # A strategy may have replaced the method already.
        self._tolerant = [(one, vars(one).get("add_param_group")) for one in optimizers if again]
        for optimizer, _ in self._tolerant:
            known = {id(parameter) for group in state.sync.parameter_groups(optimizer) for parameter in group}
            vars(optimizer)["add_param_group"] = functools.partial(_add, optimizer.add_param_group, known)

    @torch.no_grad()
    def put_back(self) -> None:
        """Restores this rank's state, where it has changed. Collective if `state_dict` or `load_state_dict` of a kept object is.

        Raises the error of the first kept object that does not take its state back, once the others have theirs.
        """
        errors = list[Exception]()
        for optimizer, method in self._tolerant:
            del optimizer.add_param_group
            if method is not None:
                vars(optimizer)["add_param_group"] = method
        for live, before in self._containers:
            live.clear()
            (live.extend if isinstance(live, list) else live.update)(before)
        for module, mode in self._modes:
            module.training = mode
        for tensor, memory, is_trained, copied in self._tensors:
            if storage(tensor) != storage(memory) or tensor.shape != memory.shape:
                tensor.data = memory  # `tensor.data` may be that of an average now
            if not torch.equal(now := _of_rank(tensor), copied.to(now.device)):
                now.copy_(copied)
            tensor.requires_grad_(is_trained)
        for module, extra in self._extra:
            if not _is_same(module.get_extra_state(), extra):
                module.set_extra_state(extra)
        for stateful, kept in self._objects:
            try:
                if not _is_same(stateful.state_dict(), kept):
                    stateful.load_state_dict(kept)
            except Exception as error:  # noqa: BLE001 - of an object of the script
                errors.append(error)
        for values, copied in self._values:
            same = {name: value for name, value in values.items() if name in copied and _is_same(value, copied[name])}
            values.clear()
            values.update({**copied, **same})
        if errors:
            raise errors[0]


def _of_rank(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a tensor that is sharded over the ranks, or a tensor that is not."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _is_same(tree: Any, other: Any) -> bool:
    try:
        return torch.equal(pack({"": tree}), pack({"": other}))
    except TypeError:  # no checkpoint could hold the new value
        return False


def _copy(tree: Any) -> Any:
    """Returns a copy in the memory of the host. A tensor that is sharded over the ranks stays on its device."""

    def of_tensor(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone() if hasattr(tensor, "placements") else tensor.detach().to("cpu", copy=True)

    return copy.deepcopy(tree_map_only(torch.Tensor, of_tensor, tree))


def _add(add: Callable[[dict[str, Any]], None], known: set[int], group: dict[str, Any]) -> None:
    """Adds a group to an optimizer that does not have all its parameters already."""
    parameters = group["params"]
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
    unknown = [one for one in parameters if id(one[1] if isinstance(one, tuple) else one) not in known]
    if unknown or not parameters:
        add({**group, "params": parameters})
