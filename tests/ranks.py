"""Starts ranks for tests: forked ones (milliseconds), or ranks of the real launcher for tests of the launcher."""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests import product
from tests.processes import PYTHON, ROOT, Result, require, run
from tests.warm.gang import Gang, python, running


def training(*words: str, env: dict[str, str] | None = None, timeout: float = 240) -> Result:
    """`python -m lockstep.training WORDS` in one process."""
    return python("-m", "lockstep.training", *words, env=env, timeout=timeout)


def gang(ranks: int, *words: str, env: dict[str, str] | None = None, timeout: float = 240) -> Result:
    """`python -m lockstep.training WORDS` on several ranks."""
    with running([["-m", "lockstep.training", *words]] * ranks, env) as started:
        return started.wait(timeout)


def launched(ranks: int, *words: str, env: dict[str, str] | None = None, timeout: float = 240) -> Result:
    """`python -m lockstep.training launch … WORDS` from a shell: every process imports for itself."""
    command = [PYTHON, "-m", "lockstep.training", "launch", "--ranks", str(ranks), "--grace", "20", *words]
    return run(command, env, timeout)


def launching(
    *words: str, env: dict[str, str] | None = None, cwd: Path = ROOT, namespace: str = ""
) -> contextlib.AbstractContextManager[Gang]:
    """`launch WORDS`: a launcher and ranks that are forked, in a network namespace of that name."""
    require(hasattr(os, "pidfd_open") or "--live" not in words, "`launch --live` needs Linux")
    program = ["-c", _INSIDE, namespace] if namespace else ["-m", "tests.warm.launcher"]
    return running([[*program, "launch", *words]], env, cwd=cwd)


def of_node(number: int, rendezvous: str, ranks: int = 1, nodes: int = 2) -> list[str]:
    """Returns the options of a launcher of several nodes. The first serves at the rendezvous, each other is at the next address."""
    network, _, first = rendezvous.partition(":")[0].rpartition(".")
    return [
        "--ranks", str(ranks), "--nodes", str(nodes), "--rendezvous", rendezvous,
        "--address", f"{network}.{int(first) + number}", "--no-serve" if number else "--serve",
    ]  # fmt: skip


def live(
    *words: str, env: dict[str, str] | None = None, cwd: Path = ROOT, namespace: str = ""
) -> contextlib.AbstractContextManager[Gang]:
    """`launch --live WORDS`, forked."""
    return launching("--live", *words, env=env, cwd=cwd, namespace=namespace)


_INSIDE = """
import ctypes, os, sys
from tests.warm.launcher import main
if ctypes.CDLL(None, use_errno=True).setns(os.open(f"/run/netns/{sys.argv.pop(1)}", os.O_RDONLY), 0x40000000):
    raise OSError(ctypes.get_errno(), "the network namespace cannot be entered")
main(sys.argv[1:])
"""


def on_ranks(function: Callable[..., Any], size: int, *args: Any, timeout: float = 240) -> list[Any]:
    """Returns the value of `function(world, *args)` on each of several ranks that have joined. Any rank's error fails the test."""
    with tempfile.TemporaryDirectory() as folder:
        call = Path(folder) / "call"
        call.write_bytes(pickle.dumps(partial(_rank, function, folder, args)))
        with running([["--call", str(call)]] * size) as started:
            result = started.wait(timeout)
        assert result.code == 0, result.output
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(size)]


def _rank(function: Callable[..., Any], folder: str, args: tuple[Any, ...]) -> None:
    with product.joined() as world:
        product.set_threads(world, 1, {})
        value = function(world, *args)
        (Path(folder) / str(world.rank)).write_bytes(pickle.dumps(value))
    product.leave(0)
