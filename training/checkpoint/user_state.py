"""The state that a user's own training loop keeps in its checkpoints, in addition to model and optimizer."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from .. import generators
from ..parallel.exchange import all_gather_trees
from ..parallel.packing import split
from ..parallel.world import World

_PLAIN = (
    "steps",
    "samples",
    "data",
    "logged",
    "logged_in_epoch",
    "measured",
    "rates",
    "groups",
    "tables",
    "began_with",
)
"""Plain values that are the same on every rank."""


@runtime_checkable
class Stateful(Protocol):
    """An object with a state that can be saved and restored: a scheduler, a loader's cursor, a metric."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class Values(dict[str, Any]):
    """The script's values. Setting a value that no checkpoint can hold raises `TypeError`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __setitem__(self, name: str, value: Any) -> None:
        check_tree(value, f"{self._name}[{name!r}]")
        super().__setitem__(name, value)

    # A dictionary's own would check nothing.

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *values: Any, **more: Any) -> None:
        for name, value in dict(*values, **more).items():
            self[name] = value

    def __ior__(self, other: Any) -> Values:  # type: ignore[override,misc]
        self.update(other)
        return self


class UserState:
    """The objects of `Session.keep`, by name, and plain values.

    Objects' states are trees of tensors, numpy arrays, numbers, texts and None.
    """

    def __init__(self) -> None:
        self.objects: dict[str, Stateful] = {}
        """The same on every rank: the states of rank 0 are saved, and all ranks get them back."""
        self.rank_objects: dict[str, Stateful] = {}
        """Different on each rank: each rank's state is saved, and that rank gets it back."""
        self.generators: dict[str, Any] = {}
        """Random generators of the script: each rank's own, as the program's (`capture`)."""
        self.values = Values("run.values")
        """The same on every rank."""
        self.summary = Values("run.summary")
        """Values of the script for summary.json. The same on every rank."""
        self.steps = self.samples = 0
        """Optimizer steps, and samples of all ranks, since the run began."""
        self.data: dict[str, Any] = {}
        """How the current epoch is divided into batches: a resume in the middle of the epoch needs the same division."""
        self.logged: dict[str, float] = {}
        """The last value that the script logged under each name."""
        self.logged_in_epoch: dict[str, float] = {}
        """The same, of the epoch under way alone."""
        self.measured: list[str] = []
        """Names of the numbers that the function of a step returns with its loss."""
        self.rates: dict[str, float] = {}
        """The learning rate of each group as the script made it, by the optimizer's name and the group's number."""
        self.groups: dict[str, str] = {}
        """By the optimizer's name, the sha256 of the parameters in its groups as the script made them."""
        self.tables: dict[str, str] = {}
        """A digest of each table that a module has in an attribute (`run/replica.py`), as the script made it."""
        self.began_with: dict[str, float] = {}
        """The learning rates with which the batches of the epoch under way began."""
        self.epoch_generators: dict[str, Any] | None = None
        """This rank's generators at the start of the epoch under way."""
        self.cursor_generators: dict[str, Any] | None = None
        """This rank's generators at the cursor; None: the current ones."""

    def add(self, objects: Mapping[str, Any], of_rank: bool = False) -> None:
        """Raises `TypeError` for an object without a state, or whose state no checkpoint can hold; `ValueError` for a name in use."""
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
        """The states of the program's generators and of the script's (`restore` takes them)."""
        own = {name: generators.state_of(generator) for name, generator in self.generators.items()}
        return {**generators.capture(device), "own": own}

    def restore(self, states: dict[str, Any], device: torch.device) -> None:
        """A generator without a saved state keeps its own. Raises `ValueError`, `TypeError`."""
        generators.restore(states, device)
        for name in self.generators.keys() & states.get("own", {}).keys():
            self._give(name, states["own"][name])

    def _give(self, name: str, state: Any) -> None:
        try:
            generators.set_state(self.generators[name], state)
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            raise ValueError(f"{name} is a generator of another kind than the one that was saved, {error}") from error

    def restore_alike(self, states: dict[str, Any], world: World) -> list[str]:
        """`restore` of the script's generators at another number of ranks: of those that all ranks have made alike. Collective.

        Args:
            states: None for a generator whose states were not the same on all ranks.

        Returns:
            The names of the generators that begin anew, although they were saved.
        """
        mine = {name: zlib.crc32(repr(_of(generator)).encode()) for name, generator in self.generators.items()}
        prints = all_gather_trees(mine, world)
        anew = []
        for name in sorted(self.generators.keys() & states.keys()):
            if states[name] is None or any(others.get(name) != mine[name] for others in prints):
                anew.append(name)
            else:
                self._give(name, states[name])
        return anew

    def has(self, wanted: object) -> bool:
        """Whether this object itself is kept. Then its own state is restored on resume."""
        return any(wanted is kept for kept in (*self.objects.values(), *self.rank_objects.values()))

    def shared_state(self) -> dict[str, Any]:
        """Raises `TypeError` for a value that no checkpoint can hold."""
        for name, values in (("run.values", self.values), ("run.summary", self.summary)):
            check_tree(values, name)  # what lies in a list may have changed since it was set
        return {
            "objects": {name: stateful.state_dict() for name, stateful in self.objects.items()},
            "values": dict(self.values),
            "summary": dict(self.summary),
            **{name: getattr(self, name) for name in _PLAIN},
        }

    def rank_state(self) -> dict[str, Any]:
        return {
            "objects": {name: stateful.state_dict() for name, stateful in self.rank_objects.items()},
            "epoch_generators": self.epoch_generators,
        }

    def load(self, shared: dict[str, Any], rank: dict[str, Any] | None) -> None:
        """Gives the objects their saved states. `rank` is None at another world size than it was saved at.

        Raises:
            ValueError: the checkpoint has other objects than the script keeps now.
        """
        _load(self.objects, shared["objects"])
        self.values.clear()
        self.values.update(shared["values"])
        self.summary.clear()
        self.summary.update(shared["summary"])
        for name in _PLAIN:
            if type(shared[name]) is not type(getattr(self, name)):
                raise TypeError(f"{name} is {shared[name]!r:.40}")
            setattr(self, name, shared[name])
        if rank is not None:
            _load(self.rank_objects, rank["objects"])
            self.epoch_generators = rank["epoch_generators"]
        elif self.rank_objects:
            name = next(iter(self.rank_objects))
            raise ValueError(f"{name} is each rank's own, and the number of ranks has changed")


def _of(generator: Any) -> Any:
    return generators.comparable(generators.state_of(generator))


def _load(objects: dict[str, Stateful], states: dict[str, Any]) -> None:
    if objects.keys() != states.keys():
        different = sorted(objects.keys() ^ states.keys())[0]
        where = "the script" if different in objects else "the checkpoint"
        raise ValueError(f"{different} is in {where} only")
    for name, stateful in objects.items():
        stateful.load_state_dict(states[name])


def check_tree(tree: Any, place: str) -> None:
    """Raises `TypeError` that names the first value which no checkpoint can hold, and its place."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            check_tree(value, f"{place}[{key!r}]")
    elif isinstance(tree, (list, tuple)):
        for number, value in enumerate(tree):
            check_tree(value, f"{place}[{number}]")
    else:
        try:
            split(tree)
        except TypeError:
            type_name = f"{getattr(tree, 'dtype', '')} {type(tree).__name__}".strip()
            raise TypeError(
                f"{place} is a {type_name}, which no checkpoint can hold: use tensors, numpy arrays of numbers, numbers, "
                "texts, lists and dictionaries"
            ) from None
