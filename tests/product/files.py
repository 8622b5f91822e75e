"""Readers of file formats, and saves with a hook at each disk access."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from typing import TYPE_CHECKING, Any

from tests.product.inside import Inside

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_config = Inside("training.config")
_files = Inside("training.files")
_shard_writer = Inside("training.data.shard_writer")
_report = Inside("tools.report")
_rundir = Inside("training.observe.rundir")
_shards = Inside("training.data.shards")
_sources = Inside("training.data.sources")
_store = Inside("training.checkpoint.store")
_weights = Inside("training.checkpoint.weights")


def read(kind: str, path: Path, **more: Any) -> Any:
    """Reads a file or folder of that kind as the product does. Raises `UserError` if the product refuses it."""
    try:
        return _READERS[kind](path, **more)
    except _store.CorruptCheckpoint as error:
        raise Inside("training.contract").UserError(str(error)) from None


def _recipe(path: Path, words: Sequence[str] = ()) -> Any:
    """Loads a recipe with `words` as after `--set`, and checks that a round trip changes nothing."""
    loaded = _config.load(str(path), list(words))
    again = _config.of_run(_config.to_dict(loaded), "written down")
    assert _config.differences(loaded, again) == []
    _shard_writer.cache_directory(loaded.data)
    return loaded


def _checkpoint(path: Path, verify: bool = True) -> Any:
    if verify:
        _store.verify(path)
    return _store.load(path)


def _samples(path: Path, verify: bool = True) -> Any:
    manifest = _shards.Manifest.read(path)
    for shard in manifest.splits["train"]:
        manifest.file(shard, verify)
    return _shards.Samples.open(manifest, "train")


def _read_weights(path: Path, into: Any = None) -> Any:
    return _weights.read(path) if into is None else _weights.assign(into, _weights.read(path), path)


_READERS: dict[str, Callable[..., Any]] = {
    "recipe": _recipe,
    "run": lambda path: (_rundir.read_run(path), _report.page([path]))[1],
    "report": lambda path: _report.page([path]),
    "metrics": lambda path: Inside("tools.ranks").Reader(path).read(),
    "weights": _read_weights,
    "checkpoint": _checkpoint,
    "shards": _samples,
    "idx": lambda path: Inside("training.data.sources.builtin").read_idx(path),
}  # fmt: skip


def save(directory: Path, step: int, state: Any, touched: Callable[[int], None] | None = None) -> Path:
    """Saves a checkpoint as a run does, and keeps two. Calls `touched(n)` before the n-th disk access."""
    count = itertools.count(1)

    def watched(function: Any) -> Any:
        return lambda *words, **named: (touched and touched(next(count)), function(*words, **named))[1]

    with contextlib.ExitStack() as stack:
        for owner, name in ((_files, "write_all"), (_files, "fsync"), (_files, "rename"), (os, "unlink")):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, watched(getattr(owner, name)))
        writer = _store.Writer(directory, keep=2, keep_best=False)
        path = writer.save(step, state).result().path
        writer.wait()
    return path


def seal(checkpoint: Path) -> None:
    """Updates a checkpoint's manifest to the files as they are."""
    path = checkpoint / "manifest.json"
    value = json.loads(path.read_bytes())
    for name in value["files"]:
        data = (checkpoint / name).read_bytes()
        value["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    del value["sha256"]
    path.write_text(json.dumps({**value, "sha256": _store.seal(value)}))


def make_shards(folder: Path, samples: int = 12) -> Path:
    """Writes shards of small synthetic images."""
    raw = _sources.load("synthetic", folder, {"n": samples, "n_test": 3, "size": 4})
    return _shard_writer.write(raw.stream(), folder, "synthetic").directory


def export(*words: str) -> int:
    """Runs `lockstep export WORDS` in this process, for hundreds of calls. Returns the exit code."""
    contract = Inside("training.contract")
    try:
        return Inside("tools.export").main(list(words))
    except contract.UserError as error:
        contract.print_error(error)
        return error.code
