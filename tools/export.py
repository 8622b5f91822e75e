"""lockstep export RUN OUT: writes the weights of a checkpoint as a plain file. Needs torch."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.training import files
from lockstep.training.cli import count, run_dir
from lockstep.training.contract import EXIT_DONE, UserError, printable
from lockstep.training.observe import rundir

from . import RUN, parser

if TYPE_CHECKING:
    import torch


def main(argv: list[str]) -> int:
    """Writes the file. Raises `UserError` for wrong arguments, and for a run without such a checkpoint."""
    parsed = parser("export")
    parsed.add_argument("run", type=run_dir, metavar="RUN", help=RUN)
    parsed.add_argument("out", type=Path, metavar="OUT", help="a new file: .safetensors, or .pth for torch.load")
    which = parsed.add_mutually_exclusive_group()
    which.add_argument("--best", action="store_true", help="the checkpoint with the best score (checkpoint.keep_best); "
                       "default: the newest")  # fmt: skip
    which.add_argument("--step", type=count, metavar="N", help="the checkpoint of step N")
    args = parsed.parse_args(argv)
    from lockstep.training.checkpoint.store import Rule  # torch
    from lockstep.training.checkpoint.weights import from_run

    keep_best = rundir.read_run(args.run)["config"].checkpoint.keep_best
    tensors, step, values = from_run(args.run, Rule.of(keep_best) if args.best else args.step)
    write(tensors, args.out, values)
    print(printable(f"{args.out}: {len(tensors)} tensors of step {step}"))
    return EXIT_DONE


def write(weights: dict[str, torch.Tensor], path: Path, values: Mapping[str, Any] | None = None) -> None:
    """Writes a plain state dict, completely or not at all: as safetensors if the name ends in `.safetensors`, else in torch's format.
    The same weights and values give the same bytes.

    Args:
        weights: on the CPU.
        values: values for the metadata of a safetensors file, such as a vocabulary or names of classes; those that JSON can hold.

    Raises:
        UserError: the file exists, or cannot be written.
    """
    import torch

    from lockstep.training.checkpoint import store

    if os.path.lexists(path):
        raise UserError(f"{path} exists already: choose another file, or remove it")
    try:
        with files.replacing(path) as temporary, temporary.open("xb") as file:
            if path.suffix == ".safetensors":
                tensors = {name: weights[name].contiguous() for name in sorted(weights)}
                file.writelines(store.tensor_file(tensors, _metadata(values or {})))
            else:
                torch.save({name: tensor.clone() for name, tensor in weights.items()}, file)
            file.flush()
            files.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"cannot write {path}: {reason}") from None


def _metadata(values: Mapping[str, Any]) -> dict[str, str]:
    texts = {}
    for name, value in sorted(values.items(), key=lambda item: str(item[0])):
        with contextlib.suppress(TypeError, ValueError):  # a tensor, a set, half a character, a number as name
            text = json.dumps(value, ensure_ascii=False)
            (name + text).encode()
            texts[name] = text
    return texts
