"""What a test that trains on ranks which have joined takes from inside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def scores(run_dir: Path) -> dict[int, float]:
    """Step → score of the checkpoints that have one."""
    from lockstep.training.checkpoint import store

    found = {store.step_of(path): store.verify(path)["score"] for path in store.candidates(run_dir / "checkpoints")}
    return {step: score for step, score in found.items() if score is not None}


def strategy(name: str, bucket_mb: float = 25.0, options: dict[str, Any] | None = None) -> Any:
    """A strategy as `sync.name`, `sync.bucket_mb` and `sync.options` of a run make it."""
    from lockstep.training import config, sync

    return sync.build(config.Sync(name=name, bucket_mb=bucket_mb, options=options or {}))  # type: ignore[arg-type]


def step_clock() -> Any:
    """What times the phases of a rank's steps."""
    import torch

    from lockstep.training.observe.clock import StepClock

    return StepClock(torch.device("cpu"))


@contextlib.contextmanager
def verified_files() -> Iterator[list[str]]:
    """The names of the files that this process reads to verify their checksums."""
    from lockstep.training import files

    found: list[str] = []
    sha256 = files.sha256
    files.sha256 = lambda path: (found.append(path.name), sha256(path))[1]
    try:
        yield found
    finally:
        files.sha256 = sha256


def kind_of_strategy() -> type:
    """What every strategy is an instance of."""
    from lockstep.training.sync.base import GradientSync

    return GradientSync


class StrategyLoop:
    """A loop over a strategy's protocol, with an average of the weights, and checkpoints in files."""

    def __init__(self, sync: Any, model: Any, world: Any, example: Any, optimizer: Any) -> None:
        import torch

        from lockstep.training.checkpoint.state import Cursor, TrainState
        from lockstep.training.observe.clock import StepClock
        from lockstep.training.optim.ema import Ema

        self.sync, self.model, self.network = sync, model, sync.wrap(model, world, example)
        self.optimizer = sync.make_optimizer(optimizer)
        self.ema = Ema(model, 0.9, 1, sync.duplicate())
        losses = torch.zeros(2, dtype=torch.float64)
        self._state = TrainState(
            world, model, self.optimizer, sync, self.ema, Cursor(), StepClock(world.device), losses, {}
        )

    def weights(self, average: bool = False) -> dict[str, Any]:
        """A copy of the whole model's parameters, also where each rank holds a part."""
        whole = self.sync.full_module(self.ema.average if average else self.model)
        return {name: parameter.detach().clone() for name, parameter in whole.named_parameters()}

    def save(self, file: Path) -> None:
        """Collective; it is there when all ranks are back."""
        import torch.distributed as dist

        from lockstep.training.checkpoint.state import gather
        from lockstep.training.parallel.exchange import pack

        if (gathered := gather(self._state)) is not None:
            file.write_bytes(pack(gathered).numpy().tobytes())
        if self._state.world.size > 1:
            dist.barrier()

    def load(self, file: Path) -> None:
        """Goes on where `save` was called, on any number of ranks."""
        import torch

        from lockstep.training.checkpoint.state import scatter
        from lockstep.training.parallel.exchange import unpack

        scatter(unpack(torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)), self._state)


class RunBegun:
    """A run of the recipe `smoke` with other settings, before its first step: a context that closes it."""

    def __init__(self, world: Any, run_dir: Path, *settings: str) -> None:
        from lockstep.training import config
        from lockstep.training.recipe.loop import Recipe
        from lockstep.training.session import Session

        self.config = config.load("smoke", list(settings))
        self._session = Session._of_recipe(run_dir, self.config, handle_signals=False, world=world)
        self._session.__enter__()
        try:
            self.recipe = Recipe(self._session, self.config)
        except BaseException as error:
            self._session.__exit__(type(error), error, error.__traceback__)
            raise
        loop = self._session._lifecycle.loop
        assert loop is not None
        self.loop, self.state, self.model = loop, loop.run.state, self.recipe.model
        self.division = self.recipe.batches.division

    def __enter__(self) -> RunBegun:
        return self

    def __exit__(self, *error: object) -> None:
        self.loop.run.exporter.close(0)
        self.loop.attempt.saver.close()
        if self.loop.run.run is not None:
            self.loop.run.run.close()

    def step(self, number: int) -> Any:
        """Trains that step, counted from 0 over all epochs; the ids of this rank's samples."""
        epoch, at = divmod(number, self.division.steps)
        self.state.cursor.epoch, self.state.cursor.step, self.state.kept.steps = epoch, at, number
        batch, part = next(iter(self.recipe.batches.epoch(epoch, at)))
        self.state.clock.begin()
        self.loop.step.begin_batch(part)
        self.recipe.step(batch)
        self.loop.step.end_batch()
        return batch.ids[: part.samples]

    def weights(self) -> Any:
        """A copy of all parameters, one after the other."""
        import torch

        return torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()])

    def score(self) -> tuple[int, int, float]:
        """Of the test images: how many were right, how many there were, and their mean loss."""
        found = self.recipe.evaluator.score(self.model.eval())
        self.model.train()
        return found.correct, found.count, found.loss

    def images(self) -> Any:
        """The training images, as the network sees them."""
        import torch

        from lockstep.training.data.augment import normalise

        return normalise(self.recipe.batches.source.samples.all()[0], self.config.data, torch.float32, False)

    def write_metrics(self) -> None:
        """This rank's file of metrics, as it is written every few seconds."""
        self.loop.run.exporter._write_textfiles()


def augmented(shards: Path, settings: list[str]) -> tuple[Any, Any]:
    """(the labels of all training images, a function of epoch and ids that gives these images as a run augments them)."""
    import torch

    from lockstep.training import config
    from lockstep.training.data.augment import augment, draw_keys
    from lockstep.training.data.shards import Manifest, Samples

    recipe, manifest = config.load("smoke", settings), Manifest.read(shards)
    images, labels = Samples.open(manifest, "train", 0, manifest.count("train")).all()
    return labels, lambda epoch, ids: augment(
        images, ids, ids, recipe.data, draw_keys(recipe.seed, epoch), torch.float64
    )


def hold_signals_for(seconds: float) -> None:
    """How long a rank that opens no `Session` keeps signals for one; to be called after `import lockstep`."""
    from lockstep.wire import signals

    signals.HOLD_SECONDS = seconds


def stop_at_poll(number: int) -> None:
    """From now on a run in this process is asked to stop when its ranks agree for the n-th time; never, with 0."""
    from lockstep.training.resilience import preempt

    seen = [0]

    def wants_stop(self: Any) -> bool:
        seen[0] += 1
        if self.world.leader and seen[0] == number:
            self.reason = "the test"
        return self.reason is not None

    preempt.Consensus._wants_stop = wants_stop  # type: ignore[method-assign]


def mlp_exercise() -> tuple[Any, Any, Any]:
    """Features and labels of the recipe `mlp`, and the network that it begins with, of seed 0."""
    import torch

    from lockstep.training import models
    from lockstep.training.checkpoint import generators
    from lockstep.training.data.sources import SOURCES

    features, labels = SOURCES["classification"]().train
    generators.seed(0)
    return torch.from_numpy(features), torch.from_numpy(labels), models.build("mlp", {}, 32, (1024,))


def gathered(network: Any) -> int:
    """Elements of parameters that `fsdp` holds in full now, or is about to."""
    groups = [m._get_fsdp_state()._fsdp_param_group for m in network.modules() if hasattr(m, "_get_fsdp_state")]
    return sum(
        parameter._orig_size.numel()
        for group in groups
        if group is not None and (group.is_unsharded or group._all_gather_result is not None)
        for parameter in group.fsdp_params
    )


def fsdp_blocks(model: Any, wanted: list[str] | None = None) -> list[str]:
    """The names of what `fsdp` gathers by itself."""
    from lockstep.training.sync.fsdp import find_blocks

    blocks = find_blocks(model, wanted)
    return [name for name, module in model.named_modules() if module in blocks]
