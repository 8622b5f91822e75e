"""A function on fresh ranks of this machine."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Any


def on_ranks(size: int, timeout: float, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What the importable `function(*args)` gave back on each of `size` fresh ranks of this machine, by rank.

    Each is forked from a process that has torch loaded, and nothing else running (Linux).

    Raises:
        Exception: what the first rank to fail has raised; the others are ended.
        multiprocessing.TimeoutError: no further rank was done within `timeout` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.nn.functional", "lockstep.training.recipe.loop"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with context.Pool(size) as pool:  # each has one call: it waits there until all have joined
        found = pool.imap_unordered(partial(_rank, size, port, function, args), range(size))
        values = dict(found.next(timeout) for _ in range(size))
    return [values[rank] for rank in range(size)]


def _rank(size: int, port: int, function: Callable[..., Any], args: tuple[Any, ...], rank: int) -> tuple[int, Any]:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    return rank, function(*args)
