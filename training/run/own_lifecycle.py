"""From the `with` statement of a loop of one's own to its exit code: what is opened, begun at the checkpoint, and ended."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from lockstep.training.checkpoint import generators
from lockstep.training.checkpoint.kept import Kept
from lockstep.training.checkpoint.state import Cursor, TrainState, scatter
from lockstep.training.config import OwnSettings
from lockstep.training.config.own import own_settings
from lockstep.training.contract import ENV_RESTARTS, EXIT_DONE, VERSION, UserError, user_errors
from lockstep.training.files import keep_out_others
from lockstep.training.launch import early
from lockstep.training.launch.handed import Handed
from lockstep.training.launch.lifeline import end_with_launcher
from lockstep.training.observe import trackers
from lockstep.training.observe.clock import step_clock
from lockstep.training.observe.console import Console
from lockstep.training.observe.rundir import begun_with
from lockstep.training.parallel.exchange import broadcast_tree, failing_together
from lockstep.training.parallel.world import World, detect, joined
from lockstep.training.resilience.preempt import Signals
from lockstep.training.run.attempt import Attempt, Ended, Ending, conclude, failed
from lockstep.training.run.context import Opened, opened
from lockstep.training.run.own import OwnRun, Replica
from lockstep.training.run.own_loop import OwnLoop
from lockstep.training.run.own_step import STEPS, Step
from lockstep.training.run.resume import load, misfits_explained, newest_here, newest_of_all
from lockstep.training.sync.base import GradientSync
from lockstep.training.sync.buckets import SentAlready


class Lifecycle:
    """One start of a run, in this process. All ranks call `open`, `begin` and `close`, in this order.

    Args:
        settings: by name; `overrides`, as NAME=VALUE, and those of the job take precedence.
        fresh: renames an earlier run in `run_dir` first.
        handle_signals: False where the script handles signals itself.
    """

    def __init__(
        self, run_dir: str | Path, overrides: Sequence[str], config: Mapping[str, Any], settings: Mapping[str, Any], *,
        fresh: bool, handle_signals: bool,
    ) -> None:  # fmt: skip
        self._began = time.perf_counter()
        self._fresh, self._handles = fresh, handle_signals
        with user_errors():
            self._handed = Handed.take(os.environ)
            script = Path(sys.argv[0]).stem or "script"
            self.settings = own_settings(script, config, settings, (*overrides, *self._handed.settings))
        self.run_dir = Path(self._handed.run_dir or run_dir)
        self._loop: OwnLoop | None = None

    def open(self) -> World:
        """Joins the ranks and opens the run directory. Ends the process for mistakes that the user can correct."""
        end_with_launcher(os.environ)
        keep_out_others()
        with user_errors(), contextlib.ExitStack() as stack:
            self._signals: Signals | None = None
            if self._handles and threading.current_thread() is threading.main_thread():
                self._signals = Signals(self.settings.preempt.signals, meeting=True)
                stack.callback(self._signals.restore)
            else:
                early.give_back()
            world = stack.enter_context(
                joined(detect(os.environ), self.settings.device, self.settings.collective_timeout)
            )
            if self._signals is not None:
                self._signals.meeting = False
            restarted = any(os.environ.get(name, "0") != "0" for name in (ENV_RESTARTS, "TORCHELASTIC_RESTART_COUNT"))
            fresh = self._handed.fresh or (self._fresh and not restarted)
            if "name" not in self.settings.sync.model_fields_set:
                # What is `flat` today was `ddp` before: a run that was begun with it goes on with it.
                begun = broadcast_tree(begun_with(self.run_dir, fresh) if world.leader else None, world)
                self.settings.sync.name = "ddp" if begun == "ddp" else self.settings.sync.name
            self._opening = stack.enter_context(contextlib.ExitStack())
            self._place: Opened = self._opening.enter_context(opened(self.settings, world, self.run_dir, fresh))
            self._stack = stack.pop_all()
        # Alike on all ranks: an order that the script draws is the same one everywhere.
        generators.seed(self.settings.seed)
        self._world = world
        return world

    def begin(self, replica: Replica, things: Mapping[str, Any], of_rank: Mapping[str, Any]) -> OwnLoop:
        """The loop from where the run directory says it stands. The model and its optimizers need not be among `things`.

        Raises:
            UserError: the checkpoint does not fit what the script keeps.
            RuntimeError: there is no optimizer yet.
            TypeError, ValueError: things that cannot be kept.
        """
        if not replica.optimizers:
            raise RuntimeError(
                "there is no optimizer: call run.optimizer(…) before keep() and before the loop; its state is kept, too"
            )
        ours = {id(replica.network), id(replica.model), *map(id, replica.optimizers.values())}
        others = {name: thing for name, thing in things.items() if id(thing) not in ours}
        own = _begin(self.settings, self._world, self._place, replica, others, of_rank)
        self._opening.close()  # from here on the end of the attempt closes what it opened
        if self._handed.run_dir:
            own.console.line(f"This run is kept in {self.run_dir}")
        attempt = Attempt(own, self._signals, self._began)
        self._loop = OwnLoop(own, attempt, Step(own, attempt, replica))
        if self._signals is not None:
            self._signals.on_second_signal = own.exporter.close
        attempt.__enter__()
        return self._loop

    def close(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        """Ends the run, after `error` where there is one. Raises `SystemExit` for any exit code but 0."""
        with user_errors():
            if isinstance(error, SystemExit) and not error.code:
                kind = error = trace = None  # the script's own way to its end
            if self._signals is not None:
                # Where the process leaves now, one more signal must not change its exit code. A script that goes on has
                # its handlers back, until its own end.
                atexit.register(self._signals.ignore)
            code = self._end(error)
            if code is None:
                self._stack.__exit__(kind, error, trace)
                if isinstance(error, UserError):
                    raise error
                return  # the error goes on
            self._stack.close()
        if code != EXIT_DONE:
            raise SystemExit(code)

    def _end(self, error: BaseException | None) -> int | None:
        """Ends the attempt. Collective, but for errors of this rank alone.

        Returns:
            The exit code; None where `error` is to be raised.
        """
        place = self._place
        if self._loop is None:
            if error is not None:
                return None  # what `opened` opened, it closes
            place.exporter.close(EXIT_DONE)
            if place.run is not None:
                place.run.close()
            return EXIT_DONE
        own = self._loop.own
        try:
            return conclude(own, self._signals, _ending(self._loop, error, self._began))
        except BaseException as found:
            code = failed(own, found)
            if code is None and found is not error:
                raise
            return code
        finally:
            if own.run is not None:
                own.run.close()


def _begin(
    config: OwnSettings, world: World, place: Opened, replica: Replica,
    things: Mapping[str, Any], of_rank: Mapping[str, Any],
) -> OwnRun:  # fmt: skip
    run, exporter = place.run, place.exporter
    first, *further = replica.optimizers.items()
    kept = Kept()
    with failing_together(world):
        kept.add({**things, **{name: _FurtherOptimizer(replica.sync, optimizer) for name, optimizer in further}})
        kept.add(of_rank, of_rank=True)
        _check_parameters(replica.model, replica.optimizers)
        path = newest_here(run, world, exporter.metrics)
    losses = torch.zeros(2, dtype=torch.float64, device=world.device)
    clock = step_clock(world.device)
    state = TrainState(
        world, replica.model, first[1], replica.sync, replica.ema, Cursor(), clock, losses, {}, None, kept
    )  # fmt: skip
    attempt = broadcast_tree(run.attempt if run else None, world)
    source = newest_of_all(path, world)
    if source is not None:
        with failing_together(world):
            gathered = load(path) if path is not None and world.rank == source else None
        with failing_together(world), misfits_explained():
            scatter(gathered, state, source)
    state.history["attempts"] = attempt
    replica.model.train()
    replica.sync.zero_grad()
    own = OwnRun(
        config=config, world=world, run=run, attempt=attempt, state=state, exporter=exporter, kept=kept,
        console=Console(config.log, world, 0, 0),
        saved_generators=generators.capture(world.device) if source is not None else None,
    )  # fmt: skip
    own.metrics.describe(
        recipe=config.script, sync=config.sync.name, world_size=world.size, version=VERSION, attempt=attempt,
        step=own.steps_done, planned=None, preemptions=state.history.get("preemptions", 0),
    )  # fmt: skip
    with failing_together(world):
        if run is not None:
            run.describe(config, world, None, {}, place.threads)
            if world.leader:
                trackers.attach(config, run, own.steps_done)
    if run is not None:
        run.status(None, "running", own.steps_done)
        run.listeners.append(own.console.on_event)
    own.console.line(f"{world.size} rank{'s' if world.size > 1 else ''} on {world.device.type}, {place.threads}")
    if source is not None:
        own.event("resumed", step=own.steps_done, epoch=state.cursor.epoch, batch=state.cursor.step)
        own.console.line(
            f"Resuming at step {own.steps_done} (epoch {state.cursor.epoch + 1}, batch {state.cursor.step})"
        )
    return own


def _check_parameters(model: nn.Module, optimizers: dict[str, torch.optim.Optimizer]) -> None:
    """Raises `ValueError` for a parameter that no checkpoint would have."""
    known = {id(parameter) for parameter in model.parameters()}
    for name, optimizer in optimizers.items():
        if any(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"]):
            raise ValueError(f"{name} has a parameter that is not in the replicated model: put it into the model")


def _ending(loop: OwnLoop, error: BaseException | None, began: float) -> Ending:
    """How the attempt ended, on all ranks together. Raises `error`, or what came at the end."""
    try:
        with contextlib.ExitStack() as stack:
            stack.push(loop.attempt.__exit__)
            if error is not None:
                raise error
            loop.step.check_used("run")
            return loop.own.finish(loop.attempt, began)
    except Ended as ended:
        return ended.ending
    except SentAlready as sent:  # of the script's own `backward`: `run.backward` says it otherwise
        raise RuntimeError(f"a backward() came whose step before had no run.update(): {STEPS}") from sent


class _FurtherOptimizer:
    """An optimizer beside the first one, in the form of what a script keeps."""

    def __init__(self, sync: GradientSync, optimizer: torch.optim.Optimizer) -> None:
        self._sync, self._optimizer = sync, optimizer

    def state_dict(self) -> Any:
        return self._optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._sync.load_optimizer_state(self._optimizer, state)
