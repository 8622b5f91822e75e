"""Reads and writes checkpoints, so that each one is complete and verified. This module does not know about ranks.

    checkpoints/step-00000100/state.safetensors      every tensor, under names that describe it (`_Names`).
    checkpoints/step-00000100/state.json             the plain values around them.
    checkpoints/step-00000100/manifest.json          format, step, score; size and sha256 of both; written last.

A save copies the state (`Writer._snapshot`). A thread writes it: temporary directory → fsync of
each file → manifest → rename → fsync of the parent. Older checkpoints are removed only after the new one was read back
and verified. There is no pickle: a tensor file is safetensors, the rest is JSON.

The safetensors library reads the file and holds its structure. It does not write it: it neither hashes meanwhile nor forces
anything to the disk. Its file needs another read for the sha256.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import safetensors
import torch

from .. import files
from ..contract import UserError
from ..parallel.packing import DTYPE_NAMES, join, split
from ..parallel.worker import Worker

MANIFEST = "manifest.json"
STATE = "state.json"
TENSORS = "state.safetensors"
MAX_STATE_BYTES = 64 << 20
"""Limit of `STATE`: 14 kB a rank for numpy's generator, now and at the epoch's beginning, and 100 bytes a buffer: 4,000 ranks of a small
network."""
MAX_HEADER_BYTES = 100_000_000
"""Limit of the header of `TENSORS`, by the safetensors library: about a million tensors."""
FORMAT = 4
_CHUNK = 8 << 20
_NAME = re.compile(r"step-\d{8,12}")
KeepBest: TypeAlias = "bool | Mapping[str, str]"
"""The setting `checkpoint.keep_best`: {name: max or min}; true means {accuracy: max}."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The name of a run's score, and whether a higher (1) or a lower (-1) score is better."""

    name: str
    sign: int

    @classmethod
    def of(cls, keep_best: KeepBest) -> Rule:
        """Returns the rule of a run. Without a best checkpoint its score is the accuracy."""
        name, better = ("accuracy", "max") if isinstance(keep_best, bool) else next(iter(keep_best.items()))
        return cls(name, 1 if better == "max" else -1)

    def best(self, scores: Mapping[int, float | None]) -> int | None:
        """Returns the step with the best score, the newest of several; None: no score. `scores`: step → score; None: not measured."""
        measured = {step: self.sign * score for step, score in scores.items() if score is not None}
        return max(measured, key=lambda step: (measured[step], step), default=None)

    def better(self, value: float, than: float | None) -> bool:
        """Returns whether a score is finite and better than another; `than` None: there is no other."""
        return math.isfinite(value) and (than is None or self.sign * value > self.sign * than)


class CorruptCheckpoint(Exception):
    """A checkpoint that must not be used. The message names the file and what is wrong with it."""


def candidates(directory: Path) -> list[Path]:
    """Returns the checkpoints in a folder, newest first, verified or not. Raises `OSError` if the folder cannot be read."""
    try:
        paths = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    return sorted(paths, key=step_of, reverse=True)


def listed(directory: Path) -> list[Path]:
    """Returns the `candidates`. Raises `UserError` if the folder cannot be read."""
    try:
        return candidates(directory)
    except OSError as error:
        raise UserError(f"cannot read {directory}: {error.strerror}") from None


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Returns the step of a checkpoint's folder, by its name, which must be one of `candidates`."""
    return int(path.name.removeprefix("step-"))


def manifest(path: Path, step: int | None = None) -> dict[str, Any]:
    """Returns the manifest of a checkpoint, checked by its own sha256. Does not read the checkpoint's other files.

    Args:
        step: the expected step, for a folder whose name does not contain it. None: the step in the folder's name.

    Raises:
        CorruptCheckpoint: the manifest is missing, damaged, of another format, or belongs to another step or other files.
    """
    with files.reading(path / MANIFEST, CorruptCheckpoint):
        about = json.loads(files.read(path / MANIFEST, 1 << 20))
        if about.pop("sha256") != seal(about):
            raise ValueError("its content does not match its own sha256")
        if type(about["format"]) is not int or about["format"] != FORMAT:
            raise ValueError(f"it has format {about['format']!r}, and this version reads {FORMAT}")
        if set(about["files"]) != {STATE, TENSORS} or about["step"] != (step_of(path) if step is None else step):
            raise ValueError("it belongs to other files or to another step")
        about["files"] = {
            name: {"sha256": str(entry["sha256"]), "bytes": int(entry["bytes"])}
            for name, entry in about["files"].items()
        }
    return dict(about)


def verify(path: Path, step: int | None = None) -> dict[str, Any]:
    """Reads every byte of a checkpoint and returns its manifest. Raises `CorruptCheckpoint`. `step`: as in `manifest`."""
    about = manifest(path, step)
    for name, entry in about["files"].items():
        with files.reading(path / name, CorruptCheckpoint):
            if different := files.difference(path / name, entry["sha256"], entry["bytes"]):
                raise CorruptCheckpoint(f"{path / name} {different}")
    return about


def newest_verified(
    directory: Path, warn: Callable[[str], None] = lambda _: None, known: Path | None = None
) -> Path | None:
    """Returns the newest checkpoint whose every byte verifies, and reports each newer, corrupt checkpoint through `warn`.

    Returns None if there is no checkpoint at all.

    Args:
        known: a checkpoint that was just verified, and is not read again.

    Raises:
        UserError: there are checkpoints, and none verifies. Starting over in silence would lose the run.
    """
    paths = listed(directory)
    for path in paths:
        try:
            if path != known:
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
    """Returns the state tree of a checkpoint, tensors on the CPU. Verify it first. Raises `CorruptCheckpoint`."""
    with files.reading(path, CorruptCheckpoint):
        plain = json.loads(files.read(path / STATE, MAX_STATE_BYTES))
        with safetensors.safe_open(path / TENSORS, framework="pt") as file:
            return join(plain, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - it has no other way


@dataclass(slots=True)
class SaveResult:
    path: Path
    seconds: float
    bytes: int


_WRITING, _HASHING = Worker("checkpoint"), Worker("checkpoint-hash")


class Writer:
    """Writer of one run's checkpoints in the background, one at a time. It prunes old checkpoints.

    Args:
        directory: the run's `checkpoints/`.
        keep: number of newest checkpoints to keep.
        keep_best: whether, and by which rule, to keep the checkpoint with the best `score`, too.
    """

    def __init__(self, directory: Path, keep: int, keep_best: KeepBest) -> None:
        self.directory, self.keep, self.keep_best = directory, keep, keep_best
        self._rule = Rule.of(keep_best)
        self._buffers: list[torch.Tensor] = []
        self._kinds: list[tuple[torch.Size, torch.dtype, bool]] = []
        """Shape, type and device of each buffer."""
        self._pending: Future[SaveResult] | None = None
        _WRITING.begin()
        _HASHING.begin()

    def save(self, step: int, state: Any, score: float | None = None) -> Future[SaveResult]:
        """Copies the state now, and writes it later. Waits for an earlier save, whose buffers it reuses.

        Args:
            step: optimizer steps done; names the checkpoint.
            state: a tree as in `lockstep.training.parallel.exchange`.
            score: the score for `keep_best`; None: the state was not evaluated.

            The future raises `OSError` if the checkpoint could not be written or verified.
        """
        self.wait()
        plain, tensors = split(state, _Names())
        fetch = self._snapshot([*tensors.values()])
        self._pending = _WRITING.run(self._write, step, plain, lambda: dict(zip(tensors, fetch())), score)
        return self._pending

    def wait(self) -> None:
        """Waits until the save under way has ended. Does not raise: the future does."""
        if self._pending is not None:
            with contextlib.suppress(Exception):
                self._pending.result()

    def _snapshot(self, tensors: list[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Copies the current state. Returns a function that gives the writer's thread the copies on the CPU.

        A GPU copies its tensors within its own memory. Then a second stream copies them to the CPU while the training continues. The
        training waits if a GPU has no room for the copy.
        """
        kinds = [(tensor.shape, tensor.dtype, tensor.is_cuda) for tensor in tensors]
        if kinds != self._kinds:
            self._kinds, self._buffers = kinds, []
        gpus = [tensor.device for tensor in tensors if tensor.is_cuda]
        if not gpus:
            self._fill(tensors)
            return lambda: self._buffers
        try:
            copies = [tensor.clone() for tensor in tensors]
        except torch.cuda.OutOfMemoryError:
            self._fill(tensors)
            torch.cuda.synchronize()
            return lambda: self._buffers
        copied = torch.cuda.Event()
        copied.record()

        def fetch() -> list[torch.Tensor]:
            stream = torch.cuda.Stream(gpus[0])
            with torch.cuda.stream(stream):
                stream.wait_event(copied)
                self._fill(copies)
            stream.synchronize()
            copies.clear()
            return self._buffers

        return fetch

    def _fill(self, tensors: list[torch.Tensor]) -> None:
        """Copies the tensors into the buffers, which are pinned for a GPU: such copies may still be under way."""
        if not self._buffers:
            pinned = any(tensor.is_cuda for tensor in tensors)
            self._buffers = [torch.empty(t.shape, dtype=t.dtype, pin_memory=pinned) for t in tensors]
        for buffer, tensor in zip(self._buffers, tensors):
            buffer.copy_(tensor, non_blocking=True)

    def _write(
        self, step: int, plain: Any, fetch: Callable[[], dict[str, torch.Tensor]], score: float | None
    ) -> SaveResult:  # fmt: skip
        began = time.perf_counter()
        tensors = fetch()
        self.directory.mkdir(parents=True, exist_ok=True)
        with files.opened_folder(self.directory) as folder:  # another user may put a link in its place at any time
            size = self._write_into(folder, step, plain, tensors, score)
        return SaveResult(self.directory / checkpoint_name(step), time.perf_counter() - began, size)

    def _write_into(
        self, folder: Path, step: int, plain: Any, tensors: dict[str, torch.Tensor], score: float | None
    ) -> int:
        final = folder / checkpoint_name(step)
        replaced = folder / f".replaced-{final.name}.{os.getpid()}"
        try:
            with files.replacing(final) as staging:
                staging.mkdir()
                text = _readable(json.dumps(plain).encode(), MAX_STATE_BYTES, STATE)
                entries = {
                    STATE: _write_file(staging / STATE, [text]),
                    TENSORS: _write_file(staging / TENSORS, tensor_file(tensors)),
                }
                if score is None and final.exists():
                    score = score_of(final, self._rule)  # the same step, saved again: its score still holds
                about: dict[str, Any] = {"format": FORMAT, "step": step, "score": score, "files": entries}
                about["score_of"] = self._rule.name
                about["sha256"] = seal(about)
                files.write_durable(staging / MANIFEST, (json.dumps(about, indent=1) + "\n").encode())
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
        kept = retained(paths, self.keep, self.keep_best)
        for path in paths:
            if path not in kept and path != newest:
                # Renamed first: a crash while its files go must not leave a candidate that is half there.
                with contextlib.suppress(OSError):
                    files.rename(path, path.with_name(f".old-{path.name}.{os.getpid()}"))
                shutil.rmtree(path.with_name(f".old-{path.name}.{os.getpid()}"), ignore_errors=True)


def clean(directory: Path) -> None:
    """Removes the leftovers of a killed save or removal. Restores a checkpoint that was moved away and not replaced."""
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            match = re.fullmatch(r"\.(old-|replaced-)?(step-\d{8,12})\.[0-9a-f]+", path.name)
            if match and match[1] == "replaced-" and not (directory / match[2]).exists():
                files.rename(path, directory / match[2])
            elif match:
                shutil.rmtree(path, ignore_errors=True)


def best(paths: list[Path], rule: Rule) -> Path | None:
    """Returns the checkpoint with the best score, the newest of several; None: none was measured by that rule."""
    step = rule.best({step_of(path): score_of(path, rule) for path in paths})
    return next((path for path in paths if step_of(path) == step), None)


def retained(paths: list[Path], keep: int, keep_best: KeepBest) -> list[Path]:
    """Returns the newest `keep` checkpoints, and the best one if it is kept, of a list that begins with the newest."""
    found = best(paths, Rule.of(keep_best)) if keep_best else None
    return [path for number, path in enumerate(paths) if number < keep or path == found]


def score_of(path: Path, rule: Rule) -> float | None:
    """Returns the score of a checkpoint; None: it was not measured by that rule."""
    about = files.read_json(path / MANIFEST, 1 << 20)
    score = about.get("score") if isinstance(about, dict) and about.get("score_of") == rule.name else None
    return float(score) if isinstance(score, (int, float)) and math.isfinite(score) else None


def seal(value: dict[str, Any]) -> str:
    """Returns the sha256 of the manifest itself, which reveals a flipped digit outside the files' checksums."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _write_file(path: Path, pieces: Sequence[Any]) -> dict[str, Any]:
    """Writes a new durable file while another thread hashes the same bytes. Returns its entry, {bytes, sha256}.

    Args:
        pieces: buffers of bytes, one after the other. They are not copied.
    """
    digest = hashlib.sha256()

    def hash_all() -> None:
        for piece in pieces:
            digest.update(piece)

    hashed = _HASHING.run(hash_all)
    size = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        for piece in pieces:
            view = memoryview(piece).cast("B") if len(piece) else memoryview(b"")
            for start in range(0, len(view), _CHUNK):
                files.write_all(descriptor, view[start : start + _CHUNK])
            size += len(view)
        files.fsync(descriptor)
    finally:
        os.close(descriptor)
        hashed.result()
    return {"bytes": size, "sha256": digest.hexdigest()}


def _readable(text: bytes, limit: int, name: str) -> bytes:
    """Returns `text` if it is short enough to read again. Raises `OSError` otherwise."""
    if len(text) > limit:
        raise OSError(errno.EFBIG, f"{name} would have {len(text)} bytes, and at most {limit} are read")
    return text


def tensor_file(tensors: dict[str, torch.Tensor], metadata: Mapping[str, str] = MappingProxyType({})) -> list[Any]:
    """Returns the byte pieces of a safetensors file (header, then the data of each tensor), without another copy.

    The largest elements come first, so that each tensor lies at a multiple of the size of its elements. Otherwise the order is that of the
    arguments: the library writes its metadata in another order each time.

    Args:
        tensors: contiguous, on the CPU, of the types that a tree may hold.

    Raises:
        OSError: the header is too large to read again.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    entries = [(name, DTYPE_NAMES[tensor.dtype], tensor.shape, tensor.nbytes) for name, tensor in ordered]
    head = _readable(
        files.safetensors_header(entries, {**metadata, "format": "pt"}), MAX_HEADER_BYTES, f"the header of {TENSORS}"
    )
    return [head, *(tensor.reshape(-1).view(torch.uint8).numpy() for _, tensor in ordered)]


_PLACES = ((("shared", "optimizer", "state"), ("optim",)), (("shared",), ()))
"""First parts of a path in the state, and their short form in a tensor's name."""


class _Names:
    """Names of a state's tensors in the tensor file, which describe them.

        model/conv1.weight                       a parameter.
        average/conv1.weight                     its average.
        optim/conv1.weight/momentum_buffer       the optimizer's state for it.
        ranks/0/buffers/norm.running_mean        state of rank 0 alone: buffers, extra, average_buffers, rng, losses, last, sync.

    The plain values around them keep the structure of the state, with `{"$tensor": NAME}` in the place of each tensor.
    """

    def __init__(self) -> None:
        self._used = {"", "__metadata__"}  # safetensors does not allow the latter as a name

    def __call__(self, place: tuple[str, ...]) -> str:
        """Returns the name, with `~` added if it is already used: a key of a mapping may contain a `/`."""
        for beginning, short in _PLACES:
            if place[: len(beginning)] == beginning:
                place = short + place[len(beginning) :]
                break
        name = "/".join(place).encode("utf-8", "replace").decode()  # a file cannot hold half a character
        while name in self._used:
            name += "~"
        self._used.add(name)
        return name
