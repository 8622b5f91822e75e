"""Real processes for tests: started in a group of their own, bounded, and gone afterwards whatever happens."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from training.bench.gang import free_port as free_port  # where benchmarks find their ranks a port, too

ROOT = Path(__file__).parents[1]
PYTHON = sys.executable


def clean_env(**extra: str) -> dict[str, str]:
    """This process's environment without what a launcher or a cluster may have set."""
    prefixes = ("SLURM_", "OMPI_", "PMI_", "PET_", "TORCHELASTIC_", "LOCKSTEP_")
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"}
    names |= {"PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"}  # what they hide is there on a laptop
    kept = {k: v for k, v in os.environ.items() if k not in names and not k.startswith(prefixes)}
    return {
        **kept, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default", "CUDA_VISIBLE_DEVICES": "",
        "LOCKSTEP_METRICS_PORT": "0",  # any free one: other tests may run on this machine
        **extra,
    }  # fmt: skip


@dataclass
class Result:
    code: int
    output: str


@contextlib.contextmanager
def started(command: list[str], env: dict[str, str] | None = None, cwd: Path = ROOT) -> Iterator[subprocess.Popen[str]]:
    """A process whose whole group is killed at the end."""
    process = subprocess.Popen(
        command, env=env or clean_env(), cwd=cwd, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        if process.stdout:
            process.stdout.close()


def run(command: list[str], env: dict[str, str] | None = None, timeout: float = 120, cwd: Path = ROOT) -> Result:
    """Runs to the end. A process that hangs is killed and fails the test with what it had printed."""
    with started(command, env, cwd) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise AssertionError(f"still running after {timeout} s: {' '.join(command)}\n{output}") from None
        return Result(process.returncode, output)


def training(*words: str, env: dict[str, str] | None = None, timeout: float = 120) -> Result:
    """`python -m training WORDS` in one process."""
    return run([PYTHON, "-m", "training", *words], env, timeout)


def gang(
    ranks: int, *words: str, env: dict[str, str] | None = None, timeout: float = 180, launch: tuple[str, ...] = ()
) -> Result:
    """`python -m training WORDS` on several ranks, under our launcher."""
    command = [PYTHON, "-m", "training", "launch", "--ranks", str(ranks), "--grace", "20", *launch, *words]
    return run(command, env, timeout)


def poll(condition: Callable[[], object], timeout: float = 60, what: str = "condition") -> None:
    """Returns as soon as the condition holds; fails after the bound."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout} s"
        time.sleep(0.02)
