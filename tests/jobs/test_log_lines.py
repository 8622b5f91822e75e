"""The last lines of a log: of any length, in bounded memory."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from tests import product
from tests.product import JobSpec

pytestmark = pytest.mark.promise("logs")


@pytest.fixture(autouse=True)
def _big(backend: Any) -> None:
    """Runs a job `big` to its end."""
    backend.submit(JobSpec(name="big", command=["python", "-c", "pass"], max_restarts=0, ranks_per_node=2))
    assert backend.wait("big", 60).final


def test_the_tail_of_ten_gigabytes_is_there_at_once(backend: Any) -> None:
    """The log has a hole in its middle. The tail of one rank is read, too."""
    with (backend.folder / "big/log.txt").open("wb") as file:
        file.truncate(10 << 30)
        file.seek(0, 2)
        file.write(b"\n" + b"".join(f"[rank {n % 2}] {n}\n".encode() for n in range(1000)))
    tracemalloc.start()
    try:
        assert [*backend.logs("big", last=3)] == ["[rank 1] 997", "[rank 0] 998", "[rank 1] 999"]
        assert [*backend.logs("big", rank=0, last=2)] == ["996", "998"]
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_a_line_of_100_megabytes_is_cut_in_bounded_memory(backend: Any) -> None:
    """The log of a local job and of a SLURM job."""
    log = backend.folder / "big/log.txt"
    with log.open("wb") as file:
        file.write(b"[rank 0] first\n[rank 1] ")
        for _ in range(100):
            file.write(b"x" * 1_000_000)
        file.write(b"\n[rank 0] last\n")
    (backend.folder / "1_0_log.out").hardlink_to(log)
    for lines in (backend.logs("big"), backend.logs("big", last=3), product.slurm_log(backend.folder, "1")):
        tracemalloc.start()
        try:
            first, long, last = lines
            assert (first, last) == ("[rank 0] first", "[rank 0] last")
            assert long.startswith("[rank 1] xxx") and 1 << 20 <= len(long) < 2 << 20 and long.endswith("above 1 MiB)")
            assert tracemalloc.get_traced_memory()[1] < 32 << 20
        finally:
            tracemalloc.stop()
