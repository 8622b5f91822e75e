"""What a module's own tests take of its neighbours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.product.names import JobSpec

if TYPE_CHECKING:
    from pathlib import Path


def recipe(name: str = "smoke", *words: str) -> Any:
    """The settings of a recipe, with words as they stand after --set."""
    from lockstep.training import config

    return config.load(name, list(words))


def data(**settings: Any) -> Any:
    """The settings of the group `data`, checked."""
    from lockstep.training import config

    return config.Data(**settings)


def source(name: str, root: Path, **options: Any) -> Any:
    """A data source's samples in memory: `.train` and `.test` (samples, labels), `.classes`."""
    from lockstep.training.data import sources

    return sources.load(name, root, False, options)


def prepared(settings: Any) -> Any:
    """The shards of a source, made or found again; what `split` takes."""
    from lockstep.training.data import making

    return making.prepare(settings)


def sharded(folder: Path, train: Any, test: Any, classes: list[str], files: int = 2) -> Any:
    """Shards of these (samples, labels)."""
    from lockstep.training.data import making
    from lockstep.training.data.sources.raw import Raw

    return making.write(Raw(train, test, classes), folder, "array", files)


def split(made: Any, name: str) -> tuple[Any, Any]:
    """(samples, labels) of a split of shards, as numpy arrays."""
    from lockstep.training.data.shards import Samples

    samples, labels = Samples.open(made, name, 0, made.count(name)).all()
    return samples.numpy(), labels.numpy()


def model(name: str, options: dict[str, Any] | None = None, classes: int = 10, shape: Any = (32, 32, 3)) -> Any:
    """A network of `model=NAME`."""
    from lockstep.training import models

    return models.build(name, options or {}, classes, shape)


def batches(made: Any, batch: int, rank: int = 0, size: int = 1, uneven: str = "drop", **settings: Any) -> Any:
    """A rank's batches over shards, with settings of the group `data`."""
    from lockstep.training.config import Config
    from lockstep.training.parallel.world import World
    from lockstep.training.recipe.setup import _batches

    config = Config(global_batch_size=batch, uneven=uneven, data=data(**settings))  # type: ignore[arg-type]
    return _batches(config, World(rank=rank, size=size, local_size=size), made, batch, 1)


def sealed(manifest: dict[str, Any]) -> str:
    """The checksum that a manifest carries of itself."""
    from lockstep.training.checkpoint.store import seal

    return seal(manifest)


def metrics() -> Any:
    """A rank's metrics, which nobody serves."""
    import torch

    from lockstep.training.observe.metrics import Metrics

    return Metrics("x", 0, torch.device("cpu"))


def extras() -> dict[str, Any]:
    """Extra of pyproject.toml → the packages that a message about it knows."""
    from lockstep.training.extras import EXTRAS

    return EXTRAS


def report(runs: list[Path], out: Path) -> None:
    """The report of these run directories."""
    from lockstep.training.observe import report

    report.write(runs, out)


def series() -> set[str]:
    """Names of all series that a rank may serve."""
    from lockstep.training.observe.metrics import PREFIX, TABLE

    ends = {"histogram": ("", "_sum", "_count", "_bucket")}
    return {PREFIX + name + end for name, row in TABLE.items() for end in ends.get(row.kind, ("",))}


def before_each_batch(do: Any) -> None:
    """Calls `do` in this process before a rank has its next batch of resident samples."""
    from lockstep.training.data.batches import Stored

    batch = Stored.batch

    def later(self: Any, ids: Any, epoch: int) -> Any:
        do()
        return batch(self, ids, epoch)

    Stored.batch = later  # type: ignore[method-assign]


def settings_pages() -> dict[str, Any]:
    """Page of the reference → the model whose settings it lists."""
    from lockstep.training.config import Config, OwnSettings

    return {"recipe-settings": Config, "session-settings": OwnSettings, "job-settings": JobSpec}


def contract_names() -> dict[str, Any]:
    """Names and values of exit codes, variables and files that a run and a job share."""
    from lockstep.jobs import status
    from lockstep.training import contract

    return {name: value for module in (contract, status) for name, value in vars(module).items() if name.isupper()}
