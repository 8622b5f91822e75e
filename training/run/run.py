"""A run in this process, from the `with` statement to the exit code: opens it, resumes the newest checkpoint, and ends it."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lockstep.wire import submitit_api
from lockstep.wire.signals import give_back

from .. import generators
from ..checkpoint.object_store import ObjectStore
from ..checkpoint.state import TrainState, UserState, scatter
from ..config import Config, RunSettings, form_of
from ..contract import (
    ENV_NOTE,
    ENV_RESTARTS,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_PREEMPTED,
    VERSION,
    UserError,
    print_error,
    to_stderr,
    user_errors,
)  # fmt: skip
from ..data.shards import CorruptShard
from ..files import keep_out_others
from ..limits import BRING_SECONDS
from ..models.arithmetic import float32_on_gpus
from ..observe import listeners
from ..observe.account import TimeCategory
from ..observe.goodput import GoodputRecorder
from ..observe.listeners import Console
from ..observe.metrics import Exporter, Metrics
from ..observe.rundir import RunDirectory, read_run
from ..observe.steps import StepClock
from ..parallel import process
from ..parallel.exchange import (
    all_gather_trees,
    any_rank,
    broadcast_tree,
    failing_together,
    waiting_for_all,
)
from ..parallel.live import Live
from ..parallel.packing import unpack
from ..parallel.process import is_collective, is_of_torch_distributed
from ..parallel.world import World, detect, joined, set_threads
from ..resilience import desync
from ..resilience.preempt import Signals
from . import resume
from .replica import Replica


class Ended(BaseException):
    """The end of the attempt on all ranks, with an exit code and a reason, one sentence. A loop of the script that catches `Exception`
    must not continue on one rank, so this class is a `BaseException`."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


class Run:
    """One start of a run, in this process. All ranks call `open`, `resume` and `close`, in this order.

    Args:
        fresh: True renames an earlier run in `run_dir` first, except at a restart by the launcher. A word renames the earlier run
            unless that run was begun with the same word. "" renames nothing.
        handle_signals: False if the script handles signals itself.
        began: `time.perf_counter()` at the start of the process.
        world: a world whose ranks have joined; None: `open` joins them.
        tells_run_dir: whether the output names the run directory, because the script does not.
    """

    world: World
    exporter: Exporter
    metrics: Metrics
    # From `resume` on:
    attempt: int
    """Counts the starts of the run, from 1."""
    state: TrainState
    user_state: UserState
    console: Console

    def __init__(
        self, run_dir: Path, settings: RunSettings, *, fresh: bool | str = False, handle_signals: bool = True,
        began: float | None = None, world: World | None = None, tells_run_dir: bool = False,
    ) -> None:  # fmt: skip
        self.path, self.config = run_dir, settings
        self._fresh, self._handles, self._joined = fresh, handle_signals, world
        self.began = began or time.perf_counter()
        self._tells_run_dir = tells_run_dir
        self.goodput = GoodputRecorder(os.environ)
        self.form: dict[str, Any] = {}
        """The values that the first start has chosen for settings that are `auto` (`config.FORM`)."""
        self._warned: set[str] = set()
        self.tables: dict[str, str] = {}
        """The tables of the script as its session opened (`variables.tables`)."""
        self.signals: Signals | None = None
        """The signals that the process receives; None: the script handles signals itself."""
        self.directory: RunDirectory | None = None
        """The run directory on the rank that writes it; None on all other ranks."""
        self.objects: ObjectStore | None = None
        """The bucket of `checkpoint.to` on the rank that writes; None: the setting is empty, or another rank writes."""
        self.resumed = False
        """Whether this start resumes from a checkpoint, or joins ranks that train."""
        self.facts: dict[str, Any] = {}
        """The facts in run.yaml besides the settings: `global_batch_size` and `data`. A resumed run begins with those of its file."""
        self.places: list[Any] = []
        """The position of the ranks that have admitted this rank, for `Attempt.be_at`; empty if this rank was not admitted."""
        self._inside = ""
        """The call whose function each rank runs for its own samples now; "": none."""
        self.progressed = False
        """Whether this attempt has made a step or ended an epoch."""
        self.untold: deque[tuple[int, Any, Callable[[RunDirectory], None]]] = deque()
        """Recent writes of rank 0, as (calls done, key, action), which this rank repeats if it takes rank 0's place."""

    # What is opened.

    def open(self) -> World:
        """Joins the ranks and opens the run directory. Ends the process for mistakes that the user can correct."""
        keep_out_others()
        settings = self.config
        # In this order: an error is printed while a launcher's TERM does not end this process.
        with contextlib.ExitStack() as stack, user_errors():
            if self._handles and threading.current_thread() is threading.main_thread():
                self.signals = Signals(settings.preempt.signals, meeting=True)
                stack.callback(self.signals.restore)
            else:
                give_back()
            try:
                self.world = self._joined or stack.enter_context(
                    joined(detect(os.environ), settings.device, settings.collective_timeout, settings.backend)
                )
                if self.signals is not None:
                    self.signals.meeting = False
                stack.enter_context(_stream(settings, self.world.device))
                self._opening = stack.enter_context(contextlib.ExitStack())
                self._opening.enter_context(self._opened())
            except Exception as error:
                if not is_collective(error):
                    raise
                raise _not_together(error) from error
            self._stack = stack.pop_all()
        # After the session the script draws on: the next session of a search would else repeat the draws after this one.
        self._stack.enter_context(generators.RngScope(self.world.device, every=True))
        # Alike on all ranks: an order that the script draws is the same one everywhere.
        generators.seed(settings.seed)
        return self.world

    @contextlib.contextmanager
    def _opened(self) -> Iterator[None]:
        """Opens the run directory, serves the metrics, and finds the newest checkpoint. Closes both if the block raises.
        Collective. Raises `UserError` on all ranks if any of them cannot continue."""
        world, settings = self.world, self.config
        kept = settings.checkpoint
        restarted = any(os.environ.get(name, "0") != "0" for name in (ENV_RESTARTS, "TORCHELASTIC_RESTART_COUNT"))
        fresh = self._fresh if isinstance(self._fresh, str) else self._fresh and not restarted
        self.threads = set_threads(world, settings.threads, os.environ, exact=settings.exact)
        _arithmetic(settings)
        if world.device.type == "cpu":
            process.keep_freed()
        exporter: Exporter | None = None
        verified: Path | None = None
        try:
            with failing_together(world):
                if world.leader:
                    objects = ObjectStore(kept.to, kept.keep, kept.keep_best) if kept.to is not None else None
                    brings = (lambda _: None) if objects is None else partial(objects.check, fresh=fresh)
                    self.directory = RunDirectory.open(self.path, settings, fresh, brings)
                    self.objects = objects
                    if note := os.environ.get(ENV_NOTE):
                        with contextlib.suppress(OSError):  # a copy of the variables of a job that is over
                            Path(note).write_bytes(os.fsencode(self.directory.path))
            if kept.to is not None and not world.replacement:
                with waiting_for_all(world, "bring the checkpoint from the bucket", BRING_SECONDS):
                    if self.objects is not None and self.directory is not None:
                        verified = self.objects.acquire(fresh, lambda text: to_stderr(f"warning: {text}"))
                        self.directory.count_attempt()
            # Only now: a directory that is refused stays untouched.
            with failing_together(world):
                exporter = Exporter(settings.metrics, world, self.path, os.environ)
            assert exporter is not None
            self.exporter, self.metrics = exporter, exporter.metrics
            with failing_together(world):
                self._checkpoint = resume.newest_checkpoint(self.directory, world, exporter.metrics, verified)
            self.resumed = bool(world.replacement) or broadcast_tree(self._checkpoint is not None, world)
            saved = self.directory.saved if self.directory else None
            if world.replacement:
                saved = read_run(self.path)
            known = (saved.get("global_batch_size"), saved.get("data"), form_of(saved["config"])) if saved else None
            if (known := broadcast_tree(known, world)) is not None:
                self.facts, self.form = {"global_batch_size": known[0], "data": known[1]}, known[2]
            yield
        except BaseException as error:
            code = error.code if isinstance(error, UserError) else EXIT_FAILED
            if exporter is not None:
                _close_after(error, exporter)
            if self.directory is not None:
                self.directory.status(code, str(error) or type(error).__name__, self.directory.step_before)
                self.directory.close()
            raise

    # What is resumed.

    def resume(self, replica: Replica, things: Mapping[str, Any], of_rank: Mapping[str, Any]) -> None:
        """Builds the state of the run, and restores the newest checkpoint, if there is one. Collective.

        Args:
            things: name → object of the script, saved once. The model and its optimizers need not be among them.
            of_rank: name → object of the script, saved for each rank.

        Raises:
            UserError: the checkpoint does not fit the script's objects.
            RuntimeError: there is no optimizer yet.
            TypeError, ValueError: a checkpoint cannot hold one of the objects.
        """
        if not replica.optimizers:
            raise RuntimeError(
                "there is no optimizer: call run.optimizer(…) before keep(), the loop, run.print, run.log, run.values, run.summary and the "
                "like. The checkpoint has its state, too"
            )
        ours = {*map(id, replica.networks.values()), id(replica.model), *map(id, replica.optimizers.values())}
        world, settings = self.world, self.config
        losses = torch.zeros(2, dtype=torch.float64, device=world.device)
        clock = StepClock(world.device)
        state = TrainState(world, replica.model, replica.optimizers, replica.sync, replica.ema, clock, losses)
        with failing_together(world):
            state.user_state.add({name: thing for name, thing in things.items() if id(thing) not in ours})
            state.user_state.add(of_rank, of_rank=True)
            resume.check_live(replica.sync, of_rank)
            replica.check_groups()
        made = resume.Made(replica.sync, replica.optimizers)
        anew = self._restore(state)
        replica.sync.zero_grad()
        # The script draws before the loop reaches the cursor, and restores them there.
        state.user_state.cursor_generators = state.user_state.capture(world.device) if self.resumed else None
        columns = ["validation accuracy"] if isinstance(settings, Config) else None
        self.state, self.user_state = state, state.user_state
        self.console = Console(settings.log, world, self._now, columns)
        if anew:
            self.warn(
                f"the number of ranks has changed, and each rank has another state of {', '.join(anew)}: none is restored, and it draws as "
                "at a first start"
            )
        with resume.misfits_explained():
            made.compare(state.user_state, self.warn)
        self._announce()
        self._opening.close()  # from here on the end of the attempt closes what it opened
        if self._tells_run_dir:
            self.console.line(f"This run is kept in {self.path}")
        if self.signals is not None:
            self.signals.on_second_signal = lambda _: self.exporter.close()

    def _restore(self, state: TrainState) -> list[str]:
        """Restores the saved state, if there is one, and counts this attempt. Collective.

        Returns:
            The names of the script's saved generators that are not restored.
        """
        world, directory, anew = self.world, self.directory, list[str]()
        starts = broadcast_tree([directory.attempt, directory.failures] if directory else None, world)
        if self.resumed:
            with failing_together(world):
                gathered = resume.load(self._checkpoint) if self._checkpoint is not None else None
            if world.replacement:
                gathered = self._admitted()
            with failing_together(world), resume.misfits_explained():
                anew = scatter(gathered, state, world.rank if world.replacement else 0)
                # A node that has nothing but the checkpoint counts on.
                saved = [int(state.history.get(name, 0)) for name in ("attempts", "failures")]
                starts = saved if world.replacement else [max(starts[0], saved[0] + 1), max(starts[1], saved[1])]
        self.attempt, failures = starts
        if directory is not None:
            directory.attempt, directory.failures = starts
        state.history.update(attempts=self.attempt, failures=failures)
        return anew

    def _admitted(self) -> dict[str, Any]:
        """Waits until the other ranks admit this rank in place of a lost one. Returns their state."""
        world = self.world
        world.live = live = Live(world, self.config.collective_timeout)
        gathered: dict[str, Any] = unpack(live.rejoin(lambda: all_gather_trees(None, world)))
        self.places = gathered.pop("places")
        return gathered

    def _announce(self) -> None:
        """Reports the start of the attempt in the metrics, run.yaml, status.json and the first line of the console."""
        settings, world, directory, metrics = self.config, self.world, self.directory, self.metrics
        metrics.set("info", 1, settings.title, settings.sync.name, str(world.size), VERSION)
        metrics.set("attempt", self.attempt)
        metrics.set("ranks", world.size)
        metrics.set("step", self.user_state.steps)
        metrics.count("preemptions_total", by=self.state.history.get("preemptions", 0))
        with failing_together(world):
            if directory is not None:
                directory.describe(settings, world, self.facts, self.threads)
                listeners.attach(settings, directory, self.user_state.steps)
        self.goodput.begin(self.attempt, self.user_state.steps)
        self.goodput.count = lambda bucket, seconds: metrics.count("time_seconds_total", bucket.value, by=seconds)
        if directory is not None:
            self.goodput.attach(directory)
            directory.listeners.append(self.console.on_event)
            directory.status(None, "running", self.user_state.steps)
        over_gloo = " over gloo" if world.size > 1 and world.device.type == "cuda" and not world.nccl else ""
        self.console.line(
            f"{world.size} rank{'s' if world.size > 1 else ''} on {world.device.type}{over_gloo}, {self.threads}"
        )

    # What an attempt shares.

    def _now(self) -> tuple[int, int]:
        """Returns the epoch of the last step, from 1, and the steps of the run so far."""
        cursor = self.state.cursor
        return cursor.epoch + (cursor.step > 0 or cursor.epoch == 0), self.user_state.steps

    @contextlib.contextmanager
    def calling(self, call: str) -> Iterator[None]:
        """Surrounds a function of the script that the ranks call a different number of times, for `check_outside`."""
        self._inside = call
        try:
            yield
        finally:
            self._inside = ""

    def check_outside(self) -> None:
        """Raises `RuntimeError` inside such a function: a collective would hang."""
        if self._inside:
            raise RuntimeError(
                f"the function of {self._inside} calls what needs all ranks at once, but each rank calls it for its own samples: do that "
                f"before {self._inside}, or after it"
            )

    def warn(self, text: str, about: str = "") -> None:
        """Warns once, on rank 0. All ranks call it, so that a rank that takes rank 0's place does not repeat the warning.

        Args:
            about: a key; of the warnings with one key only the first is printed. "": the text is the key.
        """
        if (about or text) not in self._warned:
            self._warned.add(about or text)
            if self.world.leader:
                self.console.warn(text)

    def event(self, kind: str, **values: Any) -> None:
        self.write(lambda directory: directory.event(kind, **values), _key({"event": kind, **values}))

    def write(self, action: Callable[[RunDirectory], None], key: Any = None) -> None:
        """Runs the action on rank 0. If rank 0 is lost, the rank in its place repeats the actions that may be missing.

        Args:
            key: the key of an event; `take_over` skips an event whose key is in the file. None: repeat the action always.
        """
        if self.directory is not None:
            action(self.directory)
        elif self.world.live is not None:
            done = self.world.live.done
            while self.untold and self.untold[0][0] < done - 1:  # no rank is two calls behind
                self.untold.popleft()
            self.untold.append((done, key, action))

    def take_over(self) -> None:
        """Opens the run directory on this rank, in place of a lost rank 0, and repeats its missing writes. Raises `UserError`."""
        self.directory = directory = RunDirectory.take_over(self.path, self.attempt, self.state.history["failures"])
        directory.listeners.append(self.console.on_event)
        self.goodput.take_over(directory)
        kept = self.config.checkpoint
        if kept.to is not None:
            self.objects = ObjectStore(kept.to, kept.keep, kept.keep_best)
            self.objects.take_over(directory.path)
        there = [_key(event) for event in directory.last_events()]
        for _, key, action in self.untold:
            if key is None or key not in there:
                action(directory)
        self.untold.clear()

    # What is ended.

    def close(self, error: BaseException | None, end: Callable[[BaseException | None], Ended] | None) -> None:
        """Ends the run, after `error` if there is one. Raises `SystemExit` for any exit code but 0.

        Args:
            end: returns how the loop ends, or raises; None: no loop has begun.
        """
        with user_errors():
            if isinstance(error, SystemExit) and not error.code:
                error = None  # the script's own way to its end
            if self.signals is not None:
                # If the process leaves now, one more signal must not change its exit code. A script that continues has
                # its handlers back, until its own end.
                atexit.register(self.signals.ignore)
            code = self._code(error, end)
            if code is None:
                assert error is not None
                if isinstance(error, UserError) and desync.prints(self.world, error):
                    print_error(error)  # before a launcher's TERM ends this process again
                self._stack.__exit__(type(error), error, error.__traceback__)
                if end is None and is_collective(error):
                    raise _not_together(error) from error
                if isinstance(error, UserError):
                    raise SystemExit(error.code)
                return  # the error propagates
            self._stack.close()
        if code == EXIT_PREEMPTED and self.signals is not None:
            submitit_api.go_on(self.signals.replaced, self.signals.received)
        if code != EXIT_DONE:
            raise SystemExit(code)

    def _code(self, error: BaseException | None, end: Callable[[BaseException | None], Ended] | None) -> int | None:
        """Ends the attempt. Collective, except after an error of this rank alone.

        Returns:
            The exit code; None: the caller raises `error`.
        """
        if end is None:
            if error is not None:
                return None  # what was opened is closed
            self.exporter.close()
            if self.directory is not None:
                self.directory.close()
            return EXIT_DONE
        if error is not None and not isinstance(error, Ended):
            self.goodput.failed()
        self.goodput.enter(TimeCategory.ENDING)
        code: int | None = None
        try:
            code = self._conclude(end(error))
        except BaseException as raised:
            code = self._failed(raised)
            if code is None and raised is not error:
                raise
        finally:
            self.goodput.end(code)
            if self.world.live is not None:
                self.world.live.close()
                self.world.live = None
            if self.directory is not None:
                self.directory.close()
        return code

    def _conclude(self, ended: Ended) -> int:
        """Writes status and last metrics, once the attempt has ended on all ranks. Returns the exit code. Collective."""
        world = self.world
        if self.signals is not None:
            self.signals.ignore()
        self.write(lambda directory: directory.status(ended.code, ended.reason, self.user_state.steps))
        self.exporter.close()
        if ended.code != EXIT_DONE:
            self.warn(ended.reason)
        any_rank(False, world)  # when one rank has ended, a launcher may end the others
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        return ended.code

    def _failed(self, error: BaseException) -> int | None:
        """Writes status and last metrics after an error, perhaps of this rank alone.

        Returns:
            1 if a collective failed: a sentence names the cause, and no traceback is needed. None: the caller raises the error again.
        """
        world, step = self.world, self.user_state.steps
        code = error.code if isinstance(error, UserError) else EXIT_FAILED
        _close_after(error, self.exporter)
        collective = _failed_collective(world, error)
        if collective is None:
            reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        else:
            process.shut(world.peers)  # also where the attempt had ended before
            code, why = EXIT_FAILED, "" if world.live is None else world.live.why(collective)
            reason = f"step {step}: {why}" if why else desync.describe_failed_collective(world, step, collective)
        if self.directory is not None:
            self.directory.status(code, reason, step)
        if collective is None:
            return None
        if desync.first_of_node(world):
            self.console.warn(reason)
        return code


_KEYS = ("step", "epoch", "batch", "path", "name")
"""The fields of an event that distinguish it from the others of its kind."""


def _key(event: dict[str, Any]) -> tuple[Any, ...]:
    return (event.get("event"), *(event.get(name) for name in _KEYS), sorted(event.get("values") or ()))


def _close_after(error: BaseException, exporter: Exporter) -> None:
    """Counts a damaged shard among the causes of an error that ends the run, and writes the last metrics."""
    if isinstance(error, CorruptShard) or isinstance(error.__cause__, CorruptShard):
        exporter.metrics.corrupt_file("shard")
    exporter.close()


def _not_together(error: BaseException) -> UserError:
    """Returns the error for a collective that failed before the first step, so that the message has no step to name."""
    what = f"the ranks could not start together, one of them or the way to it was lost: {error}"
    return UserError(what, code=EXIT_FAILED)


def _failed_collective(world: World, error: BaseException) -> BaseException | None:
    """Returns the error of the collective that has ended the attempt; None: no collective failed.

    Under `launch --live` the script may have raised another error from it. After the loss of a rank, torch's own errors count too:
    the script uses a process group or a rank that is gone.
    """
    if world.live is None:
        return error if world.size > 1 and is_collective(error) else None
    cause: BaseException | None = error
    while cause is not None and not is_collective(cause) and not (world.generation and is_of_torch_distributed(cause)):
        cause = cause.__cause__ or cause.__context__
    return cause


def _arithmetic(settings: RunSettings) -> None:
    deterministic = settings.deterministic or settings.exact
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if torch.are_deterministic_algorithms_enabled() != deterministic:  # the call imports torch's compiler
        torch.use_deterministic_algorithms(deterministic)
    # Else a kernel writes NaN into each new tensor before the kernel that fills it.
    torch.utils.deterministic.fill_uninitialized_memory = not torch.cuda.is_available()  # type: ignore[attr-defined]
    float32_on_gpus(settings.tf32)
    torch.backends.cudnn.benchmark = settings.cudnn_benchmark
    # Without it float32 runs differ from one another: gradients of filters are added up in the order in which threads come.
    torch.backends.cudnn.deterministic = not settings.cudnn_benchmark


def _stream(config: RunSettings, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Returns a context on a separate stream, if steps may be recorded: the default stream cannot be recorded. Autograd binds a parameter's
    gradient to the stream on which the strategy set its hook. So model, hooks and steps all use this stream."""
    if config.capture == "never" or device.type != "cuda":
        return contextlib.nullcontext()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)
