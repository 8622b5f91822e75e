"""One attempt, around its steps: the boundary at which all ranks leave or save together, checkpoints, metrics, the end.

    attempt = Attempt(run)
    attempt.begin()
    attempt.boundary()                          # before each step; raises `Ended` if the ranks agreed to leave.
    …                                           # a step.
    attempt.nonfinite_steps = 0                 # or `skip_step`, if no weight was moved.
    attempt.step_done(lr, samples, grad_norm)
    attempt.end(error)                          # `Ended`, or the error that ends it.

All ranks call the same methods in the same order.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from lockstep.wire.progress import Progress, RunInfo
from lockstep.wire.status import slow_rank_line

from .. import contract
from ..checkpoint.state import gather
from ..contract import EXIT_FAILED, EXIT_PREEMPTED, RUN_AGAIN, UserError, first_line, named
from ..limits import STATUS_SECONDS
from ..observe import listeners
from ..observe.account import TimeCategory
from ..observe.steps import LossReader, SlowRank, Times, means
from ..parallel import process
from ..parallel.exchange import (
    all_gather_trees,
    failing_together,
    is_same_on_all_ranks,
)
from ..parallel.live import Live, RestartRequired
from ..parallel.packing import pack
from ..parallel.process import is_collective
from ..resilience import divergence
from ..resilience.closeness import (
    EACH_ALONE,
    MOVED_APART,
    SAME_BUFFERS,
    SAME_MODE,
    SAME_NUMBER,
    ReplicasDiffer,
    check_parameter_closeness,
    check_same,
    fingerprint,
    sha256,
)
from ..resilience.desync import DesyncDetector
from ..resilience.preempt import Consensus, Decision
from .replica import Buffers, Modes, learning_rates
from .resume import Snapshot, misfits_explained
from .run import Ended, Run
from .saver import Saver
from .unsaved import Unsaved

FIRST_STEPS = 3
"""Steps of an attempt after which the ranks compare the replicas: a schedule's rate may be 0 at the first step."""


class Attempt:
    """One attempt, from the cursor to the end. Every method is called by all ranks, in the same order."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.times: Times = {}
        self.nonfinite_steps = 0
        """Steps in a row whose gradient was not finite."""
        self._steps = 0
        """Steps of this attempt."""
        self.grad_norm: torch.Tensor | None = None
        """The norm of the last step's gradient, a scalar on the device; None where it was not computed."""
        self._compares = run.world.size > 1 and run.state.sync.is_replicated
        """Whether there are replicas to compare."""
        self._compared = not self._compares
        """Whether they were compared after the first steps."""
        self.buffers = Buffers(run.state.model, run.world, alike=run.state.of_all)
        self.modes = Modes(run.state.model)
        self.known: set[str] = set()
        """Checks that the ranks make once in an attempt, and have made: `numbers`, `machine`, `batch`. An admitted rank skips them."""
        self.stage = 0
        """The stage of the step under way: 1: its forward pass, which no rank completes alone; 2: the ranks sum its gradient."""
        self._polls = 0
        self._save_agreed = False
        """Whether the ranks have agreed to save. The next boundary saves, since an evaluation has no boundary."""
        self._told = time.monotonic()
        """Time of the last report of the step to status.json and the console (monotonic, seconds)."""
        self.consensus = Consensus(run.world, run.signals)
        about = RunInfo(
            os.path.abspath(run.path), 0 if os.environ.get(contract.ENV_LIVE) else run.world.size, run.attempt,
            run.config.end_hangs, run.config.preempt.grace_seconds,
        )  # fmt: skip
        self.progress = Progress(run.world.initial_rank, about, os.environ)
        self.slow = SlowRank(run.world, self._tell_slow_rank)
        self._named: tuple[int, str] | None = None
        """The slow rank of the last report, and its phase; None: no rank was slow."""
        self.saver = Saver(run, self._alive)
        self.reading = LossReader(run.state.losses, run.world, of_all=run.state.of_all)
        self.unsaved = Unsaved(run)
        self.snapshot: Snapshot | None = None
        """The state before the code that runs: before the batches of an epoch within which the run resumes, or after the batches."""

    def begin(self) -> None:
        """Begins the attempt, and reports it."""
        run = self.run
        self.desync = DesyncDetector(
            run.world, lambda: 4 * (self._polls + run.user_state.steps) + self.stage, lambda: run.user_state.steps, self._desynced
        )  # fmt: skip
        run.exporter.begin()
        if os.environ.get(contract.ENV_LIVE) and run.world.live is None and run.world.size > 1:
            run.world.live = Live(run.world, run.config.collective_timeout)
        if run.world.live is not None:
            run.world.live.regrouped = self._regrouped
        run.event("start", world_size=run.world.size, step=run.user_state.steps)
        preprocessing = time.perf_counter() - run.began
        run.event("prepared", seconds=preprocessing)
        run.console.line(f"Preprocessing: {preprocessing:.2f} seconds")

    def _regrouped(self, lost: Mapping[int, str], joined: Sequence[int], seconds: float) -> None:
        """Reports the new group of ranks, after a rendezvous without the lost ranks or with admitted ones. All ranks call it.

        A new rank 0 opens the run directory. Rank 0 reports events, metrics, status.json and a console line.

        Args:
            lost: rank → how it was lost.
            joined: the ranks that were admitted.
            seconds: duration of the rendezvous.

        Raises:
            RestartRequired: rank 0 was lost, and this rank cannot open the run directory.
        """
        run, world, step = self.run, self.run.world, self.run.user_state.steps
        if world.leader and run.directory is None:
            try:
                run.take_over()
            except UserError as error:
                raise RestartRequired(f"rank 0 was lost, and {error}: all ranks have to start again") from None
            assert run.directory is not None
            listeners.attach(run.config, run.directory, step)
            self.saver.take_over()
        for rank, how in lost.items():
            if world.leader:
                run.exporter.forget(rank)
            run.event("rank_lost", step=step, rank=rank, how=how)
        for rank in joined:
            run.event("rank_joined", step=step, rank=rank)
        run.goodput.regrouped(seconds)
        run.event("regrouped", step=step, world_size=world.size, generation=world.generation, seconds=round(seconds, 4))
        if run.directory is not None:
            assert world.live is not None
            # The ranks now, and the ranks of the full group, with those that were lost and not replaced.
            run.directory.ranks = [world.size, world.size + len(world.live.lost)]
            run.directory.status(None, "running", step)
        run.metrics.set("ranks", world.size)
        for ranks, what in ((sorted(lost), "lost"), (joined, "replaced")):
            if ranks:
                run.console.line(
                    f"Rank {named(ranks)} was {what} after step {step}. Ranks that train now: {world.size}"
                )

    def _desynced(self, reason: str) -> None:
        """Reports, before the process ends, that the ranks are no longer at the same step."""
        run = self.run
        run.goodput.failed()
        run.goodput.end(EXIT_FAILED)
        if run.directory is not None:
            run.directory.status(EXIT_FAILED, reason, run.user_state.steps)
        if run.world.leader:
            run.console.warn(reason)
        self.saver.close()

    def end(self, error: BaseException) -> None:
        """Waits for what is under way. Collective after `Ended`."""
        self.desync.close()
        self.progress.close()
        try:
            if isinstance(error, Ended):  # all ranks are here: after another error one may be missing
                self.tell_readings(wait=True)
                self.consensus.settle()
            else:
                if is_collective(error):
                    process.shut(self.run.world.peers)
                with contextlib.suppress(RuntimeError):  # the first error counts
                    self.consensus.settle()
        finally:
            self.saver.close()  # whatever happened, the save under way is finished

    def boundary(self) -> bool:
        """Leaves or saves between two steps, if the ranks agreed to. Raises `Ended`. Collective.

        Returns:
            Whether the script has ended the run for good, on any rank.
        """
        live = self.run.world.live
        if live is not None and self.run.world.replacement:
            live.activate()  # the others have looked already
            self.run.untold.clear()  # from before its admission
            self._compares = self.run.state.sync.is_replicated
            return False
        decision = self.poll(self.saver.due_by_time(), self.saver.scores.asks(self.run.user_state.steps))
        if decision.stop:
            self.leave()
        self.saver.look()
        agreed, self._save_agreed = self._save_agreed, False
        if self.saver.due_by_step() or (agreed and self.saver.steps_since > 1) or decision.best:
            self.save()
        if live is not None and decision.admit and not decision.final:
            live.admit(self._state)
            self._compared = True  # as the rank that was admitted: it compares at saves only
        return decision.final

    def _state(self) -> torch.Tensor:
        """Returns, on rank 0, the state from which another rank continues here as this rank does. Collective."""
        self._before_gather()
        self.unsaved.note_variables()
        gathered = gather(self.run.state)
        if gathered is None:
            return torch.empty(0)
        gathered["ranks"] = [rank for rank in gathered["ranks"] if rank is not None]
        return pack({**gathered, "places": [getattr(one, name) for one, name in self._places()]})

    def _places(self) -> list[tuple[Any, str]]:
        """Returns (object, attribute) of what all ranks have alike between two steps, besides the state: their position."""
        return [
            (self, "_polls"), (self, "_save_agreed"), (self, "nonfinite_steps"), (self, "known"), (self.saver, "last_step"),
            (self.unsaved, "looks"), (self.modes, "last"), (self.desync, "met"), (self.desync, "collectives"),
            (self.desync, "steps_a_batch"),
        ]  # fmt: skip

    def be_at(self, places: list[Any]) -> None:
        """Moves this rank to the position of the ranks that have admitted it."""
        for (one, name), value in zip(self._places(), places, strict=True):
            setattr(one, name, value)
        self._compared = True

    def _alive(self) -> None:
        self.progress.alive(self.run.user_state.steps, self._steps)
        self.run.goodput.alive()
        self.run.metrics.alive()

    def poll(self, save_due: bool = False, score: bool | None = None) -> Decision:
        """Returns the decision that the ranks made at the previous boundary, and for a score at this boundary. Collective."""
        self._alive()
        self._polls += 1
        if self._steps >= FIRST_STEPS and not self._compared:
            self._compared, self.consensus.fingerprint = True, fingerprint(*self.run.state.models)
            self._check_buffers()
        elif self.run.world.size > 1:
            self.consensus.fingerprint = self._rates()
        warned, decision = self.consensus.some_without_score, self.consensus.poll(save_due, score)
        if self.consensus.replicas_differ:
            self._replicas_differ()
        if self.consensus.some_without_score and not warned:
            self.run.console.warn(
                f"{self.saver.scores.rule.name} was logged on some ranks only, so the checkpoint with the best one cannot be "
                "kept: log it on all ranks"
            )
        self._save_agreed |= decision.save
        return decision

    def skip_step(self, reason: str) -> None:
        """Reports a step that was skipped because its gradient was not finite. Raises `Ended` if the settings end the run then."""
        run, config = self.run, self.run.config
        run.metrics.count("nonfinite_steps_total")
        run.event("nonfinite", step=run.user_state.steps + 1, reason=reason)
        if config.nonfinite == "stop":
            raise Ended(EXIT_FAILED, f"the run diverged at {reason}; no weight was changed by that step")
        run.console.warn(f"left out {reason}")
        self.nonfinite_steps += 1
        if self.nonfinite_steps > config.nonfinite_limit:
            raise Ended(
                EXIT_FAILED,
                f"{self.nonfinite_steps} steps in a row were left out (nonfinite_limit), the last one at {reason}",
            )

    def step_done(self, lr: float | torch.Tensor | None, samples: int, grad_norm: torch.Tensor | None) -> None:
        """Reports a step that the run has counted. Does not wait for the device. Raises `Ended` if replicas differ.

        Args:
            lr: the learning rate of the first optimizer; None: it has none. A tensor is read at the steps that are logged.
            samples: samples of this rank's part.
            grad_norm: the gradient's norm, a scalar on the device; None: not computed.
        """
        run, state = self.run, self.run.state
        state.clock.end()
        self._steps, self.grad_norm = self._steps + 1, grad_norm
        self.buffers.end()
        self.modes.end()
        if self._steps == 1 and not self.modes.any_training:
            run.console.line(
                "The model trains in evaluation mode, as the script has set it: no dropout, fixed batch statistics"
            )
        done = run.user_state.steps
        if self._steps == 1:
            self.unsaved.variables.note_models()
        if self._steps == 1 and run.world.live is not None:  # it has shown by now that it computes what the others do
            run.world.live.ready()
        measured = state.clock.measured()
        self.times = measured[-1] if measured else self.times
        self.progress.alive(done, self._steps)
        self.slow.step_done(done - state.clock.behind, measured)
        run.goodput.step_done(done, measured)
        if run.config.metrics.enabled:
            run.metrics.step_done(done, measured, samples, state.sync.bytes_sent)
        if time.monotonic() - self._told > STATUS_SECONDS:
            self._told = time.monotonic()
            run.console.progress()
            if run.directory is not None:
                run.directory.status(None, "running", done)
        if done % run.config.log.every == 0 or done in (1, run.console.planned):
            # On a GPU the times of this step become known later.
            values = {
                "step": done,
                "lr": float(0.0 if lr is None else lr),
                "times": {} if state.clock.behind else self.times,
            }
            self.reading.start(state.losses, run.user_state.measured, grad_norm, **values)
        self.tell_readings()
        interval = run.config.log.weights_every
        if interval and done % interval == 0 and (run.world.leader or run.world.live is not None):
            run.event("weights", step=done, sha256=sha256(state.model))
        interval = run.config.check_closeness
        if interval and done % interval == 0:
            self._check_closeness()

    def _tell_slow_rank(self) -> None:
        """Reports the slow rank, if the verdict of `SlowRank` has changed."""
        run, verdict, before = self.run, self.slow.history.verdict, self._named
        self._named = None if verdict is None else (verdict.rank, verdict.phase)
        run.metrics.slow_rank(None if verdict is None else (verdict.rank, verdict.phase, verdict.share))
        plain = None if verdict is None else verdict.plain()
        if run.directory is not None:
            run.directory.slow_rank = plain
        if self._named == before:
            return
        self._told = -STATUS_SECONDS  # status.json has it at once
        if plain is not None:
            run.event("slow_rank", step=run.user_state.steps, **plain)
            run.console.line(f"A slow rank: {slow_rank_line(plain)}")

    def _check_closeness(self) -> None:
        self.run.state.clock.settle()
        live = self.run.world.live

        def compare() -> list[torch.Tensor]:  # running statistics differ between ranks, see `averaged_buffers`
            for model in self.run.state.models:
                check_parameter_closeness(model, batch_statistics=False)
            return []

        with self._telling("replicas", EACH_ALONE):
            compare() if live is None else live.retryable(compare)

    def _check_buffers(self) -> None:
        """Compares the buffers of all ranks. Raises `Ended` if buffers differ that no step changes; warns once of others. Collective."""
        with self._telling("replicas", SAME_BUFFERS):
            if apart := self.buffers.check():
                more = f" (and {len(apart) - 1} more)" if len(apart) > 1 else ""
                self.run.warn(f"the buffer {apart[0]}{more} {MOVED_APART}", about="buffers")

    @contextlib.contextmanager
    def _telling(self, what: str, remedy: str) -> Iterator[None]:
        """Turns `ReplicasDiffer` in the block into `Ended`, with the remedy."""
        try:
            yield
        except ReplicasDiffer as error:
            done = self.run.user_state.steps
            raise Ended(
                EXIT_FAILED,
                f"the {what} are not the same after step {done}: {error}. This state is not saved. {remedy}",
            ) from error

    def _rates(self) -> int:
        """Returns a checksum, from 1, of the learning rates and of the modes in the last step."""
        return 1 + zlib.crc32(repr(learning_rates(self.run.state.optimizers)).encode() + self.modes.last)

    def _replicas_differ(self) -> NoReturn:
        """Finds the learning rate, mode or weight whose difference the fingerprints show. Raises `Ended`. Collective."""
        with self._telling("learning rates", SAME_NUMBER):
            check_same(learning_rates(self.run.state.optimizers), self.run.world)
        with self._telling("modes", SAME_MODE):
            self.modes.check(self.run.world)
        self._check_closeness()
        raise Ended(EXIT_FAILED, f"the replicas were not the same. {EACH_ALONE}")

    def tell_readings(self, wait: bool = False) -> None:
        """Writes an event `step` for each reading that has arrived; with `wait`, for all. All ranks pass the same `wait`."""
        for values in self.reading.poll(wait):
            self.run.metrics.set("learning_rate", values["lr"])
            for name, key in (("loss", "train_loss"), ("grad_norm", "grad_norm")):
                if None not in (values["train_loss"], values[key]):
                    self.run.metrics.set(name, values[key])
            for name in values.keys() - {"train_loss"}:
                if name.startswith("train_") and values[name] is not None:
                    self.run.metrics.set("logged", values[name], name)
            times = {name: round(value, 6) for name, value in (values.pop("times") or self.times).items()}
            self.run.event("step", **values, **times)

    def epoch_means(self) -> dict[str, float | None]:
        """Returns `train_loss` and the other means of the epoch, over the samples of all ranks. Clears their sums. Collective.

        A mean is None if every step was skipped (`nonfinite: skip`).
        """
        state = self.run.state
        of_epoch = means(state.user_state.measured, state.over_ranks(state.losses).tolist())
        state.losses.zero_()
        self.reading.new_epoch()
        return of_epoch

    def save(self, in_loop: bool = True) -> None:
        """Saves a checkpoint. Collective.

        Args:
            in_loop: whether the functions of the script's loop are running, with its variables.

        Raises `Ended` instead if a weight is not finite, or if the replicas differ, so that the newest checkpoint stays usable.
        """
        run, step = self.run, self.run.user_state.steps
        with run.goodput.on(TimeCategory.CHECKPOINT):
            if in_loop:
                self.unsaved.note_variables()
            digests = [self._rates(), fingerprint(*run.state.models) if self._compares else 0]
            if self.consensus.look() or not is_same_on_all_ranks(digests, run.world):
                self._replicas_differ()
            self._check_buffers()
            if run.config.nonfinite != "ignore" and not divergence.finite_everywhere(run.state.model, run.world):
                raise Ended(
                    EXIT_FAILED,
                    f"a weight is NaN or infinite after step {step}: not saved; the last checkpoint is good",
                )
            self.unsaved.look()
            self._before_gather()
            self.saver.save()
            run.goodput.close()

    def put_back(self) -> None:
        """Undoes what the script has changed since the snapshot, if there is one. Where the run ends, warns of what remains. Collective."""
        snapshot, self.snapshot = self.snapshot, None
        if snapshot is None:
            return
        if snapshot.again:
            with failing_together(self.run.world), misfits_explained():
                snapshot.put_back()
            return
        failed = ""
        try:
            snapshot.put_back()
        except Exception as error:  # noqa: BLE001 - of an object of the script
            failed = first_line(error)
        if reason := next(filter(None, all_gather_trees(failed, self.run.world)), None):
            self.run.warn(
                f"a kept object does not take back its state from the end of the batches ({reason}), so what the script has changed in it "
                "since then counts twice after the resume"
            )

    def _before_gather(self) -> None:
        """Finds the buffers and modes at the cursor, for a checkpoint or an admitted rank."""
        self.buffers.find()
        self.modes.find()
        self.run.state.evaluating = self.modes.evaluating()

    def leave(self, saves: bool = True) -> None:
        """Saves, and raises `Ended`, once the ranks have agreed to end early. Collective.

        Args:
            saves: False: the last checkpoint holds all steps.
        """
        self.run.goodput.enter(TimeCategory.ENDING)
        self.saver.leaving_since = time.monotonic()
        self.consensus.settle()
        self.tell_readings(wait=True)
        run, state = self.run, self.run.state
        state.clock.settle()
        signals, stops = zip(*all_gather_trees([self.consensus.reason, self.consensus.final], run.world), strict=True)
        if saves:
            state.history["preemptions"] = state.history.get("preemptions", 0) + 1
            state.history["stopping"] = next(filter(None, stops), None)
            self.save()
        durable, step = self.saver.durable(), run.user_state.steps
        who = next(filter(None, signals), "another rank")
        run.event("preempted", step=step, reason=who, saved=durable)
        if not durable:
            raise Ended(EXIT_FAILED, f"ended early by {who} at step {step}, and could not save (see the warnings)")
        run.metrics.count("preemptions_total")
        raise Ended(EXIT_PREEMPTED, f"ended early by {who} at step {step}: {RUN_AGAIN}")
