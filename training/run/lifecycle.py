"""From the `with` statement of a run to its exit code: what is opened, resumed from the newest checkpoint, and ended."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from lockstep.wire import submitit_api
from lockstep.wire.signals import end_with_launcher, give_back

from ..checkpoint import generators, store
from ..checkpoint.object_store import ObjectStore
from ..checkpoint.state import Cursor, TrainState, parameter_names, scatter
from ..config import Config, RunSettings
from ..contract import (
    ENV_LIVE,
    ENV_NOTE,
    ENV_RESTARTS,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_PREEMPTED,
    EXIT_USAGE,
    VERSION,
    UserError,
    say,
    user_errors,
)  # fmt: skip
from ..files import keep_out_others
from ..models.arithmetic import float32_on_gpus
from ..observe import trackers
from ..observe.account import Bucket
from ..observe.clock import StepClock
from ..observe.console import Console
from ..observe.exporter import Exporter
from ..observe.goodput import GoodputRecorder
from ..observe.rundir import RunDirectory, read_run
from ..parallel import process
from ..parallel.exchange import (
    all_gather_trees,
    broadcast_tree,
    failing_together,
    is_collective,
    unpack,
    waiting_for_all,
)
from ..parallel.live import Live
from ..parallel.world import World, detect, joined, set_threads
from ..resilience import hang
from ..resilience.closeness import named_groups
from ..resilience.preempt import Signals
from ..sync.base import GradientSync
from ..sync.buckets import SentAlready
from .attempt import Attempt, Ended, conclude, failed
from .context import RunContext, note_corrupt_shard
from .loop import Loop
from .recording import Recorder, capture_stream, obstacle
from .replica import Replica
from .step import STEPS, Step


class Lifecycle:
    """One start of a run, in this process. All ranks call `open`, `begin` and `close`, in this order.

    Args:
        fresh: True renames an earlier run in `run_dir` first, but not at a restart by the launcher; a word does so unless the run
            was begun with the same word; "" does not.
        handle_signals: False where the script handles signals itself.
        began: `time.perf_counter()` at the start of the process.
        world: whose ranks have joined; None: `open` joins them.
        tells_run_dir: the output says where the run is kept, since the script does not.
    """

    def __init__(
        self, run_dir: Path, settings: RunSettings, *, fresh: bool | str = False, handle_signals: bool = True,
        began: float | None = None, world: World | None = None, tells_run_dir: bool = False,
    ) -> None:  # fmt: skip
        self.run_dir, self.settings = run_dir, settings
        self._fresh, self._handles, self.began, self._joined = (
            fresh,
            handle_signals,
            began or time.perf_counter(),
            world,
        )
        self._tells_run_dir = tells_run_dir
        self.goodput = GoodputRecorder(os.environ)
        self.loop: Loop | None = None
        self.resumed = False
        """The rank whose disk has the checkpoint that the run resumes from; None: it begins."""
        self.facts: dict[str, Any] = {}
        """What run.yaml says of the run besides its settings: `global_batch_size` and `data`, of a run that is resumed at first."""

    def open(self) -> World:
        """Joins the ranks and opens the run directory. Ends the process for mistakes that the user can correct."""
        end_with_launcher(os.environ)
        keep_out_others()
        self.goodput.enter(Bucket.MEETING)
        with user_errors(), contextlib.ExitStack() as stack:
            self._signals: Signals | None = None
            if self._handles and threading.current_thread() is threading.main_thread():
                self._signals = Signals(self.settings.preempt.signals, meeting=True)
                stack.callback(self._signals.restore)
            else:
                give_back()
            try:
                world = self._joined or stack.enter_context(
                    joined(
                        detect(os.environ),
                        self.settings.device,
                        self.settings.collective_timeout,
                        self.settings.backend,
                    )
                )
                if self._signals is not None:
                    self._signals.meeting = False
                self._world = world
                self.goodput.enter(Bucket.PREPARED)
                stack.enter_context(capture_stream(self.settings, world.device))
                self._opening = stack.enter_context(contextlib.ExitStack())
                self._opening.enter_context(self._opened())
            except Exception as error:
                if not is_collective(error):
                    raise
                raise _not_together(error) from error
            self._stack = stack.pop_all()
        # Alike on all ranks: an order that the script draws is the same one everywhere.
        generators.seed(self.settings.seed)
        return world

    @contextlib.contextmanager
    def _opened(self) -> Iterator[None]:
        """Opens the run directory, serves the metrics, and finds the newest checkpoint. What is open stays so, unless the block
        raises. Collective. Raises `UserError` on all ranks where any of them cannot go on."""
        world, settings = self._world, self.settings
        kept = settings.checkpoint
        restarted = any(os.environ.get(name, "0") != "0" for name in (ENV_RESTARTS, "TORCHELASTIC_RESTART_COUNT"))
        fresh = self._fresh if isinstance(self._fresh, str) else self._fresh and not restarted
        self.threads = set_threads(world, settings.threads, os.environ, exact=settings.exact)
        _arithmetic(settings)
        if world.device.type == "cpu":
            process.keep_freed()
        self.directory: RunDirectory | None = None
        self._objects: ObjectStore | None = None
        exporter: Exporter | None = None
        verified: Path | None = None
        try:
            with failing_together(world):
                if world.leader:
                    objects = ObjectStore(kept.to) if kept.to is not None else None
                    brings = (lambda _: None) if objects is None else partial(objects.check, fresh=fresh)
                    self.directory = RunDirectory.open(self.run_dir, settings, fresh, brings)
                    self._objects = objects
                    if note := os.environ.get(ENV_NOTE):
                        with contextlib.suppress(OSError):  # a copy of the variables of a job that is over
                            Path(note).write_bytes(os.fsencode(self.directory.path))
            if kept.to is not None and not world.replacement:
                limit = settings.collective_timeout
                with waiting_for_all(world, "bring the checkpoint from the bucket", 24 * 3600.0, limit):
                    if self._objects is not None and self.directory is not None:
                        verified = self._objects.acquire(
                            self.directory.path, fresh, kept.keep_best, lambda text: say(f"warning: {text}", sys.stderr)
                        )
                        self.directory.count_attempt()
            # Only now: a directory that is refused stays untouched. First where it is cleared of what earlier attempts left.
            for sweeps in (True, False):
                with failing_together(world):
                    if sweeps == (self.directory is not None):
                        exporter = Exporter(settings.metrics, world, self.run_dir, os.environ, sweeps)
            assert exporter is not None
            self.exporter = exporter
            with self.goodput.on(Bucket.RESTORED):
                with failing_together(world):
                    self._checkpoint = _newest_here(self.directory, world, exporter, verified)
                self.resumed = bool(world.replacement) or broadcast_tree(self._checkpoint is not None, world)
            saved = self.directory.saved if self.directory else None
            if world.replacement:
                saved = read_run(self.run_dir)
            known = (saved.get("global_batch_size"), saved.get("data")) if saved else None
            if (known := broadcast_tree(known, world)) is not None:
                self.facts = {"global_batch_size": known[0], "data": known[1]}
            yield
        except BaseException as error:
            code = EXIT_USAGE if isinstance(error, UserError) else EXIT_FAILED
            if exporter is not None:
                note_corrupt_shard(exporter.metrics, error)
                exporter.close(code)
            if self.directory is not None:
                self.directory.status(code, str(error) or type(error).__name__, self.directory.step_before)
                self.directory.close()
            raise

    def _left(self) -> float:
        """Seconds of the grace period; infinite while no signal has come."""
        since = self._signals.since if self._signals is not None else None
        return math.inf if since is None else since + self.settings.preempt.grace_seconds - time.monotonic()

    def begin(self, replica: Replica, things: Mapping[str, Any], of_rank: Mapping[str, Any]) -> Loop:
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
        ours = {*map(id, replica.networks.values()), id(replica.model), *map(id, replica.optimizers.values())}
        others = {name: thing for name, thing in things.items() if id(thing) not in ours}
        run = self._resume(replica, others, of_rank)
        self._opening.close()  # from here on the end of the attempt closes what it opened
        if self._tells_run_dir:
            run.console.line(f"This run is kept in {self.run_dir}")
        world, attempt = run.world, Attempt(run, self._signals, self.began, replica.optimizers)
        step = Step(run, attempt, replica)
        self.loop = Loop(run, attempt, step, self._saved_generators)
        if self._signals is not None:
            self._signals.on_second_signal = run.exporter.close
        attempt.__enter__()
        if world.replacement:
            attempt.be_at(self._places)
            step.join()
        step.recorder = self._recorder(run, replica)
        self.goodput.enter(Bucket.FIRST_STEP)
        return self.loop

    def _resume(self, replica: Replica, things: Mapping[str, Any], of_rank: Mapping[str, Any]) -> RunContext:
        settings, world, directory = self.settings, self._world, self.directory
        losses = torch.zeros(2, dtype=torch.float64, device=world.device)
        clock = StepClock(world.device)
        state = TrainState(
            world, replica.model, replica.optimizers, replica.sync, replica.ema, Cursor(), clock, losses, {}
        )
        with failing_together(world):
            state.kept.add(things)
            state.kept.add(of_rank, of_rank=True)
            _check_live(world, replica.sync, of_rank)
            _check_parameters(replica.model, replica.optimizers)
        starts = broadcast_tree([directory.attempt, directory.failures] if directory else None, world)
        rates, groups = _rates(replica.optimizers), _groups(replica)
        anew: list[str] = []
        if self.resumed:
            self.goodput.enter(Bucket.RESTORED)
            with failing_together(world):
                gathered = _load(self._checkpoint) if self._checkpoint is not None else None
            if world.replacement:
                gathered = self._admitted()
            with failing_together(world), _misfits_explained():
                source = world.rank if world.replacement else 0
                anew = scatter(gathered, state, source)
            self.goodput.enter(Bucket.PREPARED)
        if self.resumed:  # a node that has nothing but the checkpoint counts on
            saved = [state.history.get("attempts", 0), state.history.get("failures", 0)]
            starts = saved if world.replacement else [max(starts[0], saved[0] + 1), max(starts[1], saved[1])]
        attempt, failures = starts
        if directory is not None:
            directory.attempt, directory.failures = attempt, failures
        state.history.update(attempts=attempt, failures=failures)
        replica.sync.zero_grad()
        self._saved_generators = state.kept.capture(world.device) if self.resumed else None
        by_step = settings.log.score_every > 0
        run = RunContext(
            config=settings, world=world, path=self.run_dir, run=directory, attempt=attempt, state=state, exporter=self.exporter,
            goodput=self.goodput, objects=self._objects, left=self._left,
            console=Console(settings.log, world, by_step, ["validation accuracy"] if isinstance(settings, Config) else None),
        )  # fmt: skip
        if anew and world.leader:
            run.console.warn(
                f"the number of ranks has changed, and each rank has another state of {', '.join(anew)}: none is restored, and it draws as "
                "at a first start"
            )
        _tell_overruled(run, rates)
        _tell_regrouped(run, groups, _groups(replica))
        run.metrics.set("info", 1, settings.title, settings.sync.name, str(world.size), VERSION)
        run.metrics.set("attempt", attempt)
        run.metrics.set("ranks", world.size)
        run.metrics.set("step", run.steps_done)
        run.metrics.count("preemptions_total", by=state.history.get("preemptions", 0))
        with failing_together(world):
            if directory is not None:
                directory.describe(settings, world, self.facts, self.threads)
                trackers.attach(settings, directory, run.steps_done)
        self.goodput.begin(attempt, run.steps_done, world.size)
        self.goodput.count = lambda bucket, seconds: run.metrics.count("time_seconds_total", bucket.value, by=seconds)
        if directory is not None:
            self.goodput.attach(directory)
            directory.told = run.console.on_status
            directory.status(None, "running", run.steps_done)
            directory.listeners.append(run.console.on_event)
        over_gloo = " over gloo" if world.device.type == "cuda" and not world.nccl else ""
        run.console.line(
            f"{world.size} rank{'s' if world.size > 1 else ''} on {world.device.type}{over_gloo}, {self.threads}"
        )
        return run

    def _admitted(self) -> dict[str, Any]:
        """The state of the other ranks, which have admitted this one in the place of a lost rank. It waits for that."""
        world = self._world
        world.live = live = Live(world, self.settings.collective_timeout)
        gathered: dict[str, Any] = unpack(live.join(lambda: all_gather_trees(None, world)))
        self._places = gathered.pop("places")
        return gathered

    def _recorder(self, run: RunContext, replica: Replica) -> Recorder | None:
        """What records the steps as CUDA graphs, where the settings ask for it and that can be."""
        if run.config.capture == "never":
            return None
        reason = obstacle(replica.sync, replica.optimizers, run.world)
        if reason is not None:
            run.console.line(f"Steps run eagerly: {reason}")
            return None
        (optimizer,) = replica.optimizers.values()
        return Recorder(optimizer, replica.sync, run.world, run.console.warn)  # type: ignore[arg-type]

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
                if error is not None:
                    hang.print_once(self._world, error)
                self._stack.__exit__(kind, error, trace)
                if self.loop is None and error is not None and is_collective(error):
                    raise _not_together(error) from error
                if isinstance(error, UserError):
                    raise error
                return  # the error goes on
            self._stack.close()
        if code == EXIT_PREEMPTED and self._signals is not None:
            submitit_api.go_on(self._signals.replaced, self._signals.received)
        if code != EXIT_DONE:
            raise SystemExit(code)

    def _end(self, error: BaseException | None) -> int | None:
        """Ends the attempt. Collective, but for errors of this rank alone.

        Returns:
            The exit code; None where `error` is to be raised.
        """
        if self.loop is None:
            if error is not None:
                return None  # what was opened is closed
            self.exporter.close(EXIT_DONE)
            if self.directory is not None:
                self.directory.close()
            return EXIT_DONE
        run = self.loop.run
        if error is not None and not isinstance(error, Ended):
            self.goodput.failed(is_collective(error))
        self.goodput.enter(Bucket.ENDING)
        code: int | None = None
        try:
            code = conclude(run, self._signals, _ended(self.loop, error))
            return code
        except BaseException as raised:
            code = failed(run, raised)
            if code is None and raised is not error:
                raise
            return code
        finally:
            self.goodput.end(code)
            if self._world.live is not None:
                self._world.live.close()
            if run.run is not None:
                run.run.close()


def _not_together(error: BaseException) -> UserError:
    """Before the first step a collective that fails has no step to be named with."""
    lost = UserError(f"the ranks could not start together, one of them or the way to it was lost: {error}")
    lost.code = EXIT_FAILED
    return lost


def _arithmetic(settings: RunSettings) -> None:
    deterministic = settings.only_deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if torch.are_deterministic_algorithms_enabled() != deterministic:  # the call imports torch's compiler
        torch.use_deterministic_algorithms(deterministic)
    float32_on_gpus(settings.tf32)
    torch.backends.cudnn.benchmark = settings.cudnn_benchmark


def _newest_here(
    directory: RunDirectory | None, world: World, exporter: Exporter, verified: Path | None
) -> Path | None:
    """This rank's newest verified checkpoint; None where it keeps none. Raises `UserError` where all are corrupt.

    Args:
        verified: one that was read a moment ago.
    """
    if directory is None:
        return None
    store.clean(directory.checkpoints)

    def warn(message: str) -> None:
        exporter.metrics.corrupt_file("checkpoint")
        directory.event("corrupt_checkpoint", message=message)
        say(f"warning: rank {world.rank}: {message}", sys.stderr)

    return store.newest_verified(directory.checkpoints, warn, verified)


def _load(path: Path) -> dict[str, Any]:
    """The gathered state of a checkpoint that verifies. Raises `UserError` where its files hold none."""
    try:
        return dict(store.load(path))
    except (store.CorruptCheckpoint, TypeError, ValueError) as error:
        raise UserError(f"its checksums match, but {error} ({path}): restore it from a backup, or remove it") from None


@contextlib.contextmanager
def _misfits_explained() -> Iterator[None]:
    """Turns errors into `UserError`: a checkpoint verifies but does not fit the model, whose code has changed."""
    try:
        yield
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise UserError(
            f"the checkpoint does not fit the model or its optimizer ({type(error).__name__}: {(str(error).splitlines() or [''])[0]}): "
            "resume with the code that wrote it, or start over in another run directory"
        ) from error


def _check_parameters(model: nn.Module, optimizers: dict[str, torch.optim.Optimizer]) -> None:
    """Raises `ValueError` for a parameter that no checkpoint would have."""
    known = {id(parameter) for parameter in model.parameters()}
    for name, optimizer in optimizers.items():
        if any(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"]):
            raise ValueError(f"{name} has a parameter that is not in the replicated model: put it into the model")


def _check_live(world: World, sync: GradientSync, of_rank: Mapping[str, Any]) -> None:
    """Raises `UserError` where the launcher is to go on without a rank that is lost, and the others could not."""
    if not os.environ.get(ENV_LIVE):
        return
    if sync.batch_parts is None:
        raise UserError(
            f"launch --live needs sync.name=exact, under which any ranks compute the same, and this run has {sync.settings.name}: set it, "
            "or leave out --live"
        )
    if not Path("/proc/self/fd").is_dir():
        raise UserError("launch --live needs Linux, which shows a process its connections: leave out --live")
    if world.device.type == "cuda" and world.leader:
        say("warning: launch --live has not been shown on real GPUs, only on a stand-in for CUDA and NCCL", sys.stderr)
    if of_rank:
        raise UserError(
            f"launch --live cannot go on without what a rank alone keeps, and keep_of_rank() has {next(iter(of_rank))}: leave out --live"
        )


def _rates(optimizers: dict[str, torch.optim.Optimizer]) -> dict[str, float]:
    """The learning rate of each group as the script made it, before a schedule has moved it."""
    groups = named_groups(optimizers)
    return {name: float(group.get("initial_lr", group.get("lr", 0.0))) for name, group in groups}


def _tell_overruled(run: RunContext, rates: dict[str, float]) -> None:
    """At the start that brings other learning rates than the last: those of the checkpoint go on."""
    before, run.kept.rates = run.kept.rates, rates
    changed = [f"{name}: {before[name]:g} → {rate:g}" for name, rate in rates.items() if before.get(name, rate) != rate]
    if changed and run.world.leader:
        run.console.warn(
            f"the script has changed a learning rate ({', '.join(changed)}), and the checkpoint's goes on, with its schedule: set it "
            "after run.keep() to train with another"
        )


def _groups(replica: Replica) -> dict[str, list[list[str]]]:
    """The parameters in each optimizer's groups."""
    return {name: parameter_names(replica.sync, optimizer) for name, optimizer in replica.optimizers.items()}


def _tell_regrouped(run: RunContext, made: dict[str, list[list[str]]], current: dict[str, list[list[str]]]) -> None:
    """Warns at a start that makes other groups than the last start did: those of the checkpoint hold."""
    digests = {name: hashlib.sha256(repr(groups).encode()).hexdigest() for name, groups in made.items()}
    before, run.kept.groups = run.kept.groups, digests
    changed = [
        name for name in made if before.get(name, digests[name]) != digests[name] and made[name] != current[name]
    ]
    if changed and run.world.leader:
        run.console.warn(
            f"the script has changed the groups of parameters of {', '.join(changed)}, and those of the checkpoint hold: change them "
            "after run.keep(), or start over in another run directory"
        )


def _ended(loop: Loop, error: BaseException | None) -> Ended:
    """How the attempt ended, on all ranks together. Raises `error`, or what came at the end."""
    try:
        with contextlib.ExitStack() as stack:
            stack.push(loop.attempt.__exit__)
            if error is not None:
                raise error
            loop.step.check_used("run")
            loop.finish()
    except Ended as ended:
        return ended
    except SentAlready as sent:  # of the script's own `backward`: `run.backward` says it otherwise
        raise RuntimeError(
            f"a backward() came whose step before had no run.update(): {STEPS}. Where torch.utils.checkpoint calls a layer again, give it "
            "use_reentrant=False"
        ) from sent
