"""Runs a function of a test on several ranks at once: `results = on_ranks(function, 2, *args)`."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import traceback
from collections.abc import Callable
from typing import Any

from tests.processes import free_port


def _rank(function: Callable[..., Any], rank: int, size: int, port: int, results: Any, args: tuple[Any, ...]) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1",
    )  # fmt: skip
    from training import world

    try:
        with world.joined(world.detect(os.environ), "cpu", 60) as joined:
            world.set_threads(joined, 1, {})
            value = function(joined, *args)
            results.put((rank, True, pickle.dumps(value)))  # a queue would share the memory of tensors instead
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
        raise


def on_ranks(function: Callable[..., Any], size: int, *args: Any, timeout: float = 120) -> list[Any]:
    """What `function(world, *args)` returned on each rank. Any rank's error fails the test."""
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    port = free_port()
    processes = [
        context.Process(target=_rank, args=(function, rank, size, port, results, args), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    try:
        for _ in range(size):
            rank, succeeded, value = results.get(timeout=timeout)
            assert succeeded, f"rank {rank} failed:\n{value}"
            found[rank] = pickle.loads(value)
    except queue.Empty:
        raise AssertionError(f"ranks {sorted(set(range(size)) - set(found))} gave no result in {timeout} s") from None
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        results.close()
    return [found[rank] for rank in range(size)]
