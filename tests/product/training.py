"""Ranks, strategies, runs and their parts, for tests that train in this process or read the files of a run."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.product.inside import Inside

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from lockstep.training.parallel.world import World

_config = Inside("training.config")
_files = Inside("training.files")
_shard_writer = Inside("training.data.shard_writer")
_metrics = Inside("training.observe.metrics")
_models = Inside("training.models")
_shards = Inside("training.data.shards")
_sources = Inside("training.data.sources")
_states = Inside("training.checkpoint.state")
_store = Inside("training.checkpoint.store")
_sync = Inside("training.sync")
_world = Inside("training.parallel.world")


def checkpoint(path: Path) -> dict[str, Any]:
    """Returns a checkpoint's content, its tensors loaded. Raises the product's error if it is damaged."""
    _store.verify(path)
    return _store.load(path)


def checkpoint_steps(run_dir: Path) -> list[int]:
    """Returns the steps of a run's checkpoints, newest first. Raises if one does not verify."""
    steps = []
    for path in _store.candidates(run_dir / "checkpoints"):
        _store.verify(path)
        steps.append(_store.step_of(path))
    return steps


def newest_checkpoint(run_dir: Path) -> dict[str, Any]:
    """Returns the newest checkpoint of a run, its tensors loaded."""
    return checkpoint(run_dir / "checkpoints" / f"step-{checkpoint_steps(run_dir)[0]:08d}")


def scores(run_dir: Path) -> dict[int, float]:
    """Returns step → score of the checkpoints with a score."""
    all_scores = {
        _store.step_of(path): _store.verify(path)["score"] for path in _store.candidates(run_dir / "checkpoints")
    }
    return {step: score for step, score in all_scores.items() if score is not None}


def recipe(name: str = "smoke", *words: str) -> Any:
    """Returns the settings of a recipe, with words as after --set."""
    return _config.load(name, list(words))


def source(name: str, root: Path, **options: Any) -> Any:
    """Returns a data source's samples in memory: `.train` and `.test` (samples, labels), `.classes`."""
    return _sources.load(name, root, options)


def sharded(folder: Path, train: Any, test: Any, classes: list[str], files: int = 1) -> Any:
    """Writes shards of these (samples, labels), the training samples in several files."""
    import numpy as np

    def pieces(split: str) -> Iterator[Any]:
        arrays, count = (train, files) if split == "train" else (test, 1)
        yield from zip(*(np.array_split(array, count) for array in arrays))

    largest, _shard_writer.SHARD_BYTES = _shard_writer.SHARD_BYTES, 1 if files > 1 else _shard_writer.SHARD_BYTES
    try:
        return _shard_writer.write(Inside("training.data.sources.raw").Stream(pieces, classes), folder, "array")
    finally:
        _shard_writer.SHARD_BYTES = largest


def split(shards: Any, name: str) -> tuple[Any, Any]:
    """Returns (samples, labels) of a split of shards, as numpy arrays."""
    samples, labels = _shards.Samples.open(shards, name).all()
    return samples.numpy(), labels.numpy()


def model(name: str, options: dict[str, Any] | None = None, classes: int = 10, shape: Any = (32, 32, 3)) -> Any:
    """Builds a network of `model=NAME`."""
    return _models.build(name, options or {}, classes, shape)


def batches(shards: Any, batch: int, rank: int = 0, size: int = 1, resident: str = "auto") -> Any:
    """Returns a rank's batches over shards."""
    world, inside = _world.World(rank=rank, size=size, local_size=size), Inside("training.data.batches")
    stored = inside.Stored(_shards.Samples.open(shards, "train"), world, 0, resident)
    return inside.Batches(stored, inside.Division(shards.count("train"), batch, world, 0, uneven="drop"))


def before_each_batch(do: Callable[[], None]) -> None:
    """Calls `do` in this process before a rank gets its next batch of resident samples."""
    stored = Inside("training.data.batches").Stored
    batch = stored.batch
    stored.batch = lambda self, ids, epoch: (do(), batch(self, ids, epoch))[1]


def mlp() -> Any:
    """Returns the initial network of the recipe `mlp` with seed 0."""
    Inside("training.generators").seed(0)
    return _models.build("mlp", {}, 32, (1024,))


def series() -> set[str]:
    """Returns the series that a rank may serve."""
    ends = {"histogram": ("", "_sum", "_count", "_bucket"), "summary": ("", "_sum", "_count")}
    return {_metrics.PREFIX + name + end for name, row in _metrics.TABLE.items() for end in ends.get(row.kind, ("",))}


def settings_pages() -> dict[str, Any]:
    """Returns page of the reference → the model whose settings it lists."""
    job = Inside("jobs.spec.model").JobSpec
    return {"recipe-settings": _config.Config, "session-settings": _config.OwnSettings, "job-settings": job}


def contract_names() -> dict[str, Any]:
    """Returns names and values of exit codes, variables and files that a run and a job share."""
    from lockstep.jobs import status
    from lockstep.training import contract

    return {name: value for module in (contract, status) for name, value in vars(module).items() if name.isupper()}


def joined(seconds: float = 60, device: str = "cpu") -> AbstractContextManager[World]:
    """Joins this process's group by its environment, as a user's script does."""
    return _world.joined(_world.detect(os.environ), device, seconds)


def program(words: list[str]) -> int:
    """Runs `python -m lockstep.training WORDS` in this process, and holds back signals from the start as that command does."""
    if words[0] == "run":
        signal.pthread_sigmask(signal.SIG_BLOCK, Inside("wire.signals").FORWARDED)
    return Inside("training.__main__").main(words)


def load_for_forks() -> None:
    """Imports all of training/ and builds the settings' checks, so that no forked process builds them again."""
    import importlib

    root = Path(__file__).parents[2]
    for file in (root / "training").rglob("*.py"):
        name = ".".join(("lockstep", *file.relative_to(root).with_suffix("").parts))
        if not name.endswith(("__main__", "__init__")):
            importlib.import_module(name)
    _config.load("smoke", [])
    _config.own_settings("script", {}, {}, ())


def watch_disk(watched: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wraps in `watched` the calls of this process that write files and their names to the disk."""
    for name in ("write_all", "fsync", "rename"):
        setattr(_files, name, watched(getattr(_files, name)))


@contextlib.contextmanager
def verified_files() -> Iterator[list[str]]:
    """Yields the names of the files whose checksums this process verifies."""
    names: list[str] = []
    sha256 = _files.sha256
    _files.sha256 = lambda path: (names.append(path.name), sha256(path))[1]
    try:
        yield names
    finally:
        _files.sha256 = sha256


def hold_signals_for(seconds: float) -> None:
    """Sets how long a rank without a `Session` holds signals for one. Call it after `import lockstep`."""
    Inside("wire.signals").HOLD_SECONDS = seconds


def a_signal_is_held() -> bool:
    """Returns whether this rank holds a signal for its `Session`."""
    return bool(Inside("wire.signals")._came)


def signals_are_noted() -> bool:
    """Returns whether each run in this process has received a signal."""
    kind = Inside("training.resilience.preempt").Signals
    return all(instance.received for instance in gc.get_objects() if isinstance(instance, kind))


def stop_at_poll(number: int) -> None:
    """From now on stops a run in this process when its ranks agree for the n-th time; never, with 0."""
    polls = [0]

    def wants_stop(self: Any) -> bool:
        polls[0] += 1
        if self.world.leader and polls[0] == number:
            self.reason = "the test"
        return self.reason is not None

    Inside("training.resilience.preempt").Consensus._wants_stop = wants_stop


SUM_OF_EXACT = "lockstep.training.sync.exact:Exact.synchronize"
"""The method in which the strategy `exact` sums, for fault injection."""


def gpu_checks() -> dict[str, int]:
    """Returns the rows of `lockstep doctor gpu`, and how many GPUs each needs."""
    return {row.name: 1 if row.shares else row.gpus for row in Inside("tools.doctor").ROWS}


def late_inputs(seconds: float) -> None:
    """Delays the inputs of each recorded step of this process."""
    recorder = Inside("training.run.recording").Recorder
    prepare = recorder.prepare

    def late(self: Any, *args: Any) -> Any:
        if self._recorded is not None:
            time.sleep(seconds)
        return prepare(self, *args)

    recorder.prepare = late


ALLREDUCE, HOOKS = "examples.strategies.allreduce:AllReduce", "examples.strategies.hooks:Hooks"
FSDP, POWERSGD = "examples.strategies.fsdp:Fsdp", "examples.strategies.powersgd:PowerSgd"
HOROVOD, DATA_PARALLEL = "examples.modules.horovod:Horovod", "examples.strategies.data_parallel:DataParallel"


def strategies() -> list[str]:
    """Returns the values of `sync.name`: the built-in strategies, and those of examples/."""
    return [*_sync.STRATEGIES, ALLREDUCE, HOOKS, HOROVOD, POWERSGD, FSDP, DATA_PARALLEL]


def strategy(name: str, bucket_mb: float = 25.0, options: dict[str, Any] | None = None) -> Any:
    """Builds a strategy from `sync.name`, `sync.bucket_mb` and `sync.options`, as a run does."""
    return _sync.build(_config.Sync(name=name, bucket_mb=bucket_mb, options=options or {}))


def step_clock() -> Any:
    """Returns the clock of a rank's step phases."""
    import torch

    return Inside("training.observe.steps").StepClock(torch.device("cpu"))


def gathered(network: Any) -> int:
    """Counts the parameter elements that `Fsdp` has gathered or is gathering."""
    groups = [m._get_fsdp_state()._fsdp_param_group for m in network.modules() if hasattr(m, "_get_fsdp_state")]
    return sum(
        parameter._orig_size.numel()
        for group in groups
        if group is not None and (group.is_unsharded or group._all_gather_result is not None)
        for parameter in group.fsdp_params
    )


def fsdp_blocks(model: Any, wanted: list[str] | None = None) -> list[str]:
    """Names the modules that `Fsdp` gathers separately."""
    from examples.strategies.fsdp import find_blocks

    blocks = find_blocks(model, wanted)
    return [name for name, module in model.named_modules() if module in blocks]


class StrategyLoop:
    """A loop over a strategy's protocol, with an average of the weights, and checkpoints in files."""

    def __init__(self, sync: Any, model: Any, world: Any, example: Any, optimizer: Any) -> None:
        import torch

        self.sync, self.model, self.network = sync, model, sync.wrap(model, world, example)
        self.optimizer = sync.make_optimizer(optimizer)
        self.ema = Inside("training.optim.ema").Ema(model, 0.9, 1, sync.duplicate())
        losses = torch.zeros(2, dtype=torch.float64)
        self._state = _states.TrainState(
            world, model, {"optimizer": self.optimizer}, sync, self.ema, step_clock(), losses
        )

    def weights(self, average: bool = False) -> dict[str, Any]:
        """Copies the whole model's parameters, also if each rank holds a shard."""
        whole = self.sync.full_module(self.ema.average if average else self.model)
        return {name: parameter.detach().clone() for name, parameter in whole.named_parameters()}

    def save(self, file: Path) -> None:
        """Saves; the file exists when all ranks return. Collective."""
        import torch.distributed as dist

        if (state := _states.gather(self._state)) is not None:
            file.write_bytes(Inside("training.parallel.packing").pack(state).numpy().tobytes())
        if self._state.world.size > 1:
            dist.barrier()

    def load(self, file: Path) -> None:
        """Resumes from the file of a `save`, on any number of ranks."""
        import torch

        packed = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
        _states.scatter(Inside("training.parallel.packing").unpack(packed), self._state)


class RunBegun:
    """A run of the recipe `smoke` with `settings`, before its first step. The context closes it."""

    def __init__(self, world: Any, run_dir: Path, *settings: str) -> None:
        self.config = _config.load("smoke", list(settings))
        run = Inside("training.run.run").Run(run_dir, self.config, handle_signals=False, world=world)
        self._session = Inside("training.session").session_of(run)
        self._session.__enter__()
        try:
            self.recipe = Inside("training.recipe.loop").Recipe(self._session, self.config, run)
        except BaseException as error:
            self._session.__exit__(type(error), error, error.__traceback__)
            raise
        loop = self._session._loop
        assert loop is not None
        self.loop, self.state, self.model = loop, loop.run.state, self.recipe.model
        self.division = self.recipe.batches.division

    def __enter__(self) -> RunBegun:
        return self

    def __exit__(self, *error: object) -> None:
        self.loop.run.exporter.close()
        self.loop.attempt.saver.close()
        if self.loop.run.directory is not None:
            self.loop.run.directory.close()

    def step(self, number: int) -> Any:
        """Trains this step, counted from 0 over all epochs. Returns the ids of this rank's samples."""
        epoch, at = divmod(number, self.division.steps)
        self.state.cursor.epoch, self.state.cursor.step, self.state.user_state.steps = epoch, at, number
        batch, part = next(iter(self.recipe.batches.epoch(epoch, at)))
        self.state.clock.begin()
        self.loop.step.begin_batch(part)
        self.recipe.step(batch)
        self.loop.step.end_batch()
        return batch.ids[: part.samples]

    def weights(self) -> Any:
        """Returns a copy of all parameters as one vector."""
        import torch

        return torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()])

    def write_metrics(self) -> None:
        """Writes this rank's file of metrics now, not in a few seconds."""
        self.loop.run.exporter._write_textfile()
