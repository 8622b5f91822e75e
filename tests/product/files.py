"""Readers of files from elsewhere, and what a save does to the disk."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from typing import TYPE_CHECKING, Any

from tests.product.names import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


def read(kind: str, path: Path, **more: Any) -> Any:
    """What the product makes of a file or folder of that kind. Raises `UserError` where it refuses it."""
    from lockstep.training.checkpoint.store import CorruptCheckpoint

    try:
        return _READERS[kind](path, **more)  # type: ignore[operator]
    except CorruptCheckpoint as error:
        raise UserError(str(error)) from None


def _recipe(path: Path, words: Sequence[str] = ()) -> Any:
    """With `words` as behind `--set`; it is the same again when it was written down and read."""
    from lockstep.training import config
    from lockstep.training.data import making

    loaded = config.load(str(path), list(words))
    again = config.of_run(config.to_dict(loaded), "written down")
    assert config.differences(loaded, again) == [] and loaded.hash() == again.hash()
    making.cache_directory(loaded.data)
    return loaded


def _yaml(path: Path) -> Any:
    from lockstep.training.config import settings

    return settings.read_yaml(path)


def _run(path: Path) -> Any:
    from lockstep.training.observe import rundir
    from lockstep.training.observe.report import record

    rundir.read_run(path)
    return record.read(path)


def _report(path: Path) -> Any:
    from lockstep.training.observe.report import record

    return record.read(path)


def _metrics(path: Path) -> Any:
    from lockstep.jobs.cli import ranks

    return ranks.Reader(path).read()


def _weights(path: Path, into: Any = None) -> Any:
    from lockstep.training.checkpoint import weights

    return weights.read(path) if into is None else weights.load_into(into, path)


def _checkpoint(path: Path, verify: bool = True) -> Any:
    from lockstep.training.checkpoint import store

    if verify:
        store.verify(path)
    return store.load(path)


def _shards(path: Path, verify: bool = True) -> Any:
    from lockstep.training.data.shards import Manifest, Samples

    manifest = Manifest.read(path)
    return Samples.open(manifest, "train", 0, manifest.count("train"), verify)


def _source(path: Path, of: str, **options: Any) -> Any:
    from lockstep.training.config import Data
    from lockstep.training.data import sources

    return sources.stream(Data(source=of, root=str(path), options=options)).gathered()


def _idx(path: Path, dimensions: int = 1) -> Any:
    from lockstep.training.data.sources.builtin import read_idx

    return read_idx(path.parent, path.name, dimensions)


def _code(path: Path) -> Any:
    from lockstep.wire import archive

    return archive.read(path.read_bytes(), "0" * 64)


def _listing(path: Path) -> Any:
    from lockstep.jobs.code import listing

    return listing.files_of(path)


_READERS = {
    "recipe": _recipe, "yaml": _yaml, "run": _run, "report": _report, "metrics": _metrics, "weights": _weights, "checkpoint": _checkpoint,
    "shards": _shards, "source": _source, "idx": _idx, "code": _code, "listing": _listing,
}  # fmt: skip


def setting_names() -> list[str]:
    """The names that `--set` of a run takes."""
    from lockstep.training import config
    from lockstep.training.config import settings

    return [name for name, _ in settings.leaves(config.Config)]


def save(directory: Path, step: int, state: Any, touched: Callable[[int], None] | None = None) -> Path:
    """Saves a checkpoint as a run does, keeping two. `touched(n)` is called before the n-th touch of the disk."""
    from lockstep.training import files
    from lockstep.training.checkpoint.store import Writer

    count = itertools.count(1)

    def watched(function: Any) -> Any:
        return lambda *words: (touched and touched(next(count)), function(*words))[1]

    with contextlib.ExitStack() as stack:
        for name in ("write_all", "fsync", "rename"):
            stack.callback(setattr, files, name, getattr(files, name))
            setattr(files, name, watched(getattr(files, name)))
        writer = Writer(directory, keep=2, keep_best=False)
        path = writer.save(step, state).result().path
        writer.wait()
    return path


def clean(directory: Path) -> None:
    """Removes what killed saves have left, as the next start does."""
    from lockstep.training.checkpoint import store

    store.clean(directory)


def seal(checkpoint: Path) -> None:
    """Has a checkpoint's manifest vouch for the files as they are."""
    from lockstep.training.checkpoint import store

    path = checkpoint / "manifest.json"
    value = json.loads(path.read_bytes())
    for name in value["files"]:
        data = (checkpoint / name).read_bytes()
        value["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    del value["sha256"]
    path.write_text(json.dumps({**value, "sha256": store.seal(value)}))


def make_shards(folder: Path, samples: int = 12, shards: int = 2) -> Path:
    """A folder of shards of small synthetic images."""
    from lockstep.training.data import making, sources

    raw = sources.load("synthetic", folder, False, {"n": samples, "n_test": 3, "size": 4})
    return making.write(raw, folder, "synthetic", shards).directory


def train(*words: str) -> int:
    """The exit code of `python -m lockstep.training WORDS`, in this process: for hundreds of calls."""
    from lockstep.training.__main__ import main

    return main(list(words), {})


def fresh_run(path: Path, patience: float = 0.3) -> Path:
    """Opens a run directory as a start of `smoke` with `--fresh` does; it stays this process's own. Raises `UserError`."""
    from lockstep.training import config
    from lockstep.training.observe import rundir

    rundir.LOCK_SECONDS = patience
    _OPEN.append(rundir.RunDirectory.open(path, config.load("smoke"), True))
    return path


_OPEN: list[Any] = []


def private_folder(folder: Path) -> None:
    """Makes a folder for jobs and looks at it again. Raises `UserError` where somebody else could write there."""
    from lockstep.jobs import records

    records.make(folder)
    records.check(folder)
