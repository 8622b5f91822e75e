"""Random generators of torch, the device, numpy and Python: their states as values that a checkpoint holds."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed(number: int) -> None:
    """Seeds torch's generators, Python's and numpy's; numpy takes only 32 bits of `number`."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)


def of_process(device: torch.device) -> dict[str, Any]:
    """Returns the generators that the modules' own functions draw from (`torch.randn`, `random.random`), by name."""
    # The functions are methods of the one generator of their module, which has no public name; their annotations hide it.
    generators = {
        "python": random.getstate.__self__,  # type: ignore[attr-defined]
        "numpy": np.random.get_state.__self__,  # type: ignore[attr-defined]
        "torch": torch.default_generator,
    }
    if device.type == "cuda":
        generators["cuda"] = torch.cuda.default_generators[device.index or 0]
    return generators


def is_generator(thing: object) -> bool:
    """Returns whether it is a random generator that a script may have made: torch's, numpy's or Python's."""
    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    kind = type(thing)  # the `__class__` of a proxy may raise
    return issubclass(kind, kinds) and not issubclass(kind, random.SystemRandom)


def state_of(generator: Any) -> Any:
    """Returns the state of one (`is_generator`), as plain values or a tensor (`set_state` takes it)."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        version, numbers, gauss = generator.getstate()
        return [version, torch.tensor(numbers, device="cpu"), gauss]  # in place of 625 numbers
    if isinstance(generator, np.random.RandomState):
        return _plain(generator.get_state(legacy=False))
    return {"children": _children(generator), **_plain(generator.bit_generator.state)}


def comparable(state: Any) -> Any:
    """Returns the state from `state_of` as values that `==` compares."""
    if isinstance(state, list):  # of Python
        return [comparable(value) for value in state]
    return state.tolist() if isinstance(state, torch.Tensor) else state


def comparable_state(generator: Any) -> Any:
    """Returns the present state of one (`is_generator`) as values that `==` compares."""
    return comparable(state_of(generator))


def set_state(generator: Any, state: Any) -> None:
    """Raises `ValueError`, `TypeError`, `KeyError`, `RuntimeError` for the state of another kind."""
    if isinstance(generator, random.Random):
        version, numbers, gauss = state
        generator.setstate((version, tuple(torch.as_tensor(numbers).tolist()), gauss))
    elif isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        if _children(generator) != state["children"]:  # numpy takes their number at construction alone
            seeds = bits.seed_seq
            bits.__init__(type(seeds)(**{**seeds.state, "n_children_spawned": state["children"]}))
        bits.state = state
    else:
        generator.set_state(state)


def _children(generator: np.random.Generator) -> int:
    """Returns the number of child generators that `spawn` has made."""
    return getattr(generator.bit_generator.seed_seq, "n_children_spawned", 0)


def _plain(state: Any) -> Any:
    """Numpy's arrays of unsigned numbers as lists."""
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    return state.tolist() if isinstance(state, (np.ndarray, np.generic)) else state


class RngScope:
    """Around draws of ours, such as those of a step's function: inside, torch's generators may be seeded; after it they have the
    script's own states again.

    Args:
        every: Python's and numpy's, too.
    """

    def __init__(self, device: torch.device, every: bool = False) -> None:
        self._every = every
        self._last: list[Any] | None = None
        self.drawn_between = False
        """Whether the script has drawn random numbers since the last step, or since `watch`."""
        self._generators = [one for one in of_process(device).values() if isinstance(one, torch.Generator)]
        self._access: list[Any] = [(one.get_state, one.set_state) for one in self._generators]
        """(function that reads the state, function that sets it) for each generator."""
        if every:
            self._access += [(random.getstate, random.setstate), (np.random.get_state, np.random.set_state)]

    def watch(self) -> None:
        """Reads the states of the generators, and whether the script has drawn since the last read."""
        self._before = [read() for read, _ in self._access]
        if self._every:
            *tensors, python, (algorithm, keys, *rest) = self._before
            of_torch = [state.numpy().tobytes() for state in tensors]
            states = [of_torch, python, algorithm, np.asarray(keys).tobytes(), rest]
            self.drawn_between = self._last not in (None, states)
            self._last = states

    def __enter__(self) -> RngScope:
        self.watch()
        return self

    def seed(self, number: int) -> None:
        """Seeds the generators: the same number gives the same draws."""
        for generator in self._generators:
            generator.manual_seed(number)
        if self._every:
            random.seed(number)
            np.random.seed(number)

    def __exit__(self, *_: object) -> None:
        for (_, write), state in zip(self._access, self._before, strict=True):
            write(state)
