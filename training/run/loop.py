"""The loop of a run: its epochs, and their batches. Between two batches all ranks save or end together."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

from torch.utils.data import DistributedSampler

from .. import contract, files
from ..config import Config
from ..contract import EXIT_DONE, EXIT_FAILED, UserError, named
from ..data.alike import check_alike_whole, digests
from ..data.batches import Batches, ElasticBatches, Part, begun
from ..data.pytree import to_device
from ..observe.account import TimeCategory
from ..parallel.exchange import all_gather_trees, broadcast_tree, is_same_on_all_ranks
from ..parallel.world import World
from ..resilience.closeness import sha256
from ..resilience.desync import Place
from ..sync.buckets import SentAlready
from .attempt import FIRST_STEPS, Attempt
from .logical_workers import check_alone
from .recording import Recorder, obstacle
from .replica import Replica
from .resume import Snapshot, misfits_explained
from .run import Ended, Run
from .step import STEPS, Step
from .step_input import check_name

T = TypeVar("T")


class Loop:
    """The loop of one attempt. All ranks call the same methods in the same order."""

    def __init__(self, run: Run, replica: Replica) -> None:
        self.run, self.attempt = run, Attempt(run)
        self.step = Step(run, self.attempt, replica)
        self._tells_resumed = run.resumed
        """Whether the run resumes, and no line has reported it yet."""
        self.epochs_planned: int | None = None
        self.steps_planned: int | None = None
        """The arguments of `epochs`; both None: the script has not called `epochs`."""
        self._left_at_last_step = False
        """Whether the last planned step lies within an epoch. A start with more steps resumes there."""
        self._epoch_is_through = False
        """Whether the loop over the batches of this epoch has ended, in this attempt."""
        self._is_left = self._resumes_left = False
        """Whether the script has left this loop by `break`; or, in the start before, by `break` or `run.stop`, so that no batch follows."""
        self._steps_of_batches = self._skipped = 0
        """Steps of the run when it ended; passes of that loop without a step."""
        self._is_recipe = isinstance(run.config, Config)
        self._before_batches = True
        """Whether the script's code before the batches is running, of the run or of an epoch. A start that resumes runs it again."""
        self._under_way: Iterator[Any] | None = None
        """The iterator of the loop under way; None: no loop is open."""

    def begin(self) -> None:
        """Begins the attempt, once the state is restored. Collective."""
        run, replica = self.run, self.step.replica
        self.attempt.begin()
        self.attempt.consensus.final = run.state.history.pop("stopping", None)
        self._resumes_left = self.attempt.consensus.final is not None or bool(run.state.history.pop("is_left", False))
        if run.world.replacement:
            self.attempt.be_at(run.places)
            if self.step.logical_workers is not None:
                check_alone(run)
        else:  # the others have compared theirs
            self.attempt.unsaved.compare_tables(replica.made)
        replica.made.clear()  # the session would keep them alive
        if run.config.capture != "never" and run.world.device.type != "cpu":
            reason = obstacle(replica.sync, replica.optimizers, run.world)
            if reason is not None:
                run.console.line(f"Steps run eagerly: {reason}")
            else:
                (optimizer,) = replica.optimizers.values()
                self.step.recorder = Recorder(self.step, optimizer)  # type: ignore[arg-type]

    # The epochs.

    @property
    def stopped(self) -> str | None:
        """The reason for which the script has ended the run for good, in this start or an earlier one; None: it has not."""
        reason = self.run.state.history.get("stopped")
        return reason if isinstance(reason, str) else None

    @property
    def complete(self) -> bool:
        cursor, epochs = self.run.state.cursor, self.epochs_planned
        return self.stopped is not None or self._at_last_step or (epochs is not None and cursor.epoch >= epochs)

    @property
    def _at_last_step(self) -> bool:
        return self.steps_planned is not None and self.run.user_state.steps >= self.steps_planned

    def stop(self, reason: str) -> None:
        """Ends the run for good, on all ranks, at the next boundary. Raises `TypeError` for a reason that is no text."""
        if not isinstance(reason, str) or not reason:
            raise TypeError(f"stop() takes the reason, a text for status.json; got {reason!r}")
        self.attempt.consensus.final = reason

    def epochs(self, count: int | None, steps: int | None) -> Iterator[int]:
        if (count is None) == (steps is None):
            raise TypeError("epochs() takes a number of epochs, or steps=…")
        run, before = self.run, self.steps_planned if count is None else self.epochs_planned
        self.epochs_planned, self.steps_planned = count, steps
        if before is not None and 0 < (count or steps or 0) <= before and self.complete and not self.stopped:
            unit = "epochs" if steps is None else "steps"
            raise RuntimeError(
                f"a second loop over run.epochs() has nothing left: its number counts all {unit} of the run. Go over all {unit} in one "
                "loop, and choose the phase of the training by the epoch or run.steps"
            )
        if self.stopped and (count or steps or 0) > run.state.history.get("stopped_of", 0):
            run.state.history["stopped"] = None  # more is asked for than the script had planned when it ended the run
        if self.complete:
            accuracy = run.state.history.get("accuracy")
            reached = f", validation accuracy {accuracy:.4f}" if accuracy is not None else ""
            stopped = f"It was stopped: {self.stopped}. " if self.stopped else ""
            run.console.line(
                f"The run is complete: {run.state.cursor.epoch} epochs, {run.user_state.steps} steps{reached}. {stopped}"
                f"Raise the number of {'epochs' if steps is None else 'steps'} to continue, or start over with --fresh"
            )
        while not self.complete:
            self._tell_resumed()
            self.attempt.unsaved.resumes("epochs", compares=run.user_state.epoch_generators is None)
            self._begin_epoch()
            yield run.state.cursor.epoch
            self._under_way = None
            self.attempt.desync.sync_point(Place.EPOCH_END)
            self.step.check_used("epoch")
            if not self._left_at_last_step:
                self._end_epoch()

    def _tell_resumed(self) -> None:
        """Reports once that the run resumes, if something is left to train."""
        run, cursor = self.run, self.run.state.cursor
        if self._tells_resumed:
            self._tells_resumed = False
            run.event("resumed", step=run.user_state.steps, epoch=cursor.epoch, batch=cursor.step)
            run.console.line(f"Resuming at step {run.user_state.steps} (epoch {cursor.epoch + 1}, batch {cursor.step})")

    def _begin_epoch(self) -> None:
        """Restores or captures the generators, so that a draw before the batches of an epoch repeats when the run resumes within it."""
        kept, cursor, device = self.run.user_state, self.run.state.cursor, self.run.world.device
        self._before_batches = True
        if kept.epoch_generators is not None:  # the run resumes within this epoch, or at its first batch
            with misfits_explained():
                kept.restore(kept.epoch_generators, device)
            self.attempt.snapshot = Snapshot(self.run.state, again=True)
            return
        if not cursor.step:
            self._resume_generators()
        kept.epoch_generators = kept.capture(device)

    def _resume_generators(self) -> None:
        """Restores the generators of the checkpoint where the loop reaches its position: the draws continue as in an unbroken run."""
        kept = self.run.user_state
        if kept.cursor_generators is not None:
            kept.restore(kept.cursor_generators, self.run.world.device)
            kept.cursor_generators = None

    def _end_epoch(self) -> None:
        """Reports the epoch, moves the cursor to the next epoch, and saves if a save is due. Raises `Ended`. Collective."""
        run, state, kept, config = self.run, self.run.state, self.run.user_state, self.run.config
        if self._skipped and self._epoch_is_through and kept.steps > self._steps_of_batches:
            run.warn(
                "steps were taken after the last batch of their epoch: list(), sorted() or a generator that reads ahead takes batches "
                "from the loop before their steps, and a checkpoint counts them as used. Make one step in each pass of the loop"
            )
        if self._before_batches:  # the script went over no batches
            self.attempt.put_back()
        self.attempt.snapshot = None
        state.clock.settle()
        self.attempt.tell_readings(wait=True)
        means = self.attempt.epoch_means()
        logged_only = bool(kept.logged_in_epoch) and not run.progressed
        reasons, unscored = zip(*all_gather_trees([self.attempt.consensus.final, logged_only], run.world), strict=True)
        if (reason := next(filter(None, reasons), None)) is not None:
            if silent := [rank for rank, one in enumerate(reasons) if one is None]:
                run.warn(
                    f"run.stop() was called on some ranks only, not on rank {named(silent)}: if each rank decides from its own samples, "
                    "N ranks stop elsewhere than one rank: combine the numbers with run.sum() first"
                )
            state.history |= {"stopped": reason, "stopped_of": self.epochs_planned or self.steps_planned or 0}
        state.cursor.epoch, state.cursor.step, run.progressed = state.cursor.epoch + 1, 0, True
        kept.data, kept.epoch_generators, kept.cursor_generators = {}, None, None
        self.attempt.modes.release()
        self._epoch_is_through = self._is_left = self._resumes_left = False
        logged, kept.logged_in_epoch = kept.logged_in_epoch, {}
        state.history.update(means)
        run.event(
            "epoch", epoch=state.cursor.epoch, step=kept.steps, trained_seconds=round(state.clock.trained, 4),
            **means, accuracy=logged.get("accuracy"), test_loss=logged.get("test_loss"), logged=logged,
            examples_seen=kept.samples, images_per_second=kept.samples / max(state.clock.trained, 1e-9),
        )  # fmt: skip
        last, every_epoch = self.complete, config.checkpoint.every_steps == 0
        if last or every_epoch or self.attempt.saver.due_by_step() or self._best_is_due() or any(unscored):
            self.attempt.save()  # where one has only logged, the start before left during this evaluation
        # An epoch without batches has no other place to leave at.
        if self._before_batches and not last and self.attempt.poll().stop:
            self.attempt.leave()

    def _best_is_due(self) -> bool:
        """Returns whether rank 0 has logged a score of these weights that is the best so far. Collective."""
        return bool(broadcast_tree(self.attempt.saver.scores.asks(self.run.user_state.steps), self.run.world))

    # The batches of an epoch.

    def batches(self, batches: Batches) -> Iterator[Any]:
        """Returns an iterator over the rest of the epoch. Raises `UserError` if the epoch was begun with other batches."""
        self._expect_data(batches.division.describe())
        batches.warn = self.run.warn
        cursor, steps, world = self.run.state.cursor, batches.division.steps, self.run.world
        is_kept = self.run.user_state.has(batches.source)
        if cursor.step and not (self._is_recipe or is_kept):
            with contextlib.closing(ElasticBatches(batches, world, cursor.epoch, 0)) as again:
                self.attempt.unsaved.compare_first(next(again)[0])
        given = ElasticBatches(batches, world, cursor.epoch, cursor.step)
        return self._between_boundaries(given, steps, length=steps)

    def iterate(self, loader: Iterable[Any], accumulate: int | None) -> Iterator[Any]:
        """Returns an iterator over the rest of the epoch: batches, or lists of up to `accumulate`. The cursor counts items. Collective.

        Raises:
            ValueError: `accumulate` is no whole number from 1, or the ranks' loaders have different lengths.
        """
        if accumulate is not None and (type(accumulate) is not int or accumulate < 1):
            raise ValueError(f"accumulate is a number of batches from 1, got {accumulate!r}")
        self._expect_data({} if accumulate is None else {"accumulate": accumulate})
        length = _check_lengths(loader, self.run.world)
        is_kept = self.run.user_state.has(loader)
        passed, given = 0 if is_kept else self.run.state.cursor.step, begun(loader)
        if accumulate is not None:
            given = _lists(given, accumulate)
        skipped, unsaved = deque(itertools.islice(given, passed), maxlen=1), self.attempt.unsaved
        unsaved.compare_batch(*skipped)
        if self.run.resumed and not is_kept and getattr(loader, "persistent_workers", False) is True:
            self.run.warn(
                "the loader's worker processes last for all epochs (persistent_workers), and this start has new ones: what they draw at "
                "random, or count, differs from an undisturbed run. Set persistent_workers=False, unless samples depend on the index alone"
            )
        sampler: Any = getattr(loader, "sampler", None)
        of_torch = type(sampler) is DistributedSampler  # one of a subclass may lack the dataset
        if of_torch and (repeated := sampler.total_size - len(sampler.dataset)) > 0:
            self.run.warn(
                f"the loader's DistributedSampler repeats samples, so that each rank has equally many: {repeated} an epoch count twice. "
                'Give it drop_last=True, or use run.batches(…, uneven="weight"), which takes each once'
            )
        given = unsaved.noting(given)
        length = None if length is None else -(-length // (accumulate or 1))
        return self._between_boundaries(((item, None) for item in given), length=length)

    def _expect_data(self, about: dict[str, Any]) -> None:
        """Notes how the epoch is divided into batches. Raises `UserError` if the run resumes within an epoch that was divided differently;
        `RuntimeError` for a second loop in one epoch."""
        if self._epoch_is_through:
            raise RuntimeError(
                "the batches of this epoch are through: an epoch has one loop over run.batches() or run.iterate(). Put several loaders "
                "into one, such as itertools.chain(a, b), or begin an epoch of run.epochs() for each loop. Go over the loader of an "
                "evaluation itself, without run.batches() or run.iterate()"
            )
        before, step = self.run.user_state.data, self.run.state.cursor.step
        if step and before != about:
            names = sorted(name for name in before.keys() | about.keys() if before.get(name) != about.get(name))
            different = [f"{name}: {before.get(name)} → {about.get(name)}" for name in names]
            raise UserError(
                f"the run resumes after batch {step} of an epoch that was divided differently ({'; '.join(different)}): "
                "undo the change, or start over in another run directory. A script whose dataset grows computes it from the epoch, "
                "or keeps it in run.values and lets it grow after the batches"
            )
        self.run.user_state.data = about

    def _between_boundaries(
        self, given: Iterator[tuple[T, Part | None]], count: int | None = None, length: int | None = None
    ) -> Iterator[T]:
        """Yields each item, with a boundary before it and a new batch of `Step` around it. Raises `Ended`. Collective.

        Args:
            given: (item, this rank's part of it; None: unknown).
            count: batches of the epoch; no boundary follows the last, since the end of the epoch saves. None: unknown.
            length: batches of the epoch, for the progress on the console; None: unknown.
        """
        run, step, clock = self.run, self.step, self.run.state.clock
        if self._under_way is not None:
            raise RuntimeError(
                "a loop over run.batches() or run.iterate() begins inside of another one, and a step belongs to one batch: put both "
                "datasets into one, such as torch.utils.data.StackDataset(a, b), or go over the second loader itself"
            )
        self._under_way, self._before_batches, self._is_left, self._skipped = given, False, False, 0
        self._tell_resumed()
        self.attempt.put_back()
        self.attempt.unsaved.resumes(
            "batches", compares=True, left=not self._resumes_left and run.state.cursor.step != length
        )
        self._resume_generators()
        run.goodput.train()
        self.attempt.desync.outside = False
        try:
            while True:
                self.attempt.modes.release()
                self._left_at_last_step = self._at_last_step and run.state.cursor.step != count
                stopped = self._left_at_last_step or self._resumes_left
                stopped = stopped or (run.state.cursor.step != count and self.attempt.boundary())
                clock.begin()
                item, part = (self, None) if stopped else next(given, (self, None))
                if item is self:
                    # What is drawn from here on, in an evaluation, is drawn again after a resume; the modes are set again, too.
                    self.attempt.modes.hold()
                    run.user_state.cursor_generators = run.user_state.capture(run.world.device)
                    self._epoch_is_through, self._steps_of_batches = True, run.user_state.steps
                    if not self._is_recipe:  # what a recipe does after its batches changes no state
                        self.attempt.snapshot = Snapshot(run.state, again=False)
                    if self._left_at_last_step or not self._is_recipe:
                        self.attempt.unsaved.note_variables()
                    run.goodput.enter(TimeCategory.EVALUATION)
                    return
                if part is None and "batch" not in self.attempt.known:
                    step.same_samples = _same_samples(item, run.world)
                    self.attempt.known.add("batch")
                clock.data_ready()
                step.begin_batch(part)
                if part is not None and not run.state.cursor.step and not self._is_recipe:
                    self.attempt.unsaved.note_first(item)
                item = to_device(item, run.world.device)
                self.attempt.unsaved.given = item
                step.current.begin(item, given)
                yield item
                clock.between()
                step.end_batch()
                self.attempt.unsaved.compare_kinds()
                self._skipped += not step.made
                self.attempt.desync.end_batch(step.made)
                if length is not None:  # how many steps the script makes of a batch is known now
                    steps_an_epoch, length = length * step.made, None
                    if planned := self.steps_planned or (self.epochs_planned or 0) * steps_an_epoch:
                        run.console.planned = planned
                        run.metrics.set("steps_planned", planned)
        except GeneratorExit:
            self._is_left = True
            raise
        finally:
            if self._under_way is given:  # else the script has held it beyond the end of its epoch
                self.attempt.desync.leave_loop()
                self._under_way = None
            getattr(given, "close", lambda: None)()

    def part(self, batch: T) -> T:
        """Returns this rank's contiguous part of a global batch, and gives `step` its number of samples. Collective in the first steps."""
        run = self.run
        if run.world.size > 1 and (run.user_state.steps < FIRST_STEPS or not self.attempt.saver.steps_since):
            run.check_outside()
            self.attempt.desync.collective("run.part()")
            check_alike_whole(batch, run.world)
        mine, part = self.step.current.part(batch)
        self.step.set_part(part)
        return mine  # type: ignore[no-any-return]

    def go_on(self, call: str) -> None:
        """Checks, before a collective of the script, that no other rank is still in a loop."""
        self.step.current.end_step()  # an evaluation begins, or ends
        self.attempt.desync.collective(call)

    def boundary(self, call: str = "") -> None:
        """Leaves if the ranks agreed to, except within a step: no checkpoint could hold its gradients. Raises `Ended`. Collective.

        The script's code before the batches runs again after a resume, so a save within it would hold its changes twice. Left there,
        the run resumes from the checkpoint before. If steps have been taken since, it leaves at the first batch.

        Args:
            call: the name of the script's call; "": the boundary is a part of another call.
        """
        self.attempt.desync.collective(call)
        if self.attempt.poll().stop and not self.step.pending:
            if not self._before_batches:
                if self._steps_of_batches == self.run.user_state.steps:
                    self.attempt.put_back()
                self.run.state.history["is_left"] = self._is_left or self._resumes_left
                self.attempt.leave()
            elif not self.attempt.saver.steps_since:
                self.attempt.leave(saves=False)

    # What the run tells.

    def log(self, numbers: Mapping[str, float]) -> None:
        """Logs numbers as metrics and an event. Raises `ValueError` for an invalid name, `TypeError` for another value."""
        run, kept = self.run, self.run.user_state
        for name in numbers:
            check_name(name)
        values = {name: float(value) for name, value in numbers.items()}
        kept.logged |= values
        self.attempt.unsaved.logged |= values
        kept.logged_in_epoch |= values
        self.attempt.saver.scores.note(values, run.user_state.steps)
        run.state.history.update({name: values[name] for name in ("accuracy", "test_loss") if name in values})
        for name, value in values.items():
            run.metrics.set("logged", value, name)
        run.event("log", step=kept.steps, epoch=run.state.cursor.epoch, **{"values": values})

    def end(self, error: BaseException | None) -> Ended:
        """Ends the attempt on all ranks. Returns how it ended. Raises `error`, or an error of the end. Collective."""
        try:
            try:
                if error is not None:
                    raise error
                self.step.check_used("run")
                self._finish()
            except BaseException as raised:
                self.attempt.end(raised)
                raise
        except Ended as ended:
            return ended
        except NameError as unknown:
            is_after = self.run.resumed and self._epoch_is_through and not self.run.progressed
            if is_after and self.attempt.unsaved.variables.sets(str(unknown.name)):
                raise RuntimeError(
                    f"this start resumes after the last batch of its epoch, so the loop over the batches does not set {unknown.name}: set "
                    "it before this loop. run.loss() is the loss of the last step"
                ) from unknown
            raise
        except SentAlready as sent:  # of the script's own `backward`: `run.backward` says it otherwise
            raise RuntimeError(
                f"a gradient came a second time: the step before had no run.update() ({STEPS}), or a step has two backward passes: add "
                "their losses. For the gradient of an input call torch.autograd.grad(loss, x); for one that no step uses, take the copy of "
                "run.for_evaluation(). If torch.utils.checkpoint calls a layer again, give it use_reentrant=False"
            ) from sent

    def _finish(self) -> NoReturn:
        """Saves, and writes the summary, after the last epoch. Raises `Ended`. Collective."""
        self.attempt.desync.sync_point(Place.RUN_END)
        self.run.goodput.enter(TimeCategory.ENDING)
        run, saver = self.run, self.attempt.saver
        if self._best_is_due() or saver.steps_since:
            self.attempt.save(in_loop=False)
        elif run.progressed:
            self.attempt.unsaved.look()
        trained, history = max(run.state.clock.trained, 1e-9), run.state.history
        saved = saver.durable()
        run.goodput.close()
        of_weights = run.world.leader or run.world.live is not None  # any rank may be the one that tells it
        weights = sha256(run.state.model) if of_weights and run.state.sync.is_replicated else None
        summary = {
            "recipe": run.config.title, "sync": run.config.sync.name, "world_size": run.world.size,
            "steps": run.user_state.steps, "epochs": run.state.cursor.epoch, "train_loss": history.get("train_loss"),
            **{f"train_{name}": history.get(f"train_{name}") for name in run.user_state.measured},
            "test_loss": history.get("test_loss"), "accuracy": history.get("accuracy"),
            "best_accuracy": history.get("best_accuracy"), f"best_{saver.scores.rule.name}": saver.scores.best,
            "images_per_second": run.user_state.samples / trained,
            "examples_seen": run.user_state.samples, "trained_seconds": trained,
            "wall_seconds": time.perf_counter() - run.began, "restarts": run.attempt - 1,
            "preemptions": history.get("preemptions", 0), "checkpoint_failures": saver.failures,
            "weights_sha256": weights, "logged": run.user_state.logged,
            "goodput": run.goodput.account.plain(), **run.user_state.summary,
        }  # fmt: skip
        if run.progressed or not self._stands():
            run.write(lambda directory: directory.summary(summary))
            run.event("done", **summary)
        if not saved:
            raise Ended(EXIT_FAILED, "training finished, but the last checkpoint could not be saved (see the warnings)")
        remark = run.user_state.summary.get("remark")
        if self.stopped is not None:
            if run.progressed:  # else an earlier start has printed it
                run.console.line(f"Stopped for good: {self.stopped}")
            raise Ended(EXIT_DONE, f"stopped: {self.stopped}")
        if (self.epochs_planned, self.steps_planned) != (None, None) and not self.complete:
            epochs = f"{run.state.cursor.epoch} of {self.epochs_planned} epochs"
            so_far = epochs if self.steps_planned is None else f"{run.user_state.steps} of {self.steps_planned} steps"
            reason = f"left after {so_far}: another start resumes"
            run.warn(f"{reason}, unless the script ends its run with run.stop(reason) in place of `break`")
            raise Ended(EXIT_DONE, reason)
        raise Ended(EXIT_DONE, f"complete, but {remark}" if remark else "complete")

    def _stands(self) -> bool:
        """Returns whether summary.json matches the run's present state. A start that adds nothing leaves the file, and prints it for
        those who read the lines. It does not match if a kill came between the last save and the summary."""
        run = self.run
        if run.directory is None:
            return False
        summary: Any = files.read_json(run.directory.path / contract.SUMMARY_FILE)
        now = (run.user_state.steps, run.state.cursor.epoch)
        if not isinstance(summary, dict) or (summary.get("steps"), summary.get("epochs")) != now:
            return False
        if run.world.leader:
            run.console.on_event({"event": "done", **summary})
        return True


def _check_lengths(loader: Any, world: World) -> int | None:
    """Returns the number of batches, the same on all ranks; None: a rank's loader does not know its length. Collective.

    Raises `ValueError` if the ranks' loaders have different lengths: the ranks would wait for one another.
    """
    try:
        length = len(loader)
    except (TypeError, NotImplementedError, AttributeError):
        length = None
    lengths = all_gather_trees(length, world)
    if None not in lengths and len(set(lengths)) > 1:
        listed = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(lengths[:8]))
        raise ValueError(
            f"the loaders of the ranks have different numbers of batches ({listed}): give each rank the same number, for "
            "example with torch's DistributedSampler and drop_last=True, or use run.batches()"
        )
    return None if None in lengths else length


def _same_samples(batch: Any, world: World) -> int:
    """Returns the samples of a batch that is the same on all ranks; 0: the batches differ, or have no array to compare. Collective."""
    if world.size == 1:
        return 0
    mine: list[Any] = []
    with contextlib.suppress(Exception):  # of the batch's own code, which is for the script to judge
        mine = digests(batch)
    same = is_same_on_all_ranks(mine, world)
    return next((shape[0] for _, shape, _ in mine if shape), 0) if same else 0


def _lists(items: Iterator[T], size: int) -> Iterator[list[T]]:
    """Returns an iterator over lists of `size` items; the last list may be shorter."""
    return iter(lambda: list(itertools.islice(items, size)), [])
