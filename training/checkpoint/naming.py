"""The optimizer's state by the names of the parameters, as a checkpoint holds it; torch numbers them.

torch:    {"state": {0: {"momentum_buffer": …}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
by name:  {"state": {"conv1.weight": {"momentum_buffer": …}}, "own": {}, "param_groups": [{"lr": 0.1, "params": ["conv1.weight", …]}]}

`own` holds state that some optimizers keep for no parameter, such as a step count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def by_name(state: dict[str, Any], names: list[list[str]]) -> dict[str, Any]:
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


def by_number(saved: dict[str, Any], names: list[list[str]]) -> dict[str, Any]:
    """The inverse of `by_name`, for an optimizer whose groups have `names`.

    Raises:
        ValueError: the groups are not those of this optimizer.
    """
    groups = saved["param_groups"]
    if not isinstance(groups, list) or len(groups) != len(names):
        raise ValueError(f"the optimizer has {len(names)} groups of parameters, and the checkpoint has different ones")
    number: dict[str, int] = {}
    for position, (group, group_names) in enumerate(zip(groups, names)):
        params = group.get("params") if isinstance(group, dict) else None
        if not isinstance(params, list) or not all(isinstance(name, str) for name in params):
            raise ValueError(f"the optimizer's group {position} has no list of its parameters")
        if sorted(params) != sorted(group_names):
            different = sorted(set(params) ^ set(group_names)) or sorted(params)
            raise ValueError(
                f"{different[0]} is in group {position} of either the optimizer or the checkpoint, not of both"
            )
        for name in group_names:
            number[name] = len(number)
    rest = {key: value for key, value in saved.items() if key != "own"}
    unknown = [name for name in saved["state"] if name not in number]
    if unknown:
        raise ValueError(f"the optimizer has no parameter {unknown[0]}")
    return {
        **rest,
        "state": {**{number[name]: kept for name, kept in saved["state"].items()}, **saved["own"]},
        "param_groups": [
            {**group, "params": [number[n] for n in group_names]} for group, group_names in zip(groups, names)
        ],
    }


def in_groups(groups: list[list[torch.Tensor]], model: nn.Module) -> list[list[str]]:
    """The names of the parameters of each group. Raises `KeyError` for a tensor that is not a parameter of `model`."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(parameter)] for parameter in group] for group in groups]


def aliases(model: nn.Module) -> dict[str, str]:
    """The other names of shared parameters: alias → the name under which the checkpoint holds the parameter."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    named_parameters = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in named_parameters if first[id(parameter)] != name}
