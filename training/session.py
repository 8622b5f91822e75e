"""`Session`: your own training loop with ranks, checkpoints, signals, metrics and exit codes, as a recipe has them.

The same script runs in one process and under every launcher. All ranks must call the same methods in the same order.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, get_worker_info

from lockstep.wire.payload import SessionOptions

from .config import own_settings
from .contract import user_errors
from .data.alike import check_alike
from .data.batches import Batches, Part, of_dataset
from .observe.account import TimeCategory
from .parallel.exchange import all_gather_trees
from .run import evaluation, variables
from .run.loop import Loop
from .run.replica import Replica
from .run.reporting import Reporting
from .run.run import Run
from .run.step_input import Compute, StepInput, divisor_of_all

T = TypeVar("T")


class Session(Reporting):
    """One start of a run with your own loop. It resumes from the newest checkpoint in the run directory.

    Leaving the `with` block ends the run. The exit code is 0 after the last epoch. It is 75 if a signal to any rank ended the run early
    (the state is saved, start it again). It is 1 if it diverged or ranks are missing; 2 for mistakes that the user can correct.

    Args:
        run_dir: the run directory, unless the job names one (`run_dir` in job.yaml, `lockstep run --run-dir`). A run that is
            there is resumed; one of another script or with other settings is refused.
        overrides: settings as NAME=VALUE, e.g. from the command line: `checkpoint.every_steps=100`, `config.lr=0.1`. Those of
            the job file (`overrides`) take precedence.
        config: the settings of the script, for run.yaml and the report. A start with other settings is refused.
        fresh: renames an earlier run in `run_dir` first, and starts over.
        handle_signals: False if the script handles TERM, USR1, USR2, INT and HUP itself.
        settings: settings by name, e.g. `seed=3`, `sync="flat"`, `checkpoint={"every_steps": 100}`
            (docs/reference/session-settings.md lists them).

    Examples:
        >>> with Session("runs/mine", sync="flat") as run:
        ...     model = run.replicate(Net())
        ...     optimizer = run.optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
        ...     schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        ...     run.keep(schedule=schedule)  # resumes here, if there is a checkpoint
        ...     right = lambda x, y: (network(x).argmax(1) == y).sum()
        ...     for epoch in run.epochs(10):
        ...         for x, y in run.batches(dataset, 512):  # between two batches all ranks save, or end, together
        ...             run.step(F.cross_entropy(model(x), y))  # backward, sum over the ranks, optimizer
        ...             schedule.step()
        ...         network = run.for_evaluation()
        ...         run.log(accuracy=run.evaluate(right, dataset))  # each rank looks at a part; the mean over all samples
    """

    _has_opened = False
    """Whether the process has had a session: its loop may have left a rank's own batches in the script's variables."""

    def __init__(
        self, run_dir: str | Path, *overrides: str, config: Mapping[str, Any] | None = None, fresh: bool = False,
        handle_signals: bool = True, **settings: Any,
    ) -> None:  # fmt: skip
        began = time.perf_counter()
        with user_errors():
            job = SessionOptions.take(os.environ)
            name = Path(sys.argv[0]).stem or "script"
            parsed = own_settings(name, config or {}, settings, (*overrides, *job.settings))
        start: dict[str, Any] = {"fresh": job.fresh or fresh, "handle_signals": handle_signals, "began": began}
        self._begin(Run(Path(job.run_dir or run_dir), parsed, tells_run_dir=bool(job.run_dir), **start))

    def _begin(self, run: Run) -> None:
        self._run = run
        self._replica: Replica | None = None
        self._loop: Loop | None = None
        self.settings, self.run_dir, self.seed = run.config, run.path, run.config.seed

    def __enter__(self) -> Session:
        self.world = self._run.open()
        self._run.tables = {} if Session._has_opened else variables.tables()
        Session._has_opened = True
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        self._run.close(error, None if self._loop is None else self._loop.end)

    @property
    def config(self) -> dict[str, Any]:
        """The script's own settings, as the command line and the job have changed them (`config.NAME=VALUE`).

        Examples:
            >>> run.config["lr"]  # Session("runs/mine", "config.lr=0.1", config={"lr": 0.01})
            0.1
        """
        return getattr(self.settings, "config", {})

    @property
    def rank(self) -> int:
        """This process's rank, from 0.

        Examples:
            >>> if run.leader:
            ...     print(f"rank {run.rank} of {run.size} trains on {run.device}")
            rank 0 of 1 trains on cpu
        """
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

    @property
    def resumed(self) -> bool:
        """Whether there is a checkpoint, which this start resumes from.

        Examples:
            >>> net = Net() if run.resumed else pretrained()  # before replicate(): rank 0's weights count
        """
        return self._run.resumed

    @property
    def facts(self) -> dict[str, Any]:
        """What run.yaml says of the run besides its settings, `global_batch_size` and `data`: those of the first start, where it is
        resumed. Change it before `keep()`.

        Examples:
            >>> run.facts["data"] = "digits, 1,797 images"
        """
        return self._run.facts

    def replicate(self, model: nn.Module, example: Any = None, name: str = "model") -> nn.Module:
        """Returns the network to call. It is on the rank's device and has rank 0's weights; its gradients are summed over the ranks.

        Several models are replicated one by one, each with a name. A step, which must be a function then, trains those whose
        optimizers it steps.

        Args:
            model: has at least one parameter that requires a gradient.
            example: a batch that the network accepts; some strategies need one.
            name: in checkpoints, of several models.

        Raises:
            UserError: the strategy (`sync=…`) does not support the model, or several.

        Examples:
            >>> model = run.replicate(Net())
        """
        self._not_yet("replicate()")
        if self._replica is None:
            self._replica = Replica(self.settings.sync, self.world)
        return self._replica.add(model, example, name)

    def optimizer(
        self, build: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], name: str = "optimizer",
        model: nn.Module | None = None,
    ) -> torch.optim.Optimizer:  # fmt: skip
        """The optimizer over the replicated model's parameters; `zero1` shards its state.

        Args:
            build: makes the optimizer for the parameters that it gets, or for some of them.
            name: needed if there are several optimizers.
            model: of several, the one whose parameters they are, as `replicate` returned it.

        Examples:
            >>> optimizer = run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=run.config["lr"]))
        """
        self._not_yet("optimizer()")
        return self._replicated().add_optimizer(build, name, model)

    def average(self, decay: float, every: int = 1) -> None:
        """Keeps an exponential moving average of the weights, which `for_evaluation` returns.

        Args:
            decay: per step, in (0, 1).
            every: steps between two updates, each with decay ** every.

        Examples:
            >>> run.average(decay=0.999)
        """
        self._not_yet("average()")
        self._replicated().averaged(decay, every)

    def keep(self, **things: Any) -> None:
        """Adds these objects (schedulers, scalers, random generators, …) to every checkpoint, and loads them from the newest. At another
        number of ranks, generators that differ begin anew. Models and optimizers are always saved. Call it once, when all objects are made.

        Raises:
            TypeError: an object without `state_dict` and `load_state_dict`, or a state that no checkpoint can hold.

        Examples:
            >>> schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)
            >>> run.keep(schedule=schedule)
        """
        self.keep_of_rank({}, **things)

    def keep_of_rank(self, things: Mapping[str, Any], **shared: Any) -> None:
        """`keep`, with `things` that differ between the ranks, for example the position of a loader.

        Examples:
            >>> run.keep_of_rank({"loader": loader}, schedule=schedule)
        """
        self._not_yet("keep()")
        self._begin_loop(shared, things)

    @property
    def batch(self) -> Part | None:
        """How many `samples` this rank's part of the batch under way has, and the global batch in `total`. None: that is not known.
        In the function of a step: how many it is called with.

        Examples:
            >>> for x, y in run.batches(dataset, 512):
            ...     run.step(lambda x, y: F.cross_entropy(model(x), y, reduction="sum"), x, y, divisor=run.batch.total)
        """
        return self._started().step.part

    @property
    def steps(self) -> int:
        """Optimizer steps since the run began.

        Examples:
            >>> if run.steps % 100 == 0:
            ...     run.log(lr=schedule.get_last_lr()[0])
        """
        if get_worker_info() is not None:
            raise RuntimeError("run.steps does not count in a loader's worker process: load without workers")
        return self._started().run.user_state.steps

    @property
    def seconds(self) -> float:
        """Seconds of training so far, evaluation and saving excluded, over all starts. Waits for the device.

        Examples:
            >>> run.log(minutes=run.seconds / 60)
        """
        clock = self._started().run.state.clock
        clock.settle()
        return clock.trained

    def loss(self) -> float | None:
        """The mean loss of the last step over the samples of all ranks; None where it was left out. Collective.

        Examples:
            >>> for x, y in run.batches(dataset, 512):
            ...     run.step(lambda x, y: F.cross_entropy(model(x), y), x, y)
            >>> run.log(loss=run.loss())
        """
        self._go_on("run.loss()")
        return self._started().step.sums.mean_loss()

    def stop(self, reason: str) -> None:
        """Ends the run for good, with exit code 0: all loops end before their next batch. A later start says that the run is
        complete, unless it asks `epochs` for more. One rank may call it alone. After a `break` in place of it, the next start resumes.

        Args:
            reason: for status.json, such as "no better for 5 epochs".

        Examples:
            >>> for x, y in run.batches(dataset, 512):
            ...     run.step(lambda x, y: F.cross_entropy(model(x), y), x, y)
            ...     if run.steps > 20:
            ...         run.stop("20 steps are enough")
        """
        self._started().stop(reason)

    def epochs(self, count: int | None = None, *, steps: int | None = None) -> Iterator[int]:
        """The epochs that are left, up to `count`; numbers start at 0. The run is saved at the end of each epoch, unless
        `checkpoint.every_steps` is set.

        Args:
            steps: in place of `count`: as many epochs as these optimizer steps need. After the last step the loop over the batches
                ends; a start with more steps resumes there.

        Raises:
            RuntimeError: an epoch ends with gradients that no `update` has used.
            TypeError: neither of the two is given, or both are.

        Examples:
            >>> for epoch in run.epochs(10):
            ...     for x, y in run.batches(dataset, 512):
            ...         run.step(F.cross_entropy(model(x), y))
        """
        yield from self._started().epochs(count, steps)

    def batches(
        self, dataset: Any, global_batch_size: int = 0, *, shuffle: bool = True, uneven: str = "drop", workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Iterator[Any]:  # fmt: skip
        """This rank's part of each global batch that is left of the epoch, on its device.

        A global batch has the same samples at every number of ranks. Random transforms of a sample depend only on the
        seed, the epoch and the sample. A rank whose part is empty gets one sample with weight 0.

        Args:
            dataset: map-style: it has a length and `dataset[id]`, and the same samples in the same order on every rank. Or `Batches`
                that are made already.
            global_batch_size: samples per step, all ranks together.
            uneven: `drop`, `pad` or `weight`, as in a recipe: what happens to a batch that is short, or cannot be divided equally.
            workers: processes that load samples; 0: this one.
            collate: as `collate_fn` of torch's DataLoader.

        Raises:
            UserError: the ranks' datasets differ (at the first use of each a few samples are compared), or cannot be divided.

        Examples:
            >>> for x, y in run.batches(dataset, 512, uneven="weight", workers=2):
            ...     run.step(F.cross_entropy(model(x), y))
        """
        if not isinstance(dataset, Batches):
            check_alike(
                dataset, self.world, self.seed, workers, "run.batches()", "hand any other loader to run.iterate(loader)"
            )
            dataset = of_dataset(
                dataset, self.world, self.seed, global_batch_size, shuffle=shuffle, uneven=uneven, workers=workers,
                collate=collate, parts=self._replicated().sync.batch_parts,
            )  # fmt: skip
        return self._started().batches(dataset)

    @overload
    def iterate(self, loader: Iterable[T]) -> Iterator[T]: ...

    @overload
    def iterate(self, loader: Iterable[T], accumulate: int) -> Iterator[list[T]]: ...

    def iterate(self, loader: Iterable[T], accumulate: int | None = None) -> Iterator[T] | Iterator[list[T]]:
        """The batches of `loader` for this rank that are left of the epoch. Between two batches all ranks save, or end, together.

        A run that resumes in the middle of an epoch skips the batches that were used before, so the loader must give the same
        ones again. A loader that is kept itself (`keep`, `keep_of_rank`) continues from its own state: nothing is skipped.
        The loaders of all ranks must give the same number. `step` needs the argument `samples`.

        Args:
            accumulate: batches of one step. What is given are lists of so many, for `accumulate()`; the last list of an epoch may
                be shorter.

        Examples:
            >>> for x, y in run.iterate(loader):
            ...     run.step(F.cross_entropy(model(x), y), samples=len(y))
        """
        # Each rank takes other samples of one dataset.
        if isinstance(loader, DataLoader) and isinstance(loader.sampler, DistributedSampler):
            instead = "give its loader a sampler of another kind"
            check_alike(loader.dataset, self.world, self.seed, loader.num_workers, "run.iterate()", instead)
        return self._started().iterate(loader, accumulate)

    def part(self, batch: T) -> T:
        """This rank's contiguous part of a global batch (a tensor, an array or a list) that every rank has in full.

        `step` then knows the number of samples of this rank and of all ranks. Collective, at the first steps and after each save.

        Examples:
            >>> for ids in run.iterate(torch.randperm(len(dataset)).split(512)):  # the same on every rank
            ...     x, y = dataset[run.part(ids)]
            ...     run.step(F.cross_entropy(model(x), y))
        """
        return self._started().part(batch)

    def step(
        self, loss: torch.Tensor | Compute, *batch: Any,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (), samples: int | None = None,
        divisor: float | torch.Tensor | None = None, clip: float = 0.0, scaler: Any = None,
    ) -> None:  # fmt: skip
        """One optimizer step.

        The session calls a function, and may call it again: on micro-batches (`micro_batch_size`), at half the scale after float16
        overflowed, while it is recorded (`capture`), to look at its loss (`run/batch_mean.py`), to name a parameter with a non-finite
        gradient, or after another rank is lost (`launch --live`). So its only effect is its loss. Batch statistics are put back before the
        next call, and torch's generators are those of (seed, step, rank) inside it: dropout differs between the ranks, and is drawn again
        unchanged. Other generators are not reseeded. A loss that is computed already takes part in none of this.

        Args:
            loss: a scalar, the mean over this rank's samples; or a function that computes it of `batch`. A function may return
                `loss, {"accuracy": hits}`: sums over the samples it is called with, of the same names in each step. They are divided
                as the loss is, and shown where it is, as `train_accuracy`.
            batch: what the function is called with.
            optimizer: steps these, not all. Their networks alone learn: the gradients of others are left alone.
            samples: number of this rank's samples. `batches` and `part` know it. Other loaders must give it, so that unequal
                parts get the right weight.
            divisor: the loss is a sum, and the sum of all ranks is divided by this number; 1: by nothing. A tensor [] is this rank's
                own number, such as its tokens: the numbers of the ranks are summed, on the device. The quotient is also the loss shown.
            clip: largest norm of the gradient; 0: no clipping.
            scaler: a `torch.amp.GradScaler`. If it overflows on one rank, all ranks lower the scale. A function is then called
                again; a step with a computed loss is skipped. For a loss that is not finite `nonfinite` applies instead.

        Examples:
            >>> for x, y in run.batches(dataset, 512):
            ...     run.step(lambda x, y: F.cross_entropy(model(x), y), x, y, clip=1.0)
            ...     schedule.step()
        """
        optimizers = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)
        step = self._started().step
        divisor = divisor_of_all(divisor, step.part, self.world)
        inputs = StepInput(None, batch, samples, divisor, optimizers, clip, scaler)
        if callable(loss) and not isinstance(loss, torch.Tensor):
            step.take(loss, inputs)
        elif batch:
            raise TypeError("step(loss, *batch) has a batch for a function, and the loss is computed already")
        else:
            step.backward(loss, inputs)
            step.update(inputs)

    def backward(
        self, loss: torch.Tensor, samples: int | None = None, scaler: Any = None, divisor: float | None = None
    ) -> None:
        """The gradients of this rank's part, or of a micro-batch of it (inside `accumulate`). Arguments as in `step`. After the last
        one each `.grad` is the gradient of the global batch.

        Examples:
            >>> for x, y in run.batches(dataset, 512):
            ...     for a, b in run.accumulate(zip(x.split(64), y.split(64))):
            ...         run.backward(F.cross_entropy(model(a), b), samples=len(b))
            ...     run.update()
        """
        if isinstance(divisor, torch.Tensor):
            raise TypeError(
                "backward() takes the divisor of all ranks, a number: run.sum(tokens), or run.step(function, …)"
            )
        self._started().step.backward(loss, StepInput(given_samples=samples, divisor=divisor, scaler=scaler))

    def accumulate(self, parts: Iterable[T]) -> Iterator[T]:
        """The micro-batches of a step: each `backward(loss, samples)` adds to the gradient, and the last one sends it.

        Examples:
            >>> for batches in run.iterate(loader, accumulate=4):  # four batches a step
            ...     for x, y in run.accumulate(batches):
            ...         run.backward(F.cross_entropy(model(x), y), samples=len(y))
            ...     run.update()
        """
        return self._started().step.accumulate(parts)

    def update(self, *optimizers: torch.optim.Optimizer, clip: float = 0.0, scaler: Any = None) -> None:
        """Ends the step: runs all optimizers, or the ones given, with the gradient of the global batch.

        A gradient that is NaN or infinite changes no weight: the run ends, or the step is skipped (`nonfinite`). That look,
        the norm and `clip` are of the parameters of the optimizers that step.

        Examples:
            >>> for x, y in run.batches(dataset, 512):
            ...     run.backward(F.cross_entropy(model(x), y))
            ...     run.update(clip=1.0)
        """
        self._started().step.update(StepInput(optimizers=optimizers, clip=clip, scaler=scaler))

    def boundary(self) -> None:
        """Call it in long work outside the loops above and `evaluate`: if a signal has come, all ranks save and end here.

        Examples:
            >>> network, right = run.for_evaluation(), 0
            >>> for x, y in loader:
            ...     right += int((network(x).argmax(1) == y).sum())
            ...     run.boundary()
        """
        self._run.check_outside()
        self._started().boundary("run.boundary()")

    def sum(self, *numbers: float) -> tuple[float, ...]:
        """Each number's sum over all ranks, in float64.

        Examples:
            >>> right, count = run.sum(93, 100)  # of this rank
            >>> right / count
            0.93
        """
        self._go_on("run.sum()")
        if any(isinstance(number, torch.Tensor) and number.numel() > 1 for number in numbers):
            raise TypeError("run.sum() takes numbers: the sum of a tensor over the ranks is sum(run.gather(tensor))")
        total = torch.tensor([float(number) for number in numbers], dtype=torch.float64)
        with self._of_this_rank("run.sum()"):
            dist.all_reduce(total)
        return tuple(total.tolist())

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, in the order of the ranks: tensors (of any length), arrays, numbers, texts, lists, dictionaries.

        Examples:
            >>> predictions = torch.cat(run.gather(mine))
        """
        self._go_on("run.gather()")
        with self._of_this_rank("run.gather()"):
            return all_gather_trees(value, self.world)

    def for_evaluation(self, model: nn.Module | None = None) -> nn.Module:
        """A copy of the model in evaluation mode, with full weights (the average, if there is one) and the mean of the ranks'
        batch statistics. Each rank may use the copy by itself. Collective.

        Args:
            model: of several, the one to be copied, as `replicate` returned it.

        Examples:
            >>> network = run.for_evaluation()
            >>> accuracy = run.evaluate(lambda x, y: (network(x).argmax(1) == y).sum(), dataset)
        """
        self._go_on("run.for_evaluation()")
        with self._run.goodput.on(TimeCategory.EVALUATION):
            return evaluation.noted(self._replicated().for_evaluation(model), self._run)

    def evaluate(
        self, function: Callable[..., Any], dataset: Any, batch_size: int = 256, *, workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Any:  # fmt: skip
        """The mean over a dataset: every sample counts once, and the result has the same bits at any number of ranks. Collective.

        The ranks share the batches of the dataset, each of which is computed by one of them. Random transforms of a sample depend
        only on the seed and the sample, and random numbers of the function on the seed and the batch. Where a signal has come, all
        ranks save and end between two batches, as in `boundary`.

        Args:
            function: called as `function(*batch)`, or `function(batch)` for a batch that is no list or tuple, on the rank's device,
                under `torch.no_grad()`. It returns a sum over its samples: a number, a tensor of at most one
                dimension (such as hits by class), or a dict of them. It calls no collective: networks are copies of `for_evaluation`.
            dataset: map-style: it has a length and `dataset[id]`. The whole one, on every rank.
            batch_size: samples that a rank computes at a time.
            workers: processes that load samples; 0: this one.
            collate: as `collate_fn` of torch's DataLoader.

        Returns:
            The sum over all samples in float64, divided by their number: a float, a tensor on the CPU for one dimension, or a dict.

        Raises:
            TypeError: the function returns something else; or the dataset is not map-style.
            UserError: the dataset is empty, or another one on some rank.

        Examples:
            >>> network = run.for_evaluation()
            >>> def scores(x, y):
            ...     logits = network(x)
            ...     loss = F.cross_entropy(logits, y, reduction="sum")
            ...     return {"test_loss": loss, "accuracy": (logits.argmax(1) == y).sum()}
            >>> run.log(**run.evaluate(scores, dataset, 512))
        """
        self._go_on("run.evaluate()")
        evaluation.check_copies(function, self._run)
        called = self._run.calling("run.evaluate()")(function)
        boundary = self._loop.boundary if self._loop is not None else lambda: None
        with self._run.goodput.on(TimeCategory.EVALUATION):
            return evaluation.of_dataset(called, dataset, batch_size, self.world, self.seed, boundary, workers, collate)

    def _go_on(self, call: str) -> None:
        """Before a collective that the script may call after a loop which other ranks are still in."""
        self._run.check_outside()
        if self._loop is not None:
            self._loop.go_on(call)

    def _of_this_rank(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Around a collective over values of the script's own: those of a lost rank are gone."""
        live = self.world.live
        return contextlib.nullcontext() if live is None else live.not_retryable(what)

    def _replicated(self) -> Replica:
        if self._replica is None:
            raise RuntimeError("call replicate(model) first")
        return self._replica

    def _not_yet(self, what: str) -> None:
        if self._loop is not None:
            raise RuntimeError(f"{what} comes before the loop, keep() (called once), run.print, run.log, run.values, …")

    def _started(self) -> Loop:
        return self._loop or self._begin_loop({}, {})

    def _begin_loop(self, things: Mapping[str, Any], of_rank: Mapping[str, Any]) -> Loop:
        """The loop from where the run directory says the run stands."""
        self._run.resume(self._replicated(), things, of_rank)
        self._loop = Loop(self._run, self._replicated())
        self._loop.begin()
        return self._loop


def session_of(run: Run) -> Session:
    """A session of a run whose settings are known: that of a recipe."""
    session = Session.__new__(Session)
    session._begin(run)
    return session
