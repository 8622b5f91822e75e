"""`train` runs one attempt of a run, from where its directory says it stands, and returns the exit code."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from training import contract, cudagraph
from training.config import Config
from training.contract import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, UserError
from training.parallel.world import World
from training.resilience.hang import describe_failed_collective, is_collective, naming_the_missing
from training.resilience.preempt import Signals
from training.run.prepare import Prepared, note_corrupt_shard, prepare
from training.run.summary import say_complete, summarise, write_report
from training.session import Ended, Ending, Session
from training.trainer import Trainer


def train(
    config: Config, world: World, run_dir: Path, fresh: bool | str = False, signals: Signals | None = None,
    began: float | None = None,
) -> int:  # fmt: skip
    """Trains, or resumes, a run. Every rank of a joined world calls it.

    Args:
        signals: what the process receives; None where the calling script handles signals itself.
        began: `time.perf_counter()` at the start of the process, for the preprocessing time.

    Returns:
        0 done, 75 saved and to be run again, 1 diverged or not saved.

    Raises:
        UserError: the config, the data or the run directory cannot be used.
    """
    began = time.perf_counter() if began is None else began
    with cudagraph.capture_stream(config, world.device):
        prepared = prepare(config, world, run_dir, fresh)
        return _train(prepared, signals, began)


def make_trainer(prepared: Prepared) -> Trainer:
    """The trainer of a run: one that records its steps as CUDA graphs where the config asks for it and that can be."""
    config, loader, console = prepared.config, prepared.loader, prepared.console
    steps = {"batch_multiple": loader.multiple, "steps_per_epoch": loader.steps_per_epoch}
    if config.capture == "auto":
        obstacle = cudagraph.obstacle(config, prepared.state)
        if obstacle is None:
            return cudagraph.CapturedTrainer(config, prepared.state, prepared.network, console.warn, None, **steps)
        console.line(f"Steps run eagerly: {obstacle}")
    return Trainer(config, prepared.state, prepared.network, **steps)


def _train(prepared: Prepared, signals: Signals | None, began: float) -> int:
    world, run, exporter, console = prepared.world, prepared.run, prepared.exporter, prepared.console
    if signals is not None:
        signals.on_second_signal = exporter.close
    try:
        if prepared.complete:
            say_complete(prepared)
            if run is not None and world.leader and not (run.path / contract.SUMMARY_FILE).exists():
                summarise(prepared, time.perf_counter() - began, 0)  # killed after the last save, before the summary
            ending = Ending(EXIT_DONE, "complete")
        else:
            ending = _to_the_end(prepared, signals, began)
        if signals is not None:
            signals.ignore()
        if run is not None:
            run.status(ending.code, ending.reason, prepared.steps_done)
        exporter.close(ending.code)
        console.close()
        if ending.code != EXIT_DONE and world.leader:
            console.warn(ending.reason)
        _leave_together(world, lambda: write_report(prepared))
        return ending.code
    except BaseException as error:
        console.close()
        note_corrupt_shard(prepared.metrics, error)
        exporter.close(EXIT_USAGE if isinstance(error, UserError) else EXIT_FAILED)
        if world.size > 1 and is_collective(error):
            reason = describe_failed_collective(world, prepared.steps_done, error)
            if run is not None:
                run.status(EXIT_FAILED, reason, prepared.steps_done)
            console.warn(reason)
            return EXIT_FAILED  # the sentence says more than gloo's traceback would
        if run is not None and isinstance(error, UserError):
            run.status(EXIT_USAGE, str(error), prepared.steps_done)
        elif run is not None:
            run.status(EXIT_FAILED, f"{type(error).__name__}: {error}", prepared.steps_done)
        raise
    finally:
        if run is not None:
            run.close()


def _to_the_end(prepared: Prepared, signals: Signals | None, began: float) -> Ending:
    def lost(reason: str) -> None:
        prepared.console.close()
        if prepared.run is not None:
            prepared.run.status(EXIT_FAILED, reason, prepared.steps_done)
        prepared.console.warn(reason)
        session.saver.close()

    world, timeout = prepared.world, prepared.config.collective_timeout
    try:
        with Session(prepared, signals, began) as session:
            with naming_the_missing(world, lambda: prepared.steps_done, timeout, lost):
                make_trainer(prepared).train(session)
            return session.finish()
    except Ended as ended:
        return ended.ending


def _leave_together(world: World, last: Callable[[], None]) -> None:
    """No rank is gone while another still works: the first one out makes launchers end the others.

    Args:
        last: what is done when every rank has written its files.
    """
    if world.size > 1:
        dist.barrier()
    last()
    if world.size > 1:
        dist.barrier()
    if world.device.type == "cuda":
        torch.cuda.synchronize()
