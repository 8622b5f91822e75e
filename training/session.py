"""`Session`: your own training loop with ranks, checkpoints, signals, metrics and exit codes, as a recipe has them.

    with Session("runs/mine", sync="flat") as run:
        model = run.replicate(Net())
        optimizer = run.optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        run.keep(schedule=schedule)                         # resumes here, if there is a checkpoint
        for epoch in run.epochs(10):
            for x, y in run.batches(dataset, 512):          # between two batches all ranks save, or end, together
                run.step(F.cross_entropy(model(x), y))      # backward, sum over the ranks, optimizer
                schedule.step()
            run.log(accuracy=evaluate(run.for_evaluation()))

The same script runs in one process and under every launcher. All ranks must call the same methods in the same order.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from training import sync as strategies
from training.checkpoint import generators
from training.config.own import own_settings
from training.contract import ENV_RESTARTS, EXIT_DONE, UserError, user_errors
from training.data import order
from training.data.batches import Batches, Part, leave_signals_to_the_rank, to_device
from training.files import keep_out_others
from training.launch.handed import Handed
from training.launch.lifeline import end_with_launcher
from training.parallel.world import detect, joined
from training.resilience.preempt import Signals
from training.run.attempt import Attempt
from training.run.context import Opened, opened
from training.run.own import OwnRun, Replica, begin, end
from training.run.own_step import Step

T = TypeVar("T")


class Session:
    """One start of a run with your own loop. It resumes from the newest checkpoint in the run directory.

    Leaving the `with` block ends the run. Exit codes: 0 after the last epoch; 75 if a signal to any rank ended it early
    (the state is saved, start it again); 1 if it diverged or ranks are missing; 2 for mistakes that the user can correct.

    Args:
        run_dir: the run directory, unless the job names one (`run_dir` in job.yaml, `lockstep run --run-dir`). A run that is
            there is resumed; one of another script or with other settings is refused.
        words: settings as NAME=VALUE, e.g. from the command line: `checkpoint.every_steps=100`, `config.lr=0.1`. The job's
            `overrides` take precedence.
        config: the settings of the script, for run.yaml and the report. A start with other settings is refused.
        fresh: renames an earlier run in `run_dir` first, and starts over.
        handle_signals: False if the script handles TERM, USR1, USR2, INT and HUP itself.
        settings: settings by name, e.g. `seed=3`, `sync="flat"`, `checkpoint={"every_steps": 100}`
            (docs/own-training.md lists them).
    """

    def __init__(
        self, run_dir: str | Path, *words: str, config: Mapping[str, Any] | None = None, fresh: bool = False,
        handle_signals: bool = True, **settings: Any,
    ) -> None:  # fmt: skip
        self.began = time.perf_counter()
        self._fresh, self._handles = fresh, handle_signals
        with user_errors():
            self._handed = Handed.take(os.environ)
            script = Path(sys.argv[0]).stem or "script"
            self.settings = own_settings(script, config or {}, settings, (*words, *self._handed.settings))
        self.run_dir = Path(self._handed.run_dir or run_dir)
        self.seed = self.settings.seed
        self._replica: Replica | None = None
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._own: OwnRun | None = None
        self._attempt: Attempt | None = None
        self._step: Step | None = None

    def __enter__(self) -> Session:
        end_with_launcher(os.environ)
        keep_out_others()
        with user_errors(), contextlib.ExitStack() as stack:
            self._signals: Signals | None = None
            if self._handles and threading.current_thread() is threading.main_thread():
                self._signals = Signals(self.settings.preempt.signals, meeting=True)
                stack.callback(self._signals.restore)
            self.world = stack.enter_context(
                joined(detect(os.environ), self.settings.device, self.settings.collective_timeout)
            )
            if self._signals is not None:
                self._signals.meeting = False
            restarted = any(os.environ.get(name, "0") != "0" for name in (ENV_RESTARTS, "TORCHELASTIC_RESTART_COUNT"))
            self._opening = stack.enter_context(contextlib.ExitStack())
            self._place: Opened = self._opening.enter_context(
                opened(self.settings, self.world, self.run_dir, self._handed.fresh or (self._fresh and not restarted))
            )
            self._stack = stack.pop_all()
        generators.seed(self.seed)  # alike on all ranks: an order that the script draws is the same one everywhere
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        with user_errors():
            if isinstance(error, SystemExit) and not error.code:
                kind = error = trace = None  # the script's own way to its end
            code = end(self._place, self._own, self._attempt, self._signals, error, self.began)
            if code is None:
                self._stack.__exit__(kind, error, trace)
                if isinstance(error, UserError):
                    raise error
                return  # the error goes on
            self._stack.close()
        if code != EXIT_DONE:
            raise SystemExit(code)

    @property
    def config(self) -> dict[str, Any]:
        """The script's own settings, as the command line and the job have changed them (`config.NAME=VALUE`)."""
        return self.settings.config

    @property
    def rank(self) -> int:
        """This process's rank, from 0."""
        return self.world.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.world.size

    @property
    def leader(self) -> bool:
        """Whether this is rank 0."""
        return self.world.leader

    @property
    def device(self) -> torch.device:
        """Where this rank trains."""
        return self.world.device

    def replicate(self, model: nn.Module, example: Any = None) -> nn.Module:
        """Returns the network to call. It is on the rank's device and has rank 0's weights; its gradients are summed over the ranks.

        Args:
            model: has at least one parameter that requires a gradient. One model per run: put several networks into one module.
            example: a batch that the network accepts; `powersgd` needs one.

        Raises:
            UserError: the strategy (`sync=…`) does not support the model.
        """
        self._not_yet("replicate()")
        if self._replica is not None:
            raise RuntimeError("replicate() was called before: put the networks into one module")
        model.to(self.device)
        strategy = strategies.build(self.settings.sync)
        network = strategy.wrap(model, self.world, example)
        self._replica = Replica(model, network, strategy)
        return network

    def optimizer(
        self, build: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], name: str = "optimizer"
    ) -> torch.optim.Optimizer:
        """The optimizer over the replicated model's parameters; `zero1` and `fsdp` shard its state.

        Args:
            build: makes the optimizer for the parameters that it gets, or for some of them.
            name: needed if there are several optimizers.
        """
        self._not_yet("optimizer()")
        replica = self._replicated()
        if name in self._optimizers:
            raise ValueError(f"optimizer({name}) was called twice with this name: give the second one another name")
        if self._optimizers and self.settings.sync.name in ("zero1", "fsdp", "hooks", "horovod"):
            raise replica.sync.refuse("takes one optimizer", "use sync.name=flat or ddp for several")
        self._optimizers[name] = replica.sync.make_optimizer(build)
        return self._optimizers[name]

    def average(self, decay: float, every: int = 1) -> None:
        """Keeps an exponential moving average of the weights, which `for_evaluation` returns.

        Args:
            decay: per step, in (0, 1).
            every: steps between two updates, each with decay ** every.
        """
        self._not_yet("average()")
        self._replicated().averaged(decay, every)

    def keep(self, **things: Any) -> None:
        """Adds the states of these objects (schedulers, scalers, …) to every checkpoint, and loads the newest checkpoint, if
        there is one. The model and its optimizers are always saved. Call it once, when all objects are made.

        Raises:
            TypeError: an object without `state_dict` and `load_state_dict`, or a state that no checkpoint can hold.
        """
        self._begin(things, {})

    def keep_of_rank(self, things: Mapping[str, Any], **shared: Any) -> None:
        """`keep`, with `things` that differ between the ranks, for example the position of a loader."""
        self._begin(shared, things)

    def _begin(self, things: Mapping[str, Any], of_rank: Mapping[str, Any]) -> None:
        self._not_yet("keep()")
        replica = self._replicated()
        if not self._optimizers:
            raise RuntimeError("keep() before optimizer(): make the optimizer first, its state is kept too")
        ours = {id(replica.network), id(replica.model), *map(id, self._optimizers.values())}
        others = {name: thing for name, thing in things.items() if id(thing) not in ours}
        own = begin(self.settings, self.world, self._place, replica, self._optimizers, others, of_rank)
        self._opening.close()  # from here on the end of the attempt closes what it opened
        if self._handed.run_dir:
            own.console.line(f"This run is kept in {self.run_dir}")
        self._own, self._attempt = own, Attempt(own, self._signals, self.began)
        if self._signals is not None:
            self._signals.on_second_signal = own.exporter.close
        self._attempt.__enter__()
        self._step = Step(own, self._attempt, replica, self._optimizers)

    @property
    def values(self) -> dict[str, Any]:
        """Values of the script, saved in every checkpoint: numbers, texts, tensors, numpy arrays, lists, dictionaries.

        They must be the same on every rank; those of rank 0 are saved.
        """
        return self._started().kept.values

    @property
    def steps(self) -> int:
        """Optimizer steps since the run began."""
        return self._started().steps_done

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left, up to `count`; numbers start at 0. The run is saved at the end of each epoch, unless
        `checkpoint.every_steps` is set."""
        own, attempt = self._started(), self._under_way()
        if own.complete(count):
            own.console.line(f"The run is complete: {count} epochs, {own.steps_done} steps.")
        while not own.complete(count):
            own.begin_epoch()
            yield own.state.cursor.epoch
            own.end_epoch(attempt, count)

    def batches(
        self, dataset: Any, global_batch_size: int, *, shuffle: bool = True, uneven: str = "drop", workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Iterator[Any]:  # fmt: skip
        """This rank's part of each global batch that is left of the epoch, on its device.

        A global batch has the same samples at every number of ranks. Random transforms of a sample depend only on the
        seed, the epoch and the sample. A rank whose part is empty gets one sample with weight 0.

        Args:
            dataset: map-style: it has a length and `dataset[id]`.
            global_batch_size: samples per step, all ranks together.
            uneven: `drop`, `pad` or `weight`, as in a recipe: what happens to a batch that is short, or cannot be divided equally.
            workers: processes that load samples; 0: this one.
            collate: as `collate_fn` of torch's DataLoader.
        """
        cut = Batches(
            dataset, self.world, self.seed, global_batch_size, shuffle=shuffle, uneven=uneven, workers=workers,
            collate=collate,
        )  # fmt: skip
        own = self._started()
        own.expect_data(cut.describe())
        cursor = own.state.cursor
        own.plan(cut.steps)
        return self._iterate(cut.epoch(cursor.epoch, cursor.step))

    def iterate(self, loader: Iterable[T]) -> Iterator[T]:
        """The batches of `loader` for this rank that are left of the epoch. Between two batches all ranks save, or end, together.

        A run that resumes in the middle of an epoch skips the batches that were used before, so the loader must give the same
        ones again. A loader that is kept itself (`keep`, `keep_of_rank`) goes on where its own state says: nothing is skipped.
        The loaders of all ranks must give the same number. `step` needs the argument `samples`.
        """
        own = self._started()
        own.expect_data({})
        leave_signals_to_the_rank(loader)
        passed, given = 0 if own.kept.has(loader) else own.state.cursor.step, iter(loader)
        next(itertools.islice(given, passed, passed), None)  # takes `passed` of them
        return self._iterate((item, None) for item in given)

    def _iterate(self, given: Iterator[tuple[T, Part | None]]) -> Iterator[T]:
        own, attempt, step = self._started(), self._under_way(), self._stepping()
        clock = own.state.clock
        own.resume_generators()
        try:
            while True:
                if not step.pending:
                    attempt.boundary()
                clock.begin()
                item, part = next(given, (self, None))
                if item is self:
                    own.pause_generators()
                    return
                clock.data_ready()
                step.begin_batch(part)
                yield to_device(item, self.device)
                clock.between()
                step.end_batch()
        finally:
            getattr(given, "close", lambda: None)()

    def part(self, batch: T) -> T:
        """This rank's contiguous part of a global batch (a tensor, an array or a list) that every rank has in full.

        `step` then knows the number of samples of this rank and of all ranks.
        """
        count = len(batch)  # type: ignore[arg-type]
        low, high = order.bounds(count, self.rank, self.size)
        stand_in = (0, 1) if low == high else (low, high)
        self._stepping().set_part(Part(high - low, count))
        return batch[slice(*stand_in)]  # type: ignore[index]

    def step(self, loss: torch.Tensor, samples: int | None = None, clip: float = 0.0, scaler: Any = None) -> None:
        """`backward` and `update`: one optimizer step.

        Args:
            loss: the mean over this rank's samples, a scalar.
            samples: number of this rank's samples. `batches` and `part` know it. Other loaders must give it, so that unequal
                parts get the right weight.
            clip: largest norm of the gradient; 0: no clipping.
            scaler: a `torch.amp.GradScaler`. If it overflows on one rank, all ranks skip the step and lower the scale. For a
                loss that is not finite `nonfinite` applies instead.
        """
        self.backward(loss, samples, scaler)
        self.update(clip=clip, scaler=scaler)

    def backward(self, loss: torch.Tensor, samples: int | None = None, scaler: Any = None) -> None:
        """The gradients of this rank's part, or of a micro-batch of it (inside `accumulate`). Arguments as in `step`."""
        self._stepping().backward(loss, samples, scaler)

    def accumulate(self, parts: Iterable[T]) -> Iterator[T]:
        """The micro-batches of a step: each `backward(loss, samples)` adds to the gradient, and the last one sends it."""
        return self._stepping().accumulate(parts)

    def update(self, *optimizers: torch.optim.Optimizer, clip: float = 0.0, scaler: Any = None) -> None:
        """Ends the step: runs all optimizers, or the ones given, with the gradient of the global batch.

        A gradient that is NaN or infinite changes no weight: the run ends, or the step is skipped (`nonfinite`).
        """
        self._stepping().update(optimizers or tuple(self._optimizers.values()), clip, scaler)

    def boundary(self) -> None:
        """Call it in long work outside the loops above, such as an evaluation: if a signal has come, all ranks save and end here."""
        if self._under_way().poll().stop:
            self._under_way().leave()

    def log(self, **numbers: float) -> None:
        """Logs numbers of the script (those of rank 0): as an event, and in metrics, TensorBoard, W&B and the report.

        `accuracy` and `test_loss` are printed in the table of epochs; the checkpoint with the best accuracy is kept.
        """
        self._started().log(numbers)

    def sum(self, *numbers: float) -> tuple[float, ...]:
        """Each number's sum over all ranks, in float64."""
        total = torch.tensor([float(number) for number in numbers], dtype=torch.float64)
        dist.all_reduce(total)
        return tuple(total.tolist())

    def for_evaluation(self) -> nn.Module:
        """A copy of the model in evaluation mode, with full weights (the average, if there is one) and the mean of the ranks'
        batch statistics. Each rank may use the copy by itself. Collective."""
        return self._replicated().for_evaluation(self.world)

    def _replicated(self) -> Replica:
        if self._replica is None:
            raise RuntimeError("call replicate(model) first")
        return self._replica

    def _not_yet(self, what: str) -> None:
        if self._own is not None:
            raise RuntimeError(f"{what} comes before keep(), and keep() is called once")

    def _started(self) -> OwnRun:
        if self._own is None:
            self.keep()
        assert self._own is not None
        return self._own

    def _under_way(self) -> Attempt:
        self._started()
        assert self._attempt is not None
        return self._attempt

    def _stepping(self) -> Step:
        self._started()
        assert self._step is not None
        return self._step
