"""Weights of a run, as fingerprints by name, so that two runs are compared to the bit. Imports torch for files of tensors alone."""

from __future__ import annotations

import glob
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.training.contract import UserError, first_line

_TENSORS = (".safetensors", ".pt", ".pth", ".ckpt", ".bin", ".tar")
Fingerprints = dict[str, str]
"""Name of a tensor, or of other content of a file → sha256 of its shape, type and bytes."""


def newest(run: Path, pattern: str) -> Path:
    """Returns the last file that the pattern matches, in natural order (10 after 9). Raises `UserError` if there is none."""
    found = glob.glob(pattern.replace("{run}", glob.escape(str(run))), recursive=True)
    if not found:
        raise UserError(f"the run has left no file {pattern}: --weights says where they are")
    return Path(max(found, key=_natural))


def _natural(path: str) -> list[tuple[int, str]]:
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"(\d+)", path)]


def of_file(path: Path) -> Fingerprints:
    """Returns the fingerprints of a safetensors or torch file's tensors; of another file, of its bytes. Raises `UserError` if the file
    is damaged."""
    try:
        if path.suffix not in _TENSORS:
            return {"all bytes": _digest("", path.read_bytes())}
        import torch
        from safetensors.torch import load_file

        if path.suffix == ".safetensors":
            return of_values(load_file(path), str(path))
        return of_values(torch.load(path, map_location="cpu", weights_only=True), str(path))
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - a file that was cut off may raise anything
        reason = first_line(error)[:200]
        raise UserError(f"{path} cannot be read as weights: {reason}") from None


def of_values(values: Any, where: str) -> Fingerprints:
    """Returns the fingerprints of tensors in nested mappings and lists. Raises `UserError` if there are none."""
    found: Fingerprints = {}
    _walk(values, "", found)
    if not found:
        raise UserError(f"{where} has no tensor")
    return found


def _digest(kind: str, data: bytes) -> str:
    return hashlib.sha256(kind.encode() + b"\0" + data).hexdigest()


def _walk(value: Any, place: str, found: Fingerprints) -> None:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _walk(inner, f"{place}.{name}".lstrip("."), found)
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            _walk(inner, f"{place}.{number}".lstrip("."), found)
    elif hasattr(value, "detach"):  # a tensor
        import torch

        plain = value.detach().cpu().contiguous().flatten()
        found[place] = _digest(f"{value.dtype} {tuple(value.shape)}", plain.view(torch.uint8).numpy().tobytes())


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Returns the names whose values differ, or that only one of the two has."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
