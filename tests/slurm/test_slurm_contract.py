"""The backend contract, word for word the test that `local` and `k8s` pass, on a real SLURM."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.jobs.test_jobs_contract import (  # noqa: F401 - collected here, with the bench below
    Bench,
    test_a_command_beside_a_rank,
    test_a_job_from_submit_to_summary,
    test_how_it_ended_is_told_apart,
    test_submitting_at_once,
    test_the_last_lines,
    test_waiting_is_bounded_and_cancel_ends_the_processes,
)


@pytest.fixture
def bench(bench) -> Iterator[Bench]:  # type: ignore[no-untyped-def]
    return Bench(bench.backend, bench.folder)
