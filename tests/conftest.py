from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

# Before torch is loaded: a test computes in one thread. Two workers with two each would wait for one another.
os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis
import pytest

from tests.engine import cpu_image, engine  # noqa: F401 - fixtures: here once, so that one image is built
from tests.processes import clean_env

if TYPE_CHECKING:
    import torch

Undisturbed: TypeAlias = Callable[..., "dict[str, torch.Tensor]"]
"""`undisturbed(ranks, strategy="flat")`: every tensor of the last checkpoint of an undisturbed run."""

hypothesis.settings.register_profile("lockstep", deadline=None, derandomize=bool(os.environ.get("CI")), database=None)
hypothesis.settings.load_profile("lockstep")


@pytest.fixture(scope="session")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One data folder for all tests, so that a set of shards is made once."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, data_root: Path) -> Undisturbed:
    """Each reference is computed once, when a test first asks for it."""
    from tests.runs import LOSSY_START, Job, tensors  # torch: the tests of the dispatcher alone do without

    @cache
    def state(ranks: int, strategy: str = "flat") -> dict[str, torch.Tensor]:
        changes = {"sync.name": strategy, **LOSSY_START.get(strategy, {})}
        job = Job(tmp_path_factory.mktemp("undisturbed") / "run", data_root, ranks, **changes)
        result = job.go()
        assert result.code == 0, result.output
        return tensors(job.run_dir)

    return state


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("nightly") and not os.environ.get("LOCKSTEP_NIGHTLY"):
        pytest.skip("runs at night: LOCKSTEP_NIGHTLY=1, make test-nightly")


@pytest.fixture(scope="session", autouse=True)
def _temporary(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The session's end removes the temporary files of killed processes."""
    os.environ["TMPDIR"] = str(tmp_path_factory.mktemp("tmp"))


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests see the environment of a laptop, wherever they run."""
    env = clean_env()
    for name in list(os.environ):
        if name not in env:
            monkeypatch.delenv(name)
    monkeypatch.setenv("LOCKSTEP_METRICS_PORT", env["LOCKSTEP_METRICS_PORT"])


@pytest.fixture(scope="session")
def tiny(data_root: Path) -> list[str]:
    """Settings of a run of 3 epochs × 8 steps that takes about a second."""
    from tests.runs import small

    return small(data_root)
