"""Ranks in the process of a test."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import ModuleType

    from lockstep.training.parallel.world import World


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
    from lockstep.wire.signals import FORWARDED

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


SUM_OF_ALLREDUCE = "lockstep.training.sync.teaching.strategies:AllReduce.synchronize"
"""Where the strategy `allreduce` sums, for a fault that is planted there."""


def doctor_gpu(words: list[str], rank: tuple[str, ...]) -> int:
    """`lockstep doctor gpu WORDS`, whose ranks are started by the command `rank`; its exit code."""
    from lockstep.training.doctor import main

    return main(words, rank)


def gpu_checks() -> dict[str, int]:
    """The rows of `lockstep doctor gpu`, and how many GPUs each needs."""
    from lockstep.training.doctor import ROWS

    return {row.name: row.gpus for row in ROWS}


def late_inputs(seconds: float) -> None:
    """Each recorded step of this process gets its inputs late, as one whose data is late."""
    from lockstep.training.run.recording import Recorder

    prepare = Recorder.prepare

    def late(self: Any, *args: Any) -> None:
        if self._recorded is not None:
            time.sleep(seconds)
        prepare(self, *args)

    Recorder.prepare = late  # type: ignore[method-assign]


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
    from lockstep.training.config import own_settings
    from lockstep.training.observe import report

    root = Path(__file__).parents[2]
    for file in (root / "training").rglob("*.py"):
        name = ".".join(("lockstep", *file.relative_to(root).with_suffix("").parts))
        if not name.endswith(("__main__", "__init__")):
            importlib.import_module(name)
    config.load("smoke", [])
    own_settings("script", {}, {}, ())
    report._environment().get_template("template.html.j2")


def first_loss_scale() -> float:
    """The factor with which float16 begins."""
    import torch

    return torch.amp.GradScaler("cpu").get_scale()


def world(**values: Any) -> World:
    """Who a rank is and who the others are, where none has joined."""
    from lockstep.training.parallel.world import World

    return World(**values)


def signals_are_noted() -> bool:
    """Whether each run that this process is in knows of a signal."""
    import gc

    from lockstep.training.resilience.preempt import Signals

    return all(one.received for one in gc.get_objects() if isinstance(one, Signals))
