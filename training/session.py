"""`Session`: a training loop of one's own, with what surrounds a recipe's steps: ranks, checkpoints, signals, metrics, the end.

    with Session("runs/mine", sync="flat") as run:
        model = run.replicate(Net())
        optimizer = run.optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        run.keep(schedule=schedule)                         # goes on here where an earlier start was ended
        for epoch in run.epochs(10):
            for x, y in run.batches(dataset, 512):          # between two of them all ranks leave, or save, together
                run.step(F.cross_entropy(model(x), y))      # backward, sum over the ranks, optimizer
                schedule.step()
            run.log(accuracy=evaluate(run.for_evaluation()))

The same script runs in one process and under every launcher. All ranks call the same methods in the same order.
"""

from __future__ import annotations

import contextlib
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
    """One attempt at a run of a loop of one's own, from the run directory's newest checkpoint on.

    Leaving the `with` block ends the run: with 0 after the last epoch; 75 where a signal to any rank ended it early,
    saved, to be started again; 1 where it diverged or ranks are missing; 2 for what the user can mend.

    Args:
        run_dir: where the run is kept, unless the job says where (`run_dir` in job.yaml, `lockstep run --run-dir`); the same
            one goes on. Of another script, or of other settings, it is refused.
        words: settings as NAME=VALUE, e.g. of the command line: `checkpoint.every_steps=100`, `config.lr=0.1`. The job's
            `overrides` are stronger.
        config: the script's own settings, for run.yaml and the report. A start in which they differ is refused.
        fresh: moves an earlier run in `run_dir` aside first.
        handle_signals: False where the script handles TERM, USR1, USR2, INT and HUP itself.
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
        """The network to call: on the rank's device, equal to rank 0's, its gradients summed over the ranks.

        Args:
            model: with at least one parameter that requires a gradient. One for a run: put several networks into one module.
            example: a batch that the network accepts; `powersgd` needs one.

        Raises:
            UserError: the strategy (`sync=…`) cannot serve the model.
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
            build: makes the optimizer of the parameters that it is given, or of some of them.
            name: of each, where there are several.
        """
        self._not_yet("optimizer()")
        replica = self._replicated()
        if name in self._optimizers:
            raise ValueError(f"optimizer({name}) a second time: give this one another name")
        if self._optimizers and self.settings.sync.name in ("zero1", "hooks", "horovod"):
            raise replica.sync.refuse("takes one optimizer", "use sync.name=flat, ddp or fsdp for several")
        self._optimizers[name] = replica.sync.make_optimizer(build)
        return self._optimizers[name]

    def average(self, decay: float, every: int = 1) -> None:
        """Keeps an exponential moving average of the weights, which `for_evaluation` gives.

        Args:
            decay: of a step, in (0, 1).
            every: steps between two updates, each with decay ** every.
        """
        self._not_yet("average()")
        self._replicated().averaged(decay, every)

    def keep(self, **things: Any) -> None:
        """Keeps the states of these objects (schedulers, scalers, …) in every checkpoint, beside the model and its
        optimizers; and goes on here, from the newest checkpoint, where there is one. Call it once, when all are made.

        Raises:
            TypeError: an object without `state_dict` and `load_state_dict`, or a state that no checkpoint can hold.
        """
        self._begin(things, {})

    def keep_of_rank(self, things: Mapping[str, Any], **shared: Any) -> None:
        """`keep`, with `things` of which each rank has its own: the cursor of a loader, for one."""
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
            own.console.line(f"The job keeps this run in {self.run_dir}")
        self._own, self._attempt = own, Attempt(own, self._signals, self.began)
        if self._signals is not None:
            self._signals.on_second_signal = own.exporter.close
        self._attempt.__enter__()
        self._step = Step(own, self._attempt, replica, self._optimizers)

    @property
    def values(self) -> dict[str, Any]:
        """Values of the script's own, kept in every checkpoint: numbers, texts, tensors, numpy arrays, lists, dictionaries.

        The same on every rank; rank 0's are saved.
        """
        return self._started().kept.values

    @property
    def steps(self) -> int:
        """Optimizer steps since the run began."""
        return self._started().steps_done

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs from where the run stands up to `count`, from 0. At the end of each one the run is saved, unless
        `checkpoint.every_steps` says otherwise."""
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
        """This rank's part of each global batch of the epoch, on its device, from where the run stands.

        Which samples a global batch holds is the same at every number of ranks. A sample's random transforms depend on
        the seed, the epoch and the sample alone. A rank whose part is empty gets one sample that counts for nothing.

        Args:
            dataset: map-style: a length, and `dataset[id]`.
            global_batch_size: samples of all ranks together a step.
            uneven: `drop`, `pad` or `weight`, as in a recipe: what happens to a batch that is short, or cannot be shared equally.
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
        """What `loader` gives this rank, from where the run stands in the epoch: between two, all ranks leave, or save.

        A start in the middle of an epoch passes over what was consumed before: the loader must give the same again,
        from the same generators. All ranks' loaders give equally many. `step` must be told `samples`.
        """
        own = self._started()
        own.expect_data({})
        leave_signals_to_the_rank(loader)
        passed, given = own.state.cursor.step, iter(loader)
        for _ in range(passed):
            if next(given, self) is self:
                break
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
                step.end_batch()
        finally:
            close = getattr(given, "close", None)
            if close is not None:
                close()

    def part(self, batch: T) -> T:
        """This rank's contiguous part of a global batch that every rank has: a tensor, an array or a list.

        `step` then knows how many samples that is, and how many of all.
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
            samples: how many these are. `batches` and `part` know it; with another loader it is needed, so that unequal
                parts count for what they are.
            clip: largest norm of the gradient; 0: no clipping.
            scaler: a `torch.amp.GradScaler`; its overflows are agreed on by all ranks.
        """
        self.backward(loss, samples, scaler)
        self.update(clip=clip, scaler=scaler)

    def backward(self, loss: torch.Tensor, samples: int | None = None, scaler: Any = None) -> None:
        """The gradients of this rank's part, or of a micro-batch of it (inside `accumulate`). Arguments as in `step`."""
        self._stepping().backward(loss, samples, scaler)

    def accumulate(self, parts: Iterable[T]) -> Iterator[T]:
        """Micro-batches of a step: each one's `backward(loss, samples)` adds to the gradient; the last one's sends it."""
        return self._stepping().accumulate(parts)

    def update(self, *optimizers: torch.optim.Optimizer, clip: float = 0.0, scaler: Any = None) -> None:
        """The optimizers' step (of all, or of these) with the gradient of the global batch, and the end of the step.

        A gradient that is NaN or infinite changes no weight: the run ends, or the step is left out (`nonfinite`).
        """
        self._stepping().update(optimizers or tuple(self._optimizers.values()), clip, scaler)

    def boundary(self) -> None:
        """For what takes long outside of the loops above, an evaluation: all ranks leave here, saved, if one was asked to."""
        if self._under_way().poll().stop:
            self._under_way().leave()

    def log(self, **numbers: float) -> None:
        """Numbers of the script's own (rank 0's count): an event, metrics, TensorBoard, W&B and the report show them.

        `accuracy` and `test_loss` stand in the table of epochs; the checkpoint with the best accuracy is kept.
        """
        self._started().log(numbers)

    def sum(self, *numbers: float) -> tuple[float, ...]:
        """Each number's sum over all ranks, in float64."""
        total = torch.tensor([float(number) for number in numbers], dtype=torch.float64)
        dist.all_reduce(total)
        return tuple(total.tolist())

    def for_evaluation(self) -> nn.Module:
        """A copy of the model with full weights (the average, where there is one) and the ranks' mean batch statistics, in
        evaluation mode. Every rank may call it by itself. Collective."""
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
