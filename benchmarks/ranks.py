"""A function on fresh ranks of this machine."""

from __future__ import annotations

import multiprocessing
import os
import queue
import socket
from collections.abc import Callable
from typing import Any

from lockstep.training.contract import UserError


def on_ranks(size: int, timeout: float, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What the importable `function(*args)` gave back on each of `size` fresh ranks of this machine, by rank.

    Raises:
        UserError: a rank raised one.
        RuntimeError: a rank failed, or gave no result within `timeout` seconds.
    """
    context = _context()
    results: Any = context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rank_arguments = [(rank, size, port, results, function, args) for rank in range(size)]
    processes = [context.Process(target=_rank, args=arguments, daemon=True) for arguments in rank_arguments]
    for process in processes:
        process.start()
    try:
        values = dict(_result(results, timeout) for _ in processes)
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
    return [values[rank] for rank in range(size)]


def _context() -> Any:
    """Each rank is forked from a process that has torch loaded, and nothing else running (Linux)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.nn.functional", "lockstep.training.recipe.loop"])
    return context


def _result(results: Any, timeout: float) -> tuple[int, Any]:
    try:
        rank, outcome, value = results.get(timeout=timeout)
    except queue.Empty:
        raise RuntimeError(f"a rank gave no result within {timeout:.0f} s") from None
    if outcome != "done":
        raise (UserError if outcome == "refused" else RuntimeError)(value)
    return rank, value


def _rank(
    rank: int, size: int, port: int, results: Any, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:  # fmt: skip
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    try:
        results.put((rank, "done", function(*args)))
    except UserError as error:
        results.put((rank, "refused", str(error)))
    except Exception as error:  # noqa: BLE001 - the parent raises it
        results.put((rank, "failed", f"rank {rank}: {type(error).__name__}: {error}"))
