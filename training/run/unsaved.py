"""Warns of state of a script that a save loses: the script trains it outside its session, or it changes and is in no checkpoint, or it
differs between ranks.
"""

from __future__ import annotations

import sys
import types
import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .. import generators
from ..checkpoint.state import Stateful, TrainState, parameter_names
from ..checkpoint.store import Rule
from ..contract import named, say
from ..parallel.exchange import all_gather_trees, is_same_on_all_ranks
from ..parallel.names import plain, plain_name
from ..parallel.packing import storage, storages
from ..resilience.closeness import differing_ranks, fingerprint, first_of, sums_of_bits
from .proof import attributes_of, text_of
from .replica import tables_of
from .run import Run
from .variables import LIST, Reached, Variables, beginning, counting, reached, reads, tables

T = TypeVar("T")
SCORES = ("accuracy", "loss")
"""Endings of a score's name. Other logged numbers may differ between ranks: a time, a rate, a memory size."""
_MENDS = {
    "the model's attribute": "make it a buffer (register_buffer), or draw it by a fixed seed",
    "the variable": "draw it inside `with Session(…)`, which seeds all ranks and starts alike, or seed before it",
}
"""Kind of a table → what to do about it."""
NAMES = 12
"""Names in one warning, at most."""
_LAST_BATCH = "the last batch on {} ranks"


class Unsaved:
    """The checks at the start of the loop and at each save, which warn of each thing once. Variables are inspected at the first save, the
    second, the fourth, and so on."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.looks = 0
        """Number of saves so far that have run the checks."""
        self._variables = Variables(run.state)
        self._resuming = {"epochs", "batches"} if run.resumed else set[str]()
        """The loops that have not begun since the run resumed."""
        self._settings: dict[str, Any] | None = None
        """The settings in the models' attributes at the first save. Only a first pass may set some, such as the longest sequence."""
        self.logged: dict[str, float] = {}
        """Numbers that this rank has logged since the last save."""
        self.code: types.CodeType | None = None
        """The code of the last step's function; None: there is none."""
        self.samples = 0
        """This rank's samples of that step."""
        self._batch: tuple[Any, list[int]] | None = None
        """The last batch of a loader with worker processes, and the versions of its tensors. None: the loop has no such loader."""
        self._moved: dict[str, str] = {}
        """Digests of the variables that this rank has changed, from `note_variables` to the next look."""

    def look(self) -> None:
        """Runs the checks of a save, and warns. Collective."""
        state, world = self._run.state, self._run.world
        self.looks += 1
        outside: list[str] = []
        if self.looks & (self.looks - 1) == 0:
            outside += trained_outside(state, reached(state)) if self.looks == 1 else []
            outside += [_moves(name, value) for name, value in self._variables.moving()]
        sentences = {sentence: sentence for sentence in [*outside, *self._changed_settings()]}
        if world.size > 1 and not is_same_on_all_ranks(mine := self._alike(), world):
            sentences |= unequal(all_gather_trees(mine, world))
        self.logged.clear()
        for about, sentence in sentences.items():
            self._run.warn(sentence, about)

    def note_variables(self) -> None:
        """Notes the script's variables and its last batch for a checkpoint, or for an admitted rank."""
        changed = [*self._variables.changed(self.samples)]
        self._moved = {name: text for name, text, is_compared in changed if is_compared}
        noted = {name: text for name, text, _ in changed}
        if self._batch is not None and self._batch[1] == _versions(self._batch[0]):  # else the script has changed it
            noted[_LAST_BATCH.format(self._run.world.size)] = _print_of_batch(self._batch[0])
        self._batch, self._run.user_state.variables = None, noted

    def noting(self, batches: Iterator[T]) -> Iterator[T]:
        """Yields the batches of a loader, and notes each for the next save."""
        for batch in batches:
            self._batch = batch, _versions(batch)
            yield batch

    def compare_batch(self, skipped: Any = None) -> None:
        """Warns if a loader with worker processes does not repeat the batches that the run skips as it resumes. Such processes have
        generators of their own, which no checkpoint has.

        Args:
            skipped: the last of the batches; None: there is none.
        """
        before = self._run.user_state.variables.get(_LAST_BATCH.format(self._run.world.size))
        if skipped is not None and before not in (None, _print_of_batch(skipped)):
            self._warn_here(
                "run.iterate(loader) skips the batches that were used before, and the loader gives other ones now: let its processes "
                "draw from torch's generators, which are seeded anew in each epoch, or keep the loader itself (run.keep_of_rank)"
            )

    def resumes(self, over: str, compares: bool) -> None:
        """Warns, if the run resumes, of what the script does not get back.

        Args:
            over: the loop that begins: `epochs` or `batches`.
            compares: whether the loop continues where the save was, so that the script's variables are to have the values of the save.
        """
        run = self._run
        if over in self._resuming:  # on each rank, since the state of a kept object may be a collective
            names = self._variables.differing(run.user_state.variables) if compares else []
            if names:
                listed = ", ".join(names[:NAMES]) + (f" and {len(names) - NAMES} more" if len(names) > NAMES else "")
                self._warn_here(
                    "variables of the script have other values than at the save that this start resumes from, and no checkpoint has "
                    f"them: {listed}. Put what training reads into run.values or run.keep(), or compute it from run.steps or the epoch"
                )
            if (name := counting()) is not None:
                self._warn_here(
                    f"{name}() goes over run.{over}(), and this start resumes: what {name}() counts, or takes besides, begins anew. Take "
                    "the epoch from run.epochs() and the step from run.steps, and put a second dataset into the first (StackDataset)"
                )
        self._resuming -= {"epochs", "batches"} if compares else {over}

    def _warn_here(self, sentence: str) -> None:
        """Warns on rank 0, and on a rank that was admitted: the others do not resume then."""
        if self._run.world.leader:
            self._run.warn(sentence)
        elif self._run.world.replacement:
            say(f"warning: rank {self._run.world.rank}: {sentence}", sys.stderr)

    def _alike(self) -> dict[str, str]:
        """Returns the call that requires equal values on all ranks → a digest of its value, or the logged number."""
        kept = self._run.user_state
        objects = {f"run.keep({name}=…)": _print_of(stateful.state_dict()) for name, stateful in kept.objects.items()}
        values = {f"run.values[{name!r}]": _print_of(value) for name, value in kept.values.items()}
        scores = (*SCORES, Rule.of(self._run.config.checkpoint.keep_best).name)
        logged = {name: value for name, value in self.logged.items() if name.endswith(scores)}
        moved, self._moved = self._moved, {}
        variables = {f"the variable {name}": text for name, text in moved.items() if reads(self.code, name)}
        numbers = {f"run.log({name}=…)": f"{value:.4g}" for name, value in logged.items()}
        return {**objects, **values, **variables, **numbers}

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
        run, model, ids = self._run, self._run.state.model, {id(value) for value in made}
        of_model = ((plain_name(model, name), value) for name, value in tables_of(model) if id(value) in ids)
        mine = {f"the model's attribute {name}": text_of(value) or "" for name, value in of_model}
        # A variable that has changed since, such as by a broadcast, is left out, on a rank or on all.
        of_script = tables(run.state).items()
        mine |= {f"the variable {name}": text for name, text in of_script if run.tables.get(name) == text}
        every = [mine] if is_same_on_all_ranks(mine, run.world) else all_gather_trees(mine, run.world)
        apart = {
            name: ranks
            for name, ranks in differing_ranks(every).items()  # a rank may have taken its share of numbers
            if not name.startswith("the variable")
            or (all(name in its for its in every) and not mine[name].startswith(LIST))
        }
        before, run.user_state.tables = run.user_state.tables, mine
        changed = [name for name in mine if _is_another(name, before, mine) and name not in apart]
        for kind, mend in _MENDS.items():
            if of_ranks := [name for name in apart if name.startswith(kind)]:
                run.warn(
                    f"{first_of(of_ranks)} is another one on rank {named(apart[of_ranks[0]])} than on rank 0, and run.replicate() sends "
                    f"parameters and buffers alone: unless it is to be a rank's own, {mend}"
                )
            if of_starts := [name for name in changed if name.startswith(kind)]:
                run.warn(
                    f"{first_of(of_starts)} is another one than at the start before, and no checkpoint has it: {mend}"
                )


def unequal(of_ranks: Sequence[dict[str, str]]) -> dict[str, str]:
    """Returns call → warning, for each call whose value on a rank differs from rank 0's. A rank may lack the call.

    Args:
        of_ranks: for each rank: call, or variable → digest of its value, or the logged number.
    """
    sentences = {}
    for call, others in differing_ranks([{**of_ranks[0], **values} for values in of_ranks]).items():
        if call.startswith("run.log"):
            sentences[call] = (
                f"{call} gets {of_ranks[0][call]} on rank 0 and {of_ranks[others[0]][call]} on rank {others[0]}, and rank 0's alone is "
                "written: if each has measured samples of its own, add them up by run.sum()"
            )
        elif call.startswith("the variable"):
            sentences[call] = (
                f"{call} has another value on rank {named(others)} than on rank 0, and the function of run.step() reads it. Unless it is "
                "to be a rank's own, N ranks train another model than one: add up with run.sum() what each has"
            )
        else:
            sentences[call] = (
                f"{call} is not the same on rank {named(others)} as on rank 0, whose alone is saved: compute it from the same samples on "
                "all ranks, or keep each rank's own by run.keep_of_rank()"
            )
    return sentences


def _is_another(name: str, before: dict[str, str], now: dict[str, str]) -> bool:
    """Returns whether a table has other values than before. A variable of another shape may belong to what a start plans anew."""
    if before.get(name, now[name]) == now[name]:
        return False
    return not name.startswith("the variable") or before[name].partition(":")[0] == now[name].partition(":")[0]


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(batch) if type(leaf) is torch.Tensor and leaf.layout is torch.strided]


def _versions(batch: Any) -> list[int]:
    return [tensor._version for tensor in _tensors(batch) if not tensor.is_inference()]


def _print_of_batch(batch: Any) -> str:
    """Returns a digest of the first numbers of each dimension of a batch's tensors."""
    return str(zlib.crc32(repr([beginning(tensor) for tensor in _tensors(batch)]).encode()))


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


def trained_outside(state: TrainState, reached: Sequence[Reached]) -> list[str]:
    """Returns a warning for each optimizer, schedule and weight that a resume loses or that the ranks train apart. Collective."""
    user_state, known = state.user_state, plain(state.model, dict(state.model.named_parameters()))
    kept, sentences = [*user_state.objects.items(), *user_state.rank_objects.items()], list[str]()
    used, names = set[torch.Tensor](), dict[torch.Tensor, str]()
    for name, value in (*((one.name, one.value) for one in reached), *kept):
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


def _moves(name: str, value: Any) -> str:
    if generators.is_generator(value):
        return (
            f"{name} draws numbers, and no checkpoint has its state, so a start that resumes draws others: hand it to "
            f"{_keeps(name, name)}"
        )
    unless = "" if issubclass(type(value), nn.Module) else ", unless it is set anew before it is read"
    return (
        f"{name} moves, and no checkpoint has it, so a start that resumes begins with another{unless}: make it a module, and "
        f"hand it to {_keeps(name, name)}"
    )


def _keeps(name: str, value: str) -> str:
    return f"run.keep({name if name.isidentifier() else 'other'}={value})"
