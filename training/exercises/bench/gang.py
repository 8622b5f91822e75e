"""Steps of a recipe on fresh ranks, with the time of each phase and the peak memory of every rank."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import random
import resource
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.training.contract import UserError

PHASES = ("data", "forward", "backward", "exposed communication", "optimizer")


@dataclass(frozen=True, slots=True)
class Job:
    recipe: str
    assignments: list[str]
    ranks: int
    steps: int
    warm_up: int
    threads: int


@dataclass(frozen=True, slots=True)
class Measured:
    """One run. Times are means a step over the steps and ranks, in seconds; memory is the largest of any rank."""

    images_per_second: float
    step: float
    phases: dict[str, float]
    peak_bytes: int
    sent_bytes: int
    """Gradient a rank hands to collectives a step."""


def run(job: Job, timeout: float = 600.0) -> Measured:
    """Spawns the ranks, trains, and ends them whatever happens.

    Raises:
        UserError: a rank refuses the recipe, the strategy or the number of ranks.
        RuntimeError: a rank failed, or gave no result within `timeout` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as directory:
        results = on_ranks(job.ranks, timeout, _train, job, Path(directory))
    seconds = max(result["seconds"] for result in results)
    return Measured(
        images_per_second=results[0]["samples"] / seconds,
        step=seconds / job.steps,
        phases={
            phase: sum(result["phases"][phase] for result in results) / len(results) / job.steps for phase in PHASES
        },
        peak_bytes=max(result["peak"] for result in results),
        sent_bytes=results[0]["sent"] // job.steps,
    )


def on_ranks(size: int, timeout: float, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What the importable `function(*args)` gave back on each of `size` fresh ranks of this machine, by rank.

    Raises:
        UserError: a rank raised one.
        RuntimeError: a rank failed, or gave no result within `timeout` seconds.
    """
    context = _context()
    results: Any = context.Queue()
    port = free_port()
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
    """Linux: each rank is forked from a process that has torch loaded, and nothing else running. Elsewhere it imports it."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.nn.functional", "lockstep.training.recipe.loop"])
    return context


def free_port() -> int:
    """A free port below those that the kernel hands out by itself: so no other process gets it by chance before it is used.

    Raises:
        RuntimeError: a hundred ports were all taken.
    """
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise RuntimeError("no free port between 20000 and 32000")


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


def _train(job: Job, directory: Path) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from lockstep.training.run.prepare import prepare

    from lockstep.training import config
    from lockstep.training.parallel import world

    assignments = [*job.assignments, "log.format=json", f"threads={job.threads}", "epochs=1000000"]
    settings = config.load(job.recipe, assignments)
    with world.joined(world.detect(os.environ), settings.device, settings.collective_timeout) as joined:
        before = _memory_in_use(joined.device)
        prepared = prepare(settings, joined, directory / "run", fresh=False)
        timer = _Timer(prepared)
        samples = 0
        for number in range(job.warm_up + job.steps):
            if number == job.warm_up:
                dist.barrier()
                timer.reset()
                sent, began = prepared.state.sync.bytes_sent, time.perf_counter()
            samples += timer.step()
            samples = samples if number >= job.warm_up else 0
        dist.barrier()
        seconds = time.perf_counter() - began
        if prepared.run is not None:
            prepared.run.close()
        return {
            "seconds": seconds, "samples": samples, "phases": timer.phases, "sent": prepared.state.sync.bytes_sent - sent,
            "peak": (torch.cuda.max_memory_allocated() if joined.device.type == "cuda" else _peak()) - before,
        }  # fmt: skip


class _Timer:
    """Takes steps as the loop does, and adds up the seconds of each phase.

    `data` is the wait for the batch and its augmentation; `exposed communication` is what the rank waits for the others
    after its own gradients are complete. On a GPU the device is waited for at each point, which keeps kernels from
    running ahead: shares hold there, sums are above an undisturbed step's.
    """

    def __init__(self, prepared: Any) -> None:
        self.prepared = prepared
        from lockstep.training.run.recipe import make_trainer

        self.trainer = make_trainer(prepared)
        self.epoch, self._step, self._batches = 0, 0, prepared.loader.epoch(0)
        self._forward = self._entered = 0.0
        self._first: float | None = None
        prepared.state.model.register_forward_pre_hook(self._enter)
        prepared.state.model.register_forward_hook(self._leave)
        self.reset()

    def reset(self) -> None:
        self.phases = dict.fromkeys(PHASES, 0.0)

    def _now(self) -> float:
        if self.prepared.world.device.type == "cuda":
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()

    def _enter(self, *_: Any) -> None:
        self._entered = self._now()
        if self._first is None:
            self._first = self._entered

    def _leave(self, *_: Any) -> None:
        self._forward += self._now() - self._entered

    def step(self) -> int:
        """One step; returns the size of its global batch."""
        clock, self._forward, self._first = self.prepared.state.clock, 0.0, None
        began = self._now()
        clock.begin()
        batch = next(self._batches, None)
        if batch is None:
            self.epoch, self._step = self.epoch + 1, 0
            self._batches = self.prepared.loader.epoch(self.epoch)
            batch = next(self._batches)
        clock.data_ready()
        self.prepared.state.cursor.epoch, self.prepared.state.cursor.step = self.epoch, self._step
        self.trainer.step(batch)
        self._step += 1
        end = self._now()
        clock.end()
        self._now()  # on a GPU the phases are known when the device has passed them
        times = clock.measured()[-1]
        data = (self._first or end) - began
        until_ready = times["data_wait"] + times["grad_ready"]
        self.phases["data"] += data
        self.phases["forward"] += self._forward
        self.phases["backward"] += until_ready - data - self._forward
        self.phases["exposed communication"] += times["sync_wait"]
        self.phases["optimizer"] += end - began - until_ready - times["sync_wait"]
        return int(batch.total)


def _peak() -> int:
    """Largest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _memory_in_use(device: Any) -> int:
    """Bytes in use before the model is built: the libraries' own on the CPU, none on a GPU."""
    if device.type == "cuda":
        return 0
    from lockstep.training.parallel.process import resident_bytes

    return resident_bytes() or 0  # none is known where there is no Linux
