"""The one module of the tests that reaches inside the product.

Tests come from outside: the command line with `--json`, the files that users see, and names that users import (`PUBLIC`).
What none of these gives – a checkpoint's tensors, the names of all strategies, a backend as an object – they take from
here. So a module that moves costs its own unit tests in `tests/unit/`, and lines of this file. What needs torch is
imported by the function that uses it: the dispatcher's tests run without.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any, NoReturn

from lockstep import JobSpec as JobSpec
from lockstep.jobs.status import Status as Status
from lockstep.jobs.status import Unreachable as Unreachable
from lockstep.training.contract import EXIT_DONE as EXIT_DONE
from lockstep.training.contract import EXIT_FAILED as EXIT_FAILED
from lockstep.training.contract import EXIT_PREEMPTED as EXIT_PREEMPTED
from lockstep.training.contract import EXIT_USAGE as EXIT_USAGE
from lockstep.training.contract import UserError as UserError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path
    from types import ModuleType

    from lockstep.jobs.backend import Backend
    from lockstep.training.parallel.world import World

PUBLIC = {
    "lockstep.training.sync.horovod",
    "lockstep.training.sync.hooked",
    "lockstep.training.parallel.world",
    "lockstep.training.resilience.closeness",
    "lockstep.training.exercises.collectives",
}
"""Modules that the documentation tells users to import from; `lockstep` itself besides."""


# Dispatch


def backend(name: str) -> type[Backend]:
    """The backend of that name on the command line: local, compose, k8s, slurm."""
    from lockstep.jobs import registry

    return registry.backend(name)


# Checkpoints


def checkpoint(path: Path) -> dict[str, Any]:
    """What a checkpoint holds, its tensors loaded. Raises the product's error where it is damaged."""
    from lockstep.training.checkpoint import store

    store.verify(path)
    loaded: dict[str, Any] = store.load(path)
    return loaded


def checkpoint_steps(run_dir: Path) -> list[int]:
    """Steps of the checkpoints of a run that verify, newest first. Raises where one does not."""
    from lockstep.training.checkpoint import store

    steps = []
    for path in store.candidates(run_dir / "checkpoints"):
        store.verify(path)
        steps.append(store.step_of(path))
    return steps


def newest_checkpoint(run_dir: Path) -> dict[str, Any]:
    """The newest checkpoint of a run that verifies, its tensors loaded."""
    return checkpoint(run_dir / "checkpoints" / f"step-{checkpoint_steps(run_dir)[0]:08d}")


# Ranks in the process of a test


def joined(seconds: float = 60, device: str = "cpu") -> AbstractContextManager[World]:
    """This process's group, by its environment, as a script of a user joins it."""
    from lockstep.training.parallel import world

    return world.joined(world.detect(os.environ), device, seconds)


def one_thread(world: World) -> None:
    from lockstep.training.parallel.world import set_threads

    set_threads(world, 1, {})


def user_errors() -> AbstractContextManager[None]:
    """What the user is to read becomes one line and an exit code, as the program does it."""
    from lockstep.training import contract

    return contract.user_errors()


def leave(code: int) -> NoReturn:
    """Ends a rank without the interpreter's teardown, as the program does."""
    from lockstep.training import __main__ as program

    program.leave(code)


def program(words: list[str]) -> int:
    """`python -m lockstep.training WORDS` in this process, which holds back signals from its first line as that does; its
    exit code."""
    from lockstep.training import __main__ as program
    from lockstep.training.launch.lifeline import FORWARDED

    if words[0] == "run":
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    return program.main(words)


def strategies() -> list[str]:
    """The names of `sync.name`."""
    from lockstep.training import sync

    return list(sync.STRATEGIES)


def generators() -> ModuleType:
    """Capture, check and restore the random generators of a device."""
    from lockstep.training.checkpoint import generators

    return generators


SUM_OF_ALLREDUCE = "lockstep.training.sync.allreduce:AllReduce.synchronize"
"""Where the strategy `allreduce` sums, for a fault that is planted there."""


def fsdp_on_this_cpu() -> bool:
    """Whether this torch gets right gradients under `fsdp` on the CPU."""
    from lockstep.training.sync.fsdp import MEAN_ON_CPU

    return MEAN_ON_CPU


def doctor_gpu(words: list[str], rank: tuple[str, ...]) -> int:
    """`lockstep doctor gpu WORDS`, whose ranks are started by the command `rank`; its exit code."""
    from lockstep.training.doctor.command import main

    return main(words, rank)


def gpu_checks() -> dict[str, int]:
    """The rows of `lockstep doctor gpu`, and how many GPUs each needs."""
    from lockstep.training.doctor.table import ROWS

    return {check.name: check.gpus for check in ROWS}


def late_inputs(seconds: float) -> None:
    """Each recorded step of this process gets its inputs late, as one whose data is late."""
    from lockstep.training.cudagraph import CapturedTrainer

    fill = CapturedTrainer._copy_inputs

    def late(*args: Any) -> None:
        time.sleep(seconds)
        fill(*args)

    CapturedTrainer._copy_inputs = late  # type: ignore[method-assign]


def watch_disk(watched: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Puts `watched` around the calls of this process with which files and their names reach the disk."""
    from lockstep.training import files

    for name in ("write_all", "fsync", "rename"):
        setattr(files, name, watched(getattr(files, name)))


def load_for_forks() -> None:
    """Imports all of training/, and computes what each process would compute anew: the settings' checks, the report's page."""
    import importlib
    from pathlib import Path

    from lockstep.training import config
    from lockstep.training.config.own import own_settings
    from lockstep.training.observe import report

    root = Path(__file__).parents[1]
    for file in (root / "training").rglob("*.py"):
        name = ".".join(("lockstep", *file.relative_to(root).with_suffix("").parts))
        if not name.endswith(("__main__", "__init__")) and "inference" not in name:
            importlib.import_module(name)
    config.load("smoke", [])
    own_settings("script", {}, {}, ())
    report._environment().get_template("template.html.j2")


# Large jobs, as they lie on the disk


def metrics_text(rank: int, run: str, slow: bool = False) -> str:
    """What a rank serves after 100 steps. A slow one waits for nobody."""
    import torch

    from lockstep.training import contract
    from lockstep.training.observe.metrics import Metrics

    metrics = Metrics(run, rank, torch.device("cpu"))
    metrics.describe("smoke", "flat", 1024, contract.VERSION, 1, 0, 1_000_000, 0)
    waits = 0.001 if slow else 0.05
    times = {"step_duration": 0.1, "data_wait": 0.001, "grad_ready": 0.098 - waits, "sync_wait": waits}
    for step in range(1, 101):
        metrics.step([times], step, 0.1, 64, step * 1_000_000)
    metrics.reading(1.25, 0.5)
    return metrics.text().decode()


def textfile(run_dir: Path, rank: int) -> Path:
    """Where a rank's last metrics lie."""
    from lockstep.training import contract

    return contract.textfile(run_dir, rank)


def smoke_settings() -> dict[str, Any]:
    """The recipe smoke, as run.yaml holds it."""
    from lockstep.training import config

    return config.to_dict(config.load("smoke"))


def local_record(name: str, run_dir: Path) -> dict[str, Any]:
    """What job.json of a local job holds."""
    from lockstep.jobs import records
    from lockstep.jobs.local.supervise import here

    spec = JobSpec(name=name, recipe="smoke")
    return {
        "spec": spec.record(), "hash": spec.hash(), "run_dir": str(run_dir), "command": ["true"], "env": {},
        "time_limit": 3600.0, "grace": 60.0, "created": "2026-11-23T08:00:00+00:00", "job": records.identity(name),
        "host": here(),
    }  # fmt: skip


def first_loss_scale() -> float:
    """The factor with which float16 begins."""
    from lockstep.training.optim.loss_scaler import INITIAL

    return INITIAL
# What a module's own tests take of its neighbours


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
    from lockstep.training.data import shards

    return shards.Manifest.read(shards.prepare(settings))


def sharded(folder: Path, train: Any, test: Any, classes: list[str], files: int = 2) -> Any:
    """Shards of these (samples, labels)."""
    from lockstep.training.data import shards
    from lockstep.training.data.sources.raw import Raw

    return shards.write(Raw(train, test, classes), folder, "array", files)


def split(made: Any, name: str) -> tuple[Any, Any]:
    """(samples, labels) of a split of shards, as numpy arrays."""
    from lockstep.training.data.shards import Samples

    samples, labels = Samples.open(made, name, 0, made.count(name)).all()
    return samples.numpy(), labels.numpy()


def model(name: str, options: dict[str, Any] | None = None, classes: int = 10, shape: Any = (32, 32, 3)) -> Any:
    """A network of `model=NAME`."""
    from lockstep.training import models

    return models.build(name, options or {}, classes, shape)


def loader(made: Any, batch: int, rank: int = 0, size: int = 1, uneven: str = "drop", **settings: Any) -> Any:
    """A rank's loader over shards, with settings of the group `data`."""
    from lockstep.training.config import Config
    from lockstep.training.data.loader import Loader
    from lockstep.training.parallel.world import World

    config = Config(global_batch_size=batch, uneven=uneven, data=data(**settings))  # type: ignore[arg-type]
    return Loader(config, World(rank=rank, size=size, local_size=size), made, batch, 1)


def seal(manifest: dict[str, Any]) -> str:
    """The checksum that a manifest carries of itself."""
    from lockstep.training.manifest import seal

    return seal(manifest)


def metrics() -> Any:
    """A rank's metrics, which nobody serves."""
    import torch

    from lockstep.training.observe.metrics import Metrics

    return Metrics("x", 0, torch.device("cpu"))


def doctor_rows(*names: str, bound: float) -> list[Any]:
    """Rows of `lockstep doctor gpu` that need one process and have this many seconds."""
    from lockstep.training.doctor.table import Check

    return [Check(name, "alone", "none:none", "…", bound=bound) for name in names]


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
    from lockstep.training.data.loader import Loader

    batch = Loader.resident_batch

    def later(self: Any, epoch: int, step: int) -> Any:
        do()
        return batch(self, epoch, step)

    Loader.resident_batch = later  # type: ignore[method-assign]


# The documentation


def settings_pages() -> dict[str, Any]:
    """Page of the reference → the model whose settings it lists."""
    from lockstep.training.config import Config, OwnSettings

    return {"recipe-settings": Config, "session-settings": OwnSettings, "job-settings": JobSpec}


def contract_names() -> dict[str, Any]:
    """Names and values of exit codes, variables and files that a run and a job share."""
    from lockstep.jobs import status
    from lockstep.training import contract

    return {name: value for module in (contract, status) for name, value in vars(module).items() if name.isupper()}
