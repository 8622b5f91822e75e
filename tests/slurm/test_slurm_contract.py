"""The backend contract, word for word the test that `local` and `k8s` pass, on a real SLURM."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest

from tests.jobs import test_jobs_contract as contract

pytestmark = pytest.mark.promise("one-protocol")

globals().update(
    {
        name: test for name, test in vars(contract).items()
        if name.startswith("test_") and set(inspect.signature(test).parameters) == {"bench"}
    }
)  # fmt: skip


@pytest.fixture
def bench(bench) -> Iterator[contract.Bench]:  # type: ignore[no-untyped-def]
    return contract.Bench(bench.backend, bench.folder)
