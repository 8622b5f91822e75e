"""`train` runs one attempt at a recipe's run, from where its directory says it stands, and returns the exit code."""

from __future__ import annotations

import time
from pathlib import Path

from lockstep.training import cudagraph
from lockstep.training.config import Config
from lockstep.training.contract import EXIT_DONE
from lockstep.training.parallel.world import World
from lockstep.training.resilience.preempt import Signals
from lockstep.training.run.attempt import Ended, Ending, conclude, failed
from lockstep.training.run.prepare import Prepared, prepare
from lockstep.training.run.recipe_attempt import RecipeAttempt
from lockstep.training.run.summary import say_complete, stands, summarise
from lockstep.training.trainer import Trainer


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
    run = prepared.run
    if signals is not None:
        signals.on_second_signal = prepared.exporter.close
    try:
        if prepared.complete:
            say_complete(prepared)
            if run is not None and prepared.world.leader and not stands(prepared):
                summarise(prepared, time.perf_counter() - began, 0)
            ending = Ending(EXIT_DONE, (run and run.done_before) or "complete")
        else:
            ending = _to_the_end(prepared, signals, began)
        return conclude(prepared, signals, ending)
    except BaseException as error:
        code = failed(prepared, error)
        if code is None:
            raise
        return code
    finally:
        if run is not None:
            run.close()


def _to_the_end(prepared: Prepared, signals: Signals | None, began: float) -> Ending:
    try:
        with RecipeAttempt(prepared, signals, began) as attempt:
            make_trainer(prepared).train(attempt)
            return attempt.finish()
    except Ended as ended:
        return ended.ending
