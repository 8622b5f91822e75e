"""Warns of script state that a checkpoint does not hold, or that differs between ranks: optimizers and weights outside the session,
and changed variables.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
import types
import zlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .. import generators
from ..checkpoint.state import Stateful, TrainState, parameter_names
from ..checkpoint.store import Rule
from ..contract import first_of, named, to_stderr
from ..parallel.exchange import all_gather_trees, is_same_on_all_ranks
from ..parallel.names import plain, plain_name
from ..parallel.packing import storage, storages
from ..resilience.closeness import differing_ranks, fingerprint, sums_of_bits
from .contents import Reached, reached
from .proof import text_of
from .replica import tables_of
from .run import Run
from .variables import CHOICE, KIND, LIST, Variables, beginning, counting, tables

SCORES = ("accuracy", "loss")
"""Suffixes of logged names whose values must be equal on all ranks. Other numbers may differ: a time, a rate, a memory size."""
_VARIABLE = "the variable "
_MENDS = {
    "the model's attribute": "make it a buffer (register_buffer), or create it from a fixed seed",
    _VARIABLE: "create it inside `with Session(…)`, which seeds all ranks and starts alike, or set a seed before",
}
"""Kind of a constant tensor → remedy."""
_LOADED = ". Weights that only the first start loads: load them in each start, or keep their module (run.keep)"
_GENERATOR, _BEFORE = "torch's generator", "torch's generator before the loop"
NAMES = 50
"""Names in one warning, at most."""
_LAST_BATCH, _FIRST_BATCH = "the last batch on {} ranks", "the first batch on {} ranks"


class Unsaved:
    """The checks at the start of the loop and at each save. Each warning appears once. They inspect variables at the saves 1, 2, 4, 8 …."""

    def __init__(self, run: Run) -> None:
        self._run, self._began = run, time.time()
        self.looks = 0
        """Number of saves so far that have run the checks."""
        self.variables = Variables(run.state)
        self._resuming = {"epochs", "batches"} if run.resumed else set[str]()
        """The loops that have not begun since the run resumed."""
        self.logged: dict[str, float] = {}
        """Numbers that this rank has logged since the last save."""
        self.code: types.CodeType | None = None
        """The code of the last step's function; None: there is none."""
        self.samples = 0
        """This rank's samples of that step."""
        self._batch: tuple[Any, list[int]] | None = None
        """The last batch of a loader of `run.iterate`, and the versions of its tensors. None: the loop has no such loader."""
        self._first = run.user_state.variables.get(_FIRST_BATCH.format(run.world.size))
        """Digest of the first batch of an epoch of `run.batches`."""
        self.given: Any = None
        """The batch that the script has."""
        self._before = run.user_state.variables if run.resumed else {}
        """The digests in the checkpoint, until `compare_kinds` has compared them."""
        self._apart: list[str] | None = None
        """Names of the functions, classes and hooks that differ in the first step; None: no step has compared them."""
        self._moved: dict[str, str] = {}
        """Variable that this rank has changed, and that ranks must agree on, from `note_variables` to the next look → digest."""
        self.is_uneven = False
        """Whether a step was computed outside a function, of other numbers of samples on other ranks."""
        self._generator = _generator()
        """torch's generator when the loop began."""

    def look(self) -> None:
        """Runs the checks of a save, and warns. Collective."""
        state, world = self._run.state, self._run.world
        self.looks += 1
        if self.looks & (self.looks - 1) == 0:
            things = reached(state)
            sentences = [*trained_outside(state, things), *temporary(things, self._run.path, self._began)]
            named = " ".join(["", *sentences])
            sentences += [_moves(name, one) for name, one in self.variables.moving() if f" {name}[" not in named]
            for sentence in sentences:
                self._run.warn(sentence)
        if world.size > 1 and not is_same_on_all_ranks(mine := self._alike(), world):
            for about, sentence in unequal(all_gather_trees(mine, world)).items():
                self._run.warn(sentence, about)
        self.logged.clear()

    def note_variables(self) -> None:
        """Notes the script's variables and its last batch for a checkpoint, or for a replacement rank that joins."""
        changed = [*self.variables.changed(self.samples, self.given)]
        self._moved = {name: text for name, text, is_shared in changed if is_shared}
        noted = {name: text for name, text, _ in changed}
        if self._batch is not None and self._batch[1] == _versions(self._batch[0]):  # else the script has changed it
            noted[_LAST_BATCH.format(self._run.world.size)] = _print_of_batch(self._batch[0])
        if self._first is not None:
            noted[_FIRST_BATCH.format(self._run.world.size)] = self._first
        self._batch, self._run.user_state.variables = None, noted

    def noting(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches of a loader, and notes each for the next save."""
        for batch in batches:
            self._batch = batch, _versions(batch)
            yield batch

    def compare_batch(self, skipped: Any = None) -> None:
        """Warns if a loader does not repeat the batches that the run skips as it resumes. Worker processes have generators of their own,
        which no checkpoint has, and an order may depend on the weights.

        Args:
            skipped: the last of the batches; None: there is none.
        """
        before = self._run.user_state.variables.get(_LAST_BATCH.format(self._run.world.size))
        if skipped is not None and before not in (None, _print_of_batch(skipped)):
            self._warn_here(
                "run.iterate(loader) skips the batches that were used before the resume, but the loader gives other batches now. Begin it "
                "in the same state in each epoch: open files and sort lists there, draw only from torch's generators, without "
                "persistent_workers. Keep an order that depends on the weights in run.values, or keep the loader (run.keep_of_rank)"
            )

    def note_first(self, batch: Any) -> None:
        """Notes the first batch of an epoch of `run.batches`."""
        self._first = _print_of_batch(batch)

    def compare_first(self, batch: Any) -> None:
        """Warns if the first batch of the epoch within which the run resumes is another one than before."""
        if self._first not in (None, _print_of_batch(batch)):
            self._warn_here(
                "the dataset of run.batches() has other samples than when this epoch began, so the run does not resume exactly, unless "
                "they depend on run.steps or on what is kept: keep what they are computed from, such as labels from earlier weights, in "
                "run.values. Fix the seed of a random split"
            )

    def resumes(self, over: str, compares: bool, left: bool = True) -> None:
        """Warns, if the run resumes, of what the script does not get back.

        Args:
            over: the loop that begins: `epochs` or `batches`.
            compares: whether the loop continues exactly at the save. Then the script's variables must have their values from the save.
            left: whether the loop may have batches left.
        """
        self.variables.begin()
        if over in self._resuming:  # on all ranks: `state_dict()` of a kept object may be a collective
            self._warn_of(self.variables.differing(self._run.user_state.variables) if compares else [])
            if left and (name := counting()) is not None:
                self._warn_here(
                    f"{name}() goes over the loop of the {over}, and this start resumes: its count and other iterables begin anew. Use "
                    "the epoch of run.epochs() and run.steps, and combine two datasets with StackDataset"
                )
        self._resuming -= {"epochs", "batches"} if compares else {over}

    def compare_kinds(self) -> None:
        """Warns of chosen objects that differ from the save in the first step, since a script may choose by the epoch or `run.steps`; and
        of functions, classes and hooks that also differ after it, since a step may make them."""
        if self._before:
            names = self.variables.differing(self._before, KIND)
            if self._apart is None:
                self._warn_of(self.variables.differing(self._before, CHOICE))
                self._apart = names
            else:
                self._warn_of([name for name in names if name in self._apart])
                self._before = {}

    def _warn_of(self, names: list[str]) -> None:
        if names:
            self._warn_here(
                f"these variables differ from their values at the save, and no checkpoint has them: {first_of(names, NAMES)}. Put those "
                "that training reads into run.values, run.keep() or a module's buffer, or compute them from run.steps or the epoch. The "
                "others, such as a list for a plot, lack what came before this start"
            )

    def _warn_here(self, sentence: str) -> None:
        """Warns on rank 0, and on a replacement rank. When a replacement joins, it alone resumes."""
        if self._run.world.leader:
            self._run.warn(sentence)
        elif self._run.world.replacement:
            to_stderr(f"warning: rank {self._run.world.rank}: {sentence}")

    def _alike(self) -> dict[str, str]:
        """Returns call or variable → digest of its value, or the logged number. These values must be equal on all ranks."""
        kept = self._run.user_state
        objects = {f"run.keep({name}=…)": _print_of(stateful.state_dict()) for name, stateful in kept.objects.items()}
        values = {f"run.values[{name!r}]": _print_of(value) for name, value in kept.values.items()}
        scores = (*SCORES, Rule.of(self._run.config.checkpoint.keep_best).name)
        moved, self._moved = self._moved, {}
        read = [name for name in moved if self.variables.is_read(self.code, name)]
        variables = {f"{_VARIABLE}{name}": moved[name] for name in read}
        if self.is_uneven:
            variables |= {_GENERATOR: _generator(), _BEFORE: self._generator}
        numbers = {f"run.log({name}=…)": f"{value:.4g}" for name, value in self.logged.items() if name.endswith(scores)}
        return {**objects, **values, **variables, **numbers}

    def compare_tables(self, made: Collection[Any]) -> None:
        """Warns of a table that differs between ranks, or from the last start. Collective.

        Args:
            made: the values in the modules at replication. A later forward pass may store others there, such as the last attention weights.
        """
        run, model, ids = self._run, self._run.state.model, {id(value) for value in made}
        of_model = ((plain_name(model, name), value) for name, value in tables_of(model) if id(value) in ids)
        mine = {f"the model's attribute {name}": text_of(value) or "" for name, value in of_model}
        of_script = {f"{_VARIABLE}{name}": text for name, text in tables(run.state).items()}
        # Without variables that have changed since the session opened, for example by a broadcast.
        mine |= {name: text for name, text in of_script.items() if run.tables.get(name.removeprefix(_VARIABLE)) == text}
        every = [mine] if is_same_on_all_ranks(mine, run.world) else all_gather_trees(mine, run.world)
        apart = {
            name: ranks
            for name, ranks in differing_ranks(every).items()  # a rank may hold its own share of a list of indices
            if not name.startswith(_VARIABLE) or (all(name in its for its in every) and not mine[name].startswith(LIST))
        }
        # Of what the session has made only modules: tensors may be scratch, a rank's share, or what threads round in other ways.
        modules = {name: text for name, text in of_script.items() if text.startswith(":")}
        before, now = run.user_state.tables, mine | modules
        run.user_state.tables = now
        # Variables that the last start had changed at its save are compared with their values there (`resumes`).
        others = {*apart, *(f"{_VARIABLE}{name}" for name in run.user_state.variables)}
        changed = [name for name in now if _is_another(name, before, now) and name not in others]
        for kind, mend in _MENDS.items():
            if of_ranks := [name for name in apart if name.startswith(kind)]:
                run.warn(
                    f"rank {named(apart[of_ranks[0]])} has other values of {first_of(of_ranks)} than rank 0, and run.replicate() sends "
                    f"only parameters and buffers. Unless this is intended, {mend}"
                )
            if of_starts := [name for name in changed if name.startswith(kind)]:
                run.warn(
                    f"the start before had other values of {first_of(of_starts)}, and no checkpoint has them: {mend}"
                    f"{_LOADED if kind == _VARIABLE else ''}"
                )


def unequal(of_ranks: Sequence[dict[str, str]]) -> dict[str, str]:
    """Returns call → warning, for each call whose value on a rank differs from rank 0's. A missing value counts as equal, unless it is of a
    variable, which has changed on other ranks.

    Args:
        of_ranks: for each rank: call, or variable → digest of its value, or the logged number.
    """
    sentences = {}
    variables = {call: "" for values in of_ranks for call in values if call.startswith(_VARIABLE)}
    apart = differing_ranks([{**of_ranks[0], **variables, **values} for values in of_ranks])
    if apart.pop(_BEFORE, None):  # the script has seeded each rank for itself
        apart.pop(_GENERATOR, None)
    for call, others in apart.items():
        if call.startswith("run.log"):
            sentences[call] = (
                f"{call} gets {of_ranks[0][call]} on rank 0 and {of_ranks[others[0]][call]} on rank {others[0]}, and only rank 0's value "
                "is written: if each rank measures its own samples, add the results up with run.sum()"
            )
        elif call == _GENERATOR:
            sentences[call] = (
                f"{call} has drawn other numbers on rank {named(others)} than on rank 0: the ranks have different numbers of samples, and "
                "the network of run.step(loss) draws for them. If the script draws numbers that all ranks need alike, use "
                "run.step(function, …), which seeds torch's generators for the function"
            )
        elif call.startswith(_VARIABLE):
            sentences[call] = (
                f"{call} differs between rank {named(others)} and rank 0, and the function of run.step() reads it. Unless intended, "
                "combine the ranks' values with run.sum(): N ranks now train another model than one rank"
            )
        else:
            sentences[call] = (
                f"{call} differs between rank {named(others)} and rank 0, and only the state of rank 0 is saved: compute it from the same "
                "samples on all ranks, or keep one state per rank with run.keep_of_rank()"
            )
    return sentences


def _is_another(name: str, before: dict[str, str], now: dict[str, str]) -> bool:
    """Returns whether a constant tensor has other values than before. A variable of another shape does not count: each start may size it
    differently."""
    if before.get(name, now[name]) == now[name]:
        return False
    return not name.startswith(_VARIABLE) or before[name].partition(":")[0] == now[name].partition(":")[0]


def _generator() -> str:
    return str(zlib.crc32(torch.get_rng_state().numpy().tobytes()))


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
    others = [leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, np.ndarray))]
    texts = [f"{leaf:.4g}" if isinstance(leaf, float) else repr(leaf) for leaf in others]
    return str(zlib.crc32(repr([sums_of_bits(tensors).tolist(), arrays, texts]).encode()))


def trained_outside(state: TrainState, reached: Sequence[Reached]) -> list[str]:
    """Returns a warning for each optimizer, schedule and weight that a resume loses, or that each rank trains separately. Collective."""
    user_state, known = state.user_state, plain(state.model, dict(state.model.named_parameters()))
    kept, sentences = [*user_state.objects.items(), *user_state.rank_objects.items()], list[str]()
    used, names = set[torch.Tensor](), dict[torch.Tensor, str]()
    for name, value in (*((one.name, one.value) for one in reached), *kept):
        if issubclass(type(value), nn.Parameter):
            names.setdefault(value, name)
        elif issubclass(type(value), nn.Module) and "_modules" in vars(value):  # else `__init__` has not run yet
            for inner, parameter in value.named_parameters():
                names.setdefault(parameter, f"{name}.{inner}")
        elif issubclass(type(value), torch.optim.Optimizer) and not hasattr(value, "sync"):  # no session has made it
            moved = {p for group in getattr(value, "param_groups", ()) for p in group["params"] if p.requires_grad}
            used |= moved
            is_inside = any(_is_inside(value, one) for one in state.optimizers.values()) if moved else True
            if not is_inside and not user_state.has(value):
                first = next((f" over {n}" for n, p in known.items() if p in moved), "")
                sentences.append(
                    f"the optimizer {name} ({type(value).__name__}{first}) does not come from run.optimizer(), so no checkpoint "
                    f"holds its state: create it with run.optimizer(), or call {_keeps(name, '…')}"
                )
    ours = set[str]()
    for name, optimizer in state.optimizers.items():
        ours.update(*parameter_names(state.sync, optimizer))
        scheduled = any("initial_lr" in group for group in optimizer.param_groups)  # torch's schedules leave this mark
        holders = [one for _, thing in kept for one in (thing, *getattr(thing, "__dict__", {}).values())]
        if scheduled and not any(getattr(one, "optimizer", None) is optimizer for one in holders):
            sentences.append(
                f"a schedule changes the learning rate of {name}, and no checkpoint holds its state: call run.keep(schedule=…) before the "
                "loop, else a resume trains with other rates"
            )
    if unused := [name for name, p in known.items() if p.requires_grad and name not in ours and p not in used]:
        sentences.insert(
            0,
            f"no optimizer has the trainable {first_of(unused)}: pass such parameters to run.optimizer(), or freeze them with "
            "requires_grad_(False)",
        )
    learned = used | {p for p in names if p.requires_grad and p.is_leaf and p.grad is not None}
    of_rank = storages(_states_of(user_state.rank_objects))
    held = storages([_states_of(user_state.objects), dict(user_state.values)])
    strange = [p for p in learned - {*known.values()} if storage(p) not in of_rank]
    outside = {names.get(p, f"a parameter of shape {list(p.shape)}"): p for p in strange}
    every = all_gather_trees({name: fingerprint(nn.ParameterList([p])) for name, p in outside.items()}, state.world)
    for name, parameter in sorted(outside.items()):
        apart = len({prints.get(name, every[0].get(name)) for prints in every}) > 1
        lost = parameter in used and storage(parameter) not in held
        if problems := ["differs between the ranks"] * apart + ["is in no checkpoint"] * lost:
            sentences.append(
                f"{name} is trained, and belongs to no replicated model: it {' and '.join(problems)}. Make it a parameter of the model "
                "before run.replicate()"
            )
    return sentences


def _is_inside(optimizer: torch.optim.Optimizer, outer: torch.optim.Optimizer) -> bool:
    """Returns whether another optimizer, such as a Lookahead around this one, holds its state, if it has one."""
    mine, its = (getattr(one, "state", None) for one in (optimizer, outer))
    has_state = storages(mine) != {None}
    return mine is its or (storages(mine) <= storages(its) if has_state else optimizer in vars(outer).values())


def temporary(reached: Sequence[Reached], run_dir: Any, began: float) -> Iterator[str]:
    """Yields a warning for each file that a variable names, that was written since the time `began`, and that is in a folder of
    `tempfile`."""
    base = f"{tempfile.gettempdir()}{os.sep}"
    for name, value, *_ in reached:
        if issubclass(type(value), (str, Path)) and str(value).startswith(base):
            folder = str(value).removeprefix(base).partition(os.sep)[0]
            is_made = re.fullmatch("tmp[a-z0-9_]{8}", folder) and not str(run_dir).startswith(f"{base}{folder}")
            with contextlib.suppress(OSError, ValueError):
                if is_made and os.path.isfile(value) and os.path.getmtime(value) > began:
                    yield (
                        f"the script has written the temporary file {name}, and a start that resumes does not have it: write it to "
                        "run.path(…). checkpoint.keep_best keeps the best weights"
                    )


def _states_of(objects: dict[str, Stateful]) -> list[Any]:
    return [stateful.state_dict() for stateful in objects.values()]


def _moves(name: str, value: Any) -> str:
    if generators.is_generator(value):
        return f"no checkpoint has the random generator {name}, so a resume draws other numbers: pass it to {_keeps(name, name)}"
    is_module = issubclass(type(value), nn.Module)
    unless = "" if is_module else ", unless the script sets it before it reads it"
    make = "" if is_module else "make it a module, and "
    return (
        f"{name} changes in place, and no checkpoint has it, so a resume begins with other values{unless}: {make}pass it to "
        f"{_keeps(name, name)}"
    )


def _keeps(name: str, value: str) -> str:
    keyword = name if name.isidentifier() else re.sub(r"\W+", "_", name).strip("_")
    return f"run.keep({keyword if keyword.isidentifier() else 'other'}={value})"
