"""Ranks that are forked from this process, which has torch loaded, and how they join for `scale.py`.

A forked rank is a real process with real gloo connections. It costs milliseconds; an interpreter with torch costs two
seconds of CPU time and 200 MB. Nothing but the main thread may run when it is forked.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.scale_counts import Counts, Spent
from lockstep.training import config as configuration
from lockstep.training import files
from lockstep.training.parallel import world as worlds
from lockstep.training.parallel.world import World

TINY = [
    "data.source=synthetic", "data.options={n: 2048, n_test: 512, size: 8, noise: 1.5}", "data.num_shards=4",
    "augment.crop=1", "model=bag_of_tricks", "model_options={width: 0.0625}", "global_batch_size=1024", "uneven=weight", "epochs=1",
    "schedule=[]", "log.report=false", "threads=1", "metrics.port=0", "sync.name=flat", "evaluate.batch_size=64",
]  # fmt: skip
"""A network of a few thousand parameters with batch norm, on images of 8 × 8."""
REPEATS = 20
"""Calls of what takes microseconds."""
Phases = dict[str, Spent]


def launch(
    size: int, work: Callable[..., Any], *args: Any, timeout: float = 600, local_size: int | None = None
) -> list[Any]:
    """What `work(port, *args)` gave on each of `size` ranks (JSON). Raises `RuntimeError` where one failed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        port, pids = _free_port(), []
        try:
            for rank in range(size):
                pid = os.fork()
                if pid == 0:
                    _child(rank, size, local_size or size, port, folder, work, args)
                pids.append(pid)
            _wait(pids, timeout)
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
        failed = sorted(folder.glob("*.error"))
        if failed:
            raise RuntimeError(f"{len(failed)} of {size} ranks failed, the first with: {failed[0].read_text()}")
        return [json.loads((folder / str(rank)).read_text()) for rank in range(size)]


def _wait(pids: list[int], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    left = set(pids)
    while left and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            time.sleep(0.02)
            continue
        left.discard(pid)
        pids.remove(pid)
        if status:  # the others would wait for it
            break


def _child(
    rank: int, size: int, local: int, port: int, folder: Path, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """Never returns."""
    try:
        os.environ.update({
            "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank % local), "LOCAL_WORLD_SIZE": str(local),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        })  # fmt: skip
        torch.set_num_threads(1)
        (folder / str(rank)).write_text(json.dumps(work(port, *args)))
    except BaseException:  # noqa: BLE001 - told to the parent
        (folder / f"{rank}.error").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def joined(port: int, folders: list[Path]) -> Iterator[tuple[World, Counts, Phases]]:
    """This rank in its group, and what joining it has cost."""
    counts = Counts(port, folders)
    files.sha256 = counts.hashing(files.sha256)
    before = counts.now()
    with worlds.joined(worlds.detect(os.environ), "cpu", 300) as world:
        yield world, counts, {"join (torch's store and mesh)": counts.now() - before}


def settings(data: Path, *more: str) -> configuration.Config:
    return configuration.load("smoke", [f"data.root={data}", *TINY, *more])
