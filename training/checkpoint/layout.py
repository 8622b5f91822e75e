"""Where each tensor of a state is in the tensor file: under a name that says what it is.

    model/conv1.weight                       a parameter
    average/conv1.weight                     the average of it
    optim/conv1.weight/momentum_buffer       what the optimizer keeps for it
    ranks/0/buffers/norm.running_mean        what rank 0 has of its own: buffers, average_buffers, rng, losses, sync

The plain values around them keep the structure of the state, with `{"$tensor": NAME}` in the place of each tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from lockstep.training.parallel import exchange

_PLACES = ((("shared", "optimizer", "state"), ("optim",)), (("shared",), ()))
"""First parts of a path in the state, and their short form in a tensor's name."""


def named(plain: Any) -> tuple[Any, list[str]]:
    """Of the JSON value that `exchange.split` gives: (the same with names in the place of numbers, the names in that order)."""
    numbers: dict[str, int] = {}

    def walk(value: Any, place: tuple[str, ...]) -> Any:
        if isinstance(value, list):
            return [walk(inner, (*place, str(number))) for number, inner in enumerate(value)]
        if not isinstance(value, dict):
            return value
        if value.keys() == {"$tensor"}:
            name = _free(_name(place), numbers)
            numbers[name] = value["$tensor"]
            return {"$tensor": name}
        if value.keys() == {"$items"}:  # a mapping whose keys are no plain texts
            return {"$items": [[walk(key, place), walk(inner, (*place, str(key)))] for key, inner in value["$items"]]}
        marked = any(key.startswith("$") for key in value)
        return {key: walk(inner, place if marked else (*place, key)) for key, inner in value.items()}

    return walk(plain, ()), sorted(numbers, key=lambda name: numbers[name])


def join(plain: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The state, of `named` plain values. Raises `ValueError` for any other value."""
    numbers = {name: number for number, name in enumerate(tensors)}

    def walk(value: Any) -> Any:
        if isinstance(value, list):
            return [walk(inner) for inner in value]
        if not isinstance(value, dict):
            return value
        if value.keys() == {"$tensor"}:
            name = value["$tensor"]
            if not isinstance(name, str) or name not in numbers:
                raise ValueError(f"no tensor {name!r}")
            return {"$tensor": numbers[name]}
        return {key: walk(inner) for key, inner in value.items()}

    return exchange.join(walk(plain), list(tensors.values()))


def _name(place: tuple[str, ...]) -> str:
    for beginning, short in _PLACES:
        if place[: len(beginning)] == beginning:
            place = short + place[len(beginning) :]
            break
    return "/".join(place).encode("utf-8", "replace").decode()  # a file cannot hold half a character


def _free(name: str, used: dict[str, int]) -> str:
    """`name`, with `~` added if it is already used: a key of a mapping may contain a `/`."""
    while name in used or name in ("", "__metadata__"):  # safetensors does not allow the latter as a name
        name += "~"
    return name
