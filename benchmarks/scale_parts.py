"""What a rank does for `scale.py`: what surrounds a step, one part after another. Each part's counts go into `phases`."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.scale_counts import Counts, Spent, held
from benchmarks.scale_ranks import REPEATS, Phases, joined, settings
from lockstep.training.checkpoint import state as states
from lockstep.training.checkpoint import store
from lockstep.training.parallel import agreement
from lockstep.training.parallel.world import World
from lockstep.training.resilience import closeness
from lockstep.training.resilience.preempt import Consensus
from lockstep.training.run import attempt as attempts
from lockstep.training.run import context, prepare
from lockstep.training.run.recipe import make_trainer
from lockstep.training.run.recipe_attempt import RecipeAttempt

STARTING = {
    "run directory and metrics": (context, "RunDirectory"), "exporter": (context, "Exporter"),
    "newest checkpoint": (prepare, "newest_here"), "shards made or found": (prepare, "prepare_shards"),
    "shards verified": (prepare, "verify_shards"), "same data": (prepare, "_same_data"), "model": (prepare, "_build_model"),
    "samples opened": (prepare, "Loader"), "whose checkpoint": (prepare, "newest_of_all"),
    "same weights": (prepare, "_check_same"), "replicas": (prepare, "_replicate"),
    "state sent": (prepare, "scatter"),
}  # fmt: skip
"""Parts of a start → the function in which each happens. `agreement` is what they leave of the whole start."""
CAUSES = {
    "join (torch's store and mesh)": "torch: init_process_group, TCPStore",
    "agreement and rest of the start": "training/parallel/agreement.py: raise_together",
    "newest checkpoint": "training/run/resume.py: newest_here", "shards verified": "training/data/shards.py: verify",
    "same data": "training/run/prepare.py: _same_data", "whose checkpoint": "training/run/resume.py: newest_of_all",
    "exporter": "training/observe/exporter.py: _publish", "samples opened": "training/data/shards.py: Samples.open",
    "replicas": "training/sync/base.py: broadcast_module", "evaluator": "training/evaluate/evaluator.py: Evaluator",
    "a step (the strategy's sum and consensus)": "training/sync/buckets.py: send; training/resilience/preempt.py: poll",
    "consensus, a step": "training/resilience/preempt.py: Consensus.poll",
    "agreement, no error": "training/parallel/agreement.py: raise_together",
    "agreement, an error": "training/parallel/agreement.py: raise_together",
    "checkpoint gathered": "training/checkpoint/state.py: gather",
    "checkpoint sent": "training/checkpoint/state.py: scatter",
    "checkpoint sent, other world size": "training/checkpoint/state.py: scatter",
    "evaluation merged": "training/checkpoint/state.py: averaged_buffers; training/evaluate/evaluator.py: score",
    "closeness": "training/resilience/closeness.py: check_parameter_closeness",
    "textfile": "training/observe/exporter.py: _write_textfiles", "the end": "training/run/attempt.py: _leave_together",
    "same weights": "training/run/prepare.py: _check_same", "run directory and metrics": "training/observe/rundir.py: RunDirectory",
    "shards made or found": "training/data/shards.py: prepare", "model": "training/run/prepare.py: _build_model",
    "state sent": "training/checkpoint/state.py: scatter",
}  # fmt: skip


@contextlib.contextmanager
def _counted(counts: Counts, phases: Phases, name: str) -> Iterator[None]:
    before = counts.now()
    try:
        yield
    finally:
        phases[name] = phases.get(name, Spent()) + (counts.now() - before)


def _wrapped(counts: Counts, phases: Phases, name: str, function: Callable[..., Any]) -> Any:
    class Wrapped:
        """Calls, and passes on attributes: some are classes with constructors of their own name."""

        def __call__(self, *args: Any, **words: Any) -> Any:
            with _counted(counts, phases, name):
                return function(*args, **words)

        def __getattr__(self, attribute: str) -> Any:
            found = getattr(function, attribute)
            return _wrapped(counts, phases, name, found) if callable(found) else found

    return Wrapped()


def start_and_train(world: World, counts: Counts, phases: Phases, root: Path) -> None:
    """A recipe's run: from the group to the first step, by part; then steps; then its end."""
    config = settings(root / "data")
    inside: Phases = {}
    before = counts.now()
    with contextlib.ExitStack() as stack:
        for name, (module, attribute) in STARTING.items():
            if hasattr(module, attribute):
                found = _wrapped(counts, inside, name, getattr(module, attribute))
                stack.enter_context(mock.patch.object(module, attribute, found))
        prepared = prepare.prepare(config, world, root / "run", False)
    whole = counts.now() - before
    with _counted(counts, inside, "evaluator"):
        epochs = RecipeAttempt(prepared, None, time.perf_counter())
    phases.update(inside)
    phases["agreement and rest of the start"] = whole - sum(
        (spent for name, spent in inside.items() if name != "evaluator"), Spent()
    )
    with contextlib.suppress(attempts.Ended):
        _steps(epochs, counts, phases, prepared)


def _steps(epochs: RecipeAttempt, counts: Counts, phases: Phases, prepared: Any) -> None:
    name = "a step (the strategy's sum and consensus)"
    loader = prepared.loader
    assert loader.steps_per_epoch >= 2, "a step must follow the first one"
    with epochs, _counted(counts, phases, "an epoch and its checkpoint"):
        trainer, done = make_trainer(prepared), []

        def noted(*args: Any) -> Any:
            done.append(counts.now())
            return RecipeAttempt.batch_done(epochs, *args)

        epochs.batch_done = noted  # type: ignore[method-assign]
        trainer.train(epochs)
        phases[name] = done[1] - done[0]
        epochs.finish()
    with _counted(counts, phases, "textfile"):
        prepared.exporter._write_textfiles()
    with _counted(counts, phases, "the end"):
        attempts._leave_together(prepared.world, lambda: None)
    prepared.exporter.close(0)
    if prepared.run is not None:
        prepared.run.close()


def alone(world: World, counts: Counts, phases: Phases, root: Path) -> None:
    """Each exchange between the ranks by itself; what is repeated is counted a call."""
    config = settings(root / "data")
    with context.opened(config, world, root / "again", False) as place:
        prepared = prepare._prepare(config, world, place)
        for name, (call, times) in calls(world, prepared.state).items():
            dist.barrier()
            spent: Phases = {}
            with _counted(counts, spent, name):
                for _ in range(times):
                    call()
            one = {field: value / times for field, value in spent[name].plain().items()}
            phases[name] = Spent(**one)  # type: ignore[arg-type]
        prepared.exporter.close(0)
        if prepared.run is not None:
            prepared.run.close()


def calls(world: World, state: states.TrainState) -> dict[str, tuple[Callable[[], object], int]]:
    """Name → (a collective call, how often). `state` is that of a run before its first step."""
    consensus = Consensus(world, None, None)
    gathered: list[Any] = []

    def resized() -> object:
        """As if the ranks of the checkpoint had been one fewer, or one more."""
        other = (
            None if gathered[0] is None else {**gathered[0], "ranks": [*gathered[0]["ranks"], gathered[0]["ranks"][0]]}
        )
        return states.scatter(other, state)

    def agree(fails: bool) -> None:
        error = store.CorruptCheckpoint("a file of this rank is damaged") if fails and world.leader else None
        with contextlib.suppress(RuntimeError):
            agreement.raise_together(error, world)

    def merged() -> None:
        states.averaged_buffers(state.model, world)
        agreement.reduced(torch.zeros(21, dtype=torch.float64), world)

    return {
        "consensus, a step": (lambda: (consensus.poll(), consensus.settle()), REPEATS),
        "agreement, no error": (lambda: agree(False), REPEATS),
        "agreement, an error": (lambda: agree(True), 1),
        "checkpoint gathered": (lambda: gathered.append(states.gather(state)), 1),
        "checkpoint sent": (lambda: states.scatter(gathered[0], state), 1),
        "checkpoint sent, other world size": (resized, 1),
        "evaluation merged": (merged, 2),
        "closeness": (lambda: closeness.check_parameter_closeness(state.model, batch_statistics=False), 1),
        "whose checkpoint, alone": (lambda: prepare.newest_of_all(None, world), 2),
    }  # fmt: skip


def rounds(size: int) -> int:
    return math.ceil(math.log2(max(size, 2)))


def parts(port: int, folder: str) -> dict[str, Any]:
    """One rank of everything that `scale.py` counts."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for as long as this process lives
    root = Path(folder)
    with joined(port, [root / "data", root / "run"]) as (world, counts, phases):
        start_and_train(world, counts, phases, root)
        alone(world, counts, phases, root)
        return {"phases": {name: spent.plain() for name, spent in phases.items()}, "held": held()}
