"""Plain weight files: `lockstep export` writes them, `init_from` reads them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from .. import files
from ..contract import UserError, to_stderr
from ..parallel.names import matched
from . import store
from .state import mean_of
from .store import Rule

SAFETENSORS = ".safetensors"
ENVELOPES = ("state_dict", "model")
"""Keys of a state dict in the files of training scripts, beside an epoch or an optimizer."""


def read(path: Path) -> dict[str, torch.Tensor]:
    """Returns a state dict. Reads only tensors, no code.

    Raises:
        UserError: the file is missing, or holds anything but named tensors, alone or as the one state dict in an envelope.
    """
    with files.reading(path), files.regular(path) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about files that are refused a line later
        with files.reading(path, then=": it is not a file of plain weights"):
            if path.suffix == SAFETENSORS:
                return safetensors.torch.load_file(path)
            value = torch.load(file, map_location="cpu", weights_only=True)
    if _is_state_dict(value):
        return dict(value)
    inside = [name for name, inner in value.items() if _is_state_dict(inner)] if isinstance(value, dict) else []
    if len(inside) == 1 and inside[0] in ENVELOPES:
        return dict(value[inside[0]])
    holds = f"holds {' and '.join(map(repr, inside))}" if inside else "does not hold a state dict"
    raise UserError(
        f"{path} {holds}: expected names and tensors, as `lockstep export` writes them, or one state dict under "
        f"{' or '.join(map(repr, ENVELOPES))}"
    )


def _is_state_dict(value: Any) -> bool:
    entries = value.items() if isinstance(value, dict) else ()
    return bool(entries) and all(isinstance(key, str) and isinstance(one, torch.Tensor) for key, one in entries)


def assign(model: nn.Module, weights: dict[str, torch.Tensor], path: Path) -> None:
    """Copies weights into a model. Names that wrappers add (`module.`, `_orig_mod.`) make no difference.

    Raises:
        UserError: the weights of `path` do not fit; the message has torch's reason and the model's advice (`misfit`).
    """
    try:
        state = model.state_dict()
        weights = matched(weights, state.keys())
        for name in weights.keys() & state.keys():
            if not torch.can_cast(weights[name].dtype, state[name].dtype):
                raise UserError(f"{path}: {name} is {weights[name].dtype}, the model's {state[name].dtype}")
        model.load_state_dict(weights)
    except (RuntimeError, ValueError, TypeError) as error:
        advice = getattr(model, "misfit", "")
        raise UserError(f"{path} does not fit the model: {files.reason_of(error)}{advice}") from error


def from_run(
    run_dir: Path, wanted: int | Rule | None = None
) -> tuple[dict[str, torch.Tensor], int, dict[str, Any]]:  # fmt: skip
    """Returns (weights of the evaluation, their step, `run.values`) of a verified checkpoint: the newest, that of a step, or the best by
    a rule. Raises `UserError` if there is none; no other checkpoint replaces the step or the best."""
    paths = store.listed(run_dir / "checkpoints")
    if not paths:
        raise UserError(f"{run_dir} has no checkpoint yet")
    steps = {store.step_of(path): path for path in paths}
    if wanted is None:
        path = store.newest_verified(run_dir / "checkpoints", lambda text: to_stderr(f"warning: {text}"))
        lacks = ""
    elif isinstance(wanted, Rule):
        path, lacks = store.best(paths, wanted), f"with a score ({wanted.name}): choose one with --step"
    else:
        path, lacks = steps.get(wanted), f"of step {wanted}"
    if path is None:
        raise UserError(f"{run_dir} has no checkpoint {lacks}; there are {', '.join(map(str, sorted(steps)))}")
    with files.reading(path):  # its checksums match, but its writer may have saved anything
        if wanted is not None:
            store.verify(path)
        gathered = store.load(path)
        weights = evaluated_weights(gathered)
        if not _is_state_dict(weights):
            raise ValueError("it holds no weights")
        return weights, store.step_of(path), dict(gathered["shared"]["kept"]["values"])


def evaluated_weights(gathered: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the weights of the evaluation: their average if there is one, with batch statistics averaged over the ranks.

    The names are those of a `state_dict`: a parameter that several modules share has an entry for each of its names.
    """
    shared, ranks = gathered["shared"], gathered["ranks"]
    weights, buffers = ("average", "average_buffers") if shared["average"] else ("model", "buffers")
    tensors = {**shared[weights], **mean_of([rank[buffers] for rank in ranks])}
    tensors |= {alias: tensors[name] for alias, name in shared["aliases"].items()}
    return {name: tensor for name, tensor in tensors.items() if name not in shared["transient"]}
