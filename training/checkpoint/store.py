"""Reads and writes checkpoints, so that each one is complete and verified. This module does not know about ranks.

    checkpoints/step-00000100/state.safetensors      every tensor, under the names of `layout`: `model/conv1.weight`, …
    checkpoints/step-00000100/state.json             the plain values around them
    checkpoints/step-00000100/manifest.json          format, step, score; size and sha256 of both; written last

A save copies the state into a buffer that is allocated once, and a thread writes it: temporary directory → fsync of
each file → manifest → rename → fsync of the parent. Older checkpoints are removed only after the new one was read back
and verified. There is no pickle: a tensor file is safetensors, the rest is JSON.

The safetensors library reads the file and holds its structure. It does not write it: it would hash nothing meanwhile and
force nothing to the disk, and what it writes would have to be read once more for its sha256 (benchmarks/README.md).
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch

from lockstep.training import files, manifest
from lockstep.training.checkpoint.score import KeepBest, Rule
from lockstep.training.contract import UserError, checkpoint_name
from lockstep.training.parallel import exchange
from lockstep.training.parallel.exchange import DTYPE_NAMES, split

MANIFEST = "manifest.json"
STATE = "state.json"
TENSORS = "state.safetensors"
MAX_STATE_BYTES = 64 << 20
"""Of `STATE`: 7 kB a rank for its generator's state, and 100 bytes a buffer, so 8,000 ranks of a small network."""
MAX_HEADER_BYTES = 100_000_000
"""Of `TENSORS`, by the safetensors library: about a million tensors."""
FORMAT = 2
_NAME = re.compile(r"step-(\d{8,12})")


class CorruptCheckpoint(Exception):
    """A checkpoint that must not be used. The message names the file and what is wrong with it."""


def candidates(directory: Path) -> list[Path]:
    """The checkpoints in a folder, newest first, verified or not. Raises `OSError` where it cannot be read."""
    try:
        paths = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    return sorted(paths, key=step_of, reverse=True)


def listed(directory: Path) -> list[Path]:
    """`candidates`. Raises `UserError`."""
    try:
        return candidates(directory)
    except OSError as error:
        raise UserError(f"cannot read {directory}: {error.strerror}") from None


def step_of(path: Path) -> int:
    """The step of a checkpoint's folder, by its name, which must be one of `candidates`."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def verify(path: Path) -> dict[str, Any]:
    """Reads every byte of a checkpoint and returns its manifest. Raises `CorruptCheckpoint`."""
    manifest_path = path / MANIFEST

    def check(value: Any) -> tuple[dict[str, Any], dict[str, tuple[int, str]]]:
        if value.pop("sha256") != manifest.seal(value):
            raise ValueError("its content does not match its own sha256")
        if type(value["format"]) is not int or value["format"] != FORMAT:
            raise ValueError(f"it has format {value['format']!r}, and this version reads {FORMAT}")
        entries = value["files"]
        if set(entries) != {STATE, TENSORS} or value["step"] != step_of(path):
            raise ValueError("it belongs to other files or to another step")
        return value, {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in entries.items()}

    try:
        about, expected = manifest.read(manifest_path, 1 << 20, check)
    except OSError as error:
        raise CorruptCheckpoint(f"{manifest_path}: {error.strerror}") from None
    except manifest.Malformed as error:
        raise CorruptCheckpoint(f"{manifest_path} is malformed: {error}") from None
    for name, (size, sha256) in expected.items():
        try:
            different = manifest.difference(path / name, sha256, size)
        except OSError as error:
            raise CorruptCheckpoint(f"{path / name}: {error.strerror}") from None
        if different:
            raise CorruptCheckpoint(f"{path / name} {different}")
    return about


def newest_verified(directory: Path, warn: Callable[[str], None] = lambda _: None) -> Path | None:
    """The newest checkpoint whose every byte verifies; each bad one that is newer is reported through `warn`.

    Returns None where there is no checkpoint at all.

    Raises:
        UserError: there are checkpoints, and none verifies. Starting over in silence would lose the run.
    """
    paths = listed(directory)
    for path in paths:
        try:
            verify(path)
        except CorruptCheckpoint as error:
            warn(f"checkpoint is corrupt and not used: {error}")
        else:
            return path
    if paths:
        raise UserError(
            f"none of the {len(paths)} checkpoints in {directory} can be verified: restore one from a backup, "
            "or start over in another run directory"
        )
    return None


def load(path: Path) -> Any:
    """The state tree of a checkpoint, tensors on the CPU. Verify it first. Raises `CorruptCheckpoint`."""
    with files.reading(path, CorruptCheckpoint):
        plain = json.loads(files.read(path / STATE, MAX_STATE_BYTES))
        with safetensors.safe_open(path / TENSORS, framework="pt") as file:
            return _joined(plain, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - it has no other way


@dataclass(slots=True)
class SaveResult:
    path: Path
    seconds: float
    bytes: int


class Writer:
    """Saves checkpoints of one run in the background, one at a time, and prunes old ones.

    Args:
        directory: the run's `checkpoints/`.
        keep: newest checkpoints to keep.
        keep_best: also keep the one with the best `score`.
    """

    def __init__(self, directory: Path, keep: int, keep_best: KeepBest) -> None:
        self.directory, self.keep, self.keep_best = directory, keep, keep_best
        self._rule = Rule.of(keep_best)
        self._buffers: list[torch.Tensor] = []
        self._pending: Future[SaveResult] | None = None

    def save(self, step: int, state: Any, score: float | None = None) -> Future[SaveResult]:
        """Copies the state now, writes it later. Waits for an earlier save, whose buffer it reuses.

        Args:
            step: optimizer steps done; names the checkpoint.
            state: a tree as in `lockstep.training.parallel.exchange`.
            score: for `keep_best`; None where the state was not evaluated.

        The future raises `OSError` if the checkpoint could not be written or verified.
        """
        self.wait()
        plain, tensors = split(state)
        self._snapshot(tensors)
        self._pending = future = Future[SaveResult]()
        arguments = (future, step, plain, list(self._buffers), score)
        # A daemon: the process can end also where the disk never answers. `wait` is for every other end.
        threading.Thread(target=self._answer, args=arguments, name="checkpoint", daemon=True).start()
        return future

    def _answer(self, future: Future[SaveResult], *arguments: Any) -> None:
        try:
            future.set_result(self._write(*arguments))
        except BaseException as error:  # noqa: BLE001 - `Future.result` raises it again
            future.set_exception(error)

    def wait(self) -> None:
        """Returns when nothing is being written. Does not raise: the future does."""
        if self._pending is not None:
            with contextlib.suppress(Exception):
                self._pending.result()

    def _snapshot(self, tensors: list[torch.Tensor]) -> None:
        same = len(tensors) == len(self._buffers) and all(
            a.shape == b.shape and a.dtype == b.dtype for a, b in zip(tensors, self._buffers)
        )
        if not same:
            pinned = any(tensor.is_cuda for tensor in tensors)
            self._buffers = [torch.empty(t.shape, dtype=t.dtype, pin_memory=pinned) for t in tensors]
        for buffer, tensor in zip(self._buffers, tensors):
            buffer.copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors):
            torch.cuda.synchronize()

    def _write(self, step: int, plain: Any, tensors: list[torch.Tensor], score: float | None) -> SaveResult:
        began = time.perf_counter()
        self.directory.mkdir(parents=True, exist_ok=True)
        with files.opened_folder(self.directory) as folder:  # another user may put a link in its place at any time
            size = self._write_into(folder, step, plain, tensors, score)
        return SaveResult(self.directory / checkpoint_name(step), time.perf_counter() - began, size)

    def _write_into(self, folder: Path, step: int, plain: Any, tensors: list[torch.Tensor], score: float | None) -> int:
        final = folder / checkpoint_name(step)
        replaced = folder / f".replaced-{final.name}.{os.getpid()}"
        try:
            with files.replacing(final) as staging:
                staging.mkdir()
                plain, names = _named(plain)
                text = _readable(json.dumps(plain).encode(), MAX_STATE_BYTES, STATE)
                entries = {
                    STATE: manifest.write_file(staging / STATE, [text]),
                    TENSORS: manifest.write_file(staging / TENSORS, _safetensors(dict(zip(names, tensors)))),
                }
                if score is None and final.exists():
                    score = _score(final, self._rule)  # the same step, saved again: its score still holds
                about: dict[str, Any] = {"format": FORMAT, "step": step, "score": score, "files": entries}
                about["score_of"] = self._rule.name
                about["sha256"] = manifest.seal(about)
                files.write_durable(staging / MANIFEST, manifest.text(about))
                files.fsync_directory(staging)
                if final.exists():  # the same step once more: a signal after a resume, or a corrupt one of earlier
                    files.rename(final, replaced)
            files.fsync_directory(folder)
        finally:
            clean(folder)
        self._prune(final)
        return sum(entry["bytes"] for entry in entries.values())

    def _prune(self, newest: Path) -> None:
        try:
            verify(self.directory / newest.name)  # where the next start looks for it
        except CorruptCheckpoint as error:
            raise OSError(f"a checkpoint that was just written could not be verified: {error}") from None
        paths = candidates(newest.parent)
        kept = set(paths[: self.keep])
        if self.keep_best and (found := best(paths, self._rule)) is not None:
            kept.add(found[0])
        for path in paths:
            if path not in kept and path != newest:
                # Renamed first: a crash while its files go must not leave a candidate that is half there.
                with contextlib.suppress(OSError):
                    files.rename(path, path.with_name(f".old-{path.name}.{os.getpid()}"))
                shutil.rmtree(path.with_name(f".old-{path.name}.{os.getpid()}"), ignore_errors=True)


def clean(directory: Path) -> None:
    """Removes what a killed save or removal left behind. Restores a checkpoint that was moved away and not replaced."""
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            match = re.fullmatch(r"\.(old-|replaced-)?(step-\d{8,12})\.[0-9a-f]+", path.name)
            if match and match[1] == "replaced-" and not (directory / match[2]).exists():
                files.rename(path, directory / match[2])
            elif match:
                shutil.rmtree(path, ignore_errors=True)


def best(paths: list[Path], rule: Rule) -> tuple[Path, float] | None:
    """The checkpoint with the best score and that score, the newest of several; None where none was measured by that rule."""
    scores = {path: score for path in paths if (score := _score(path, rule)) is not None}
    return max(scores.items(), key=lambda item: (rule.sign * item[1], step_of(item[0])), default=None)


def _score(path: Path, rule: Rule) -> float | None:
    about = files.read_json(path / MANIFEST, 1 << 20)
    score = about.get("score") if isinstance(about, dict) and about.get("score_of") == rule.name else None
    return float(score) if isinstance(score, (int, float)) and math.isfinite(score) else None


def _readable(text: bytes, limit: int, name: str) -> bytes:
    """`text`, if it is small enough to be read again. Raises `OSError` otherwise."""
    if len(text) > limit:
        raise OSError(errno.EFBIG, f"{name} would have {len(text)} bytes, and at most {limit} are read")
    return text


def _safetensors(tensors: dict[str, torch.Tensor]) -> list[Any]:
    """The byte pieces of a safetensors file (header, then the data of each tensor), without another copy.

    The largest elements come first, so that each tensor lies at a multiple of the size of its elements.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at, pieces = 0, []
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + size],
        }  # fmt: skip
        at += size
        pieces.append(tensor.reshape(-1).view(torch.uint8).numpy())
    text = json.dumps(header).encode()
    text = _readable(text + b" " * (-len(text) % 8), MAX_HEADER_BYTES, f"the header of {TENSORS}")
    return [len(text).to_bytes(8, "little") + text, *pieces]


# Where each tensor of a state is in the tensor file: under a name that says what it is.
#
#     model/conv1.weight                       a parameter
#     average/conv1.weight                     the average of it
#     optim/conv1.weight/momentum_buffer       what the optimizer keeps for it
#     ranks/0/buffers/norm.running_mean        what rank 0 has of its own: buffers, average_buffers, rng, losses, sync
#
# The plain values around them keep the structure of the state, with `{"$tensor": NAME}` in the place of each tensor.
#

_PLACES = ((("shared", "optimizer", "state"), ("optim",)), (("shared",), ()))
"""First parts of a path in the state, and their short form in a tensor's name."""


def _named(plain: Any) -> tuple[Any, list[str]]:
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


def _joined(plain: Any, tensors: dict[str, torch.Tensor]) -> Any:
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
