"""The last lines of a log: of any length and any ranks, in bounded memory."""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path

import pytest

from jobs import lines
from jobs.local.backend import LocalBackend
from jobs.spec.model import JobSpec
from tests.jobs.helpers import Bare


@pytest.mark.parametrize("end", ["\n", ""], ids=["ended", "unended"])
def test_where_the_last_lines_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """With blocks that end anywhere in a line, and lines that are longer than a block."""
    monkeypatch.setattr(lines, "BLOCK", 100)
    draw, path = random.Random(7), tmp_path / "log"
    for _ in range(200):
        texts = [
            f"[rank {draw.randrange(3)}] {'x' * draw.choice((0, 1, 5, 99, 250))}" for _ in range(draw.randrange(12))
        ]
        text = "\n".join(texts) + (end if texts else "")
        path.write_text(text)
        for count in (0, 1, 2, 5, 100):
            start, found = lines.begin(path, count)
            rest = text[start:].removesuffix("\n")
            assert (rest.split("\n") if rest else []) == (texts[-count:] if count else [])
            assert found == min(count, len(texts))
            start, found = lines.begin(path, count, lambda head: head.startswith(b"[rank 1] "))
            own = [line for line in text[start:].split("\n") if line.startswith("[rank 1] ")]
            wanted = [line for line in texts if line.startswith("[rank 1] ")]
            assert own == (wanted[-count:] if count else []) and found == len(own)


def test_the_tail_of_ten_gigabytes_is_there_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a file with a hole in its middle. For one rank, too, whose lines stand at the end."""
    backend = Bare(tmp_path / "home")
    backend.submit(JobSpec(name="big", command=["python", "-c", "pass"], max_restarts=0, ranks_per_node=2))
    assert backend.wait("big", 60).final
    with (tmp_path / "home/big/log.txt").open("wb") as file:
        file.truncate(10 << 30)
        file.seek(0, 2)
        file.write(b"\n" + b"".join(f"[rank {n % 2}] {n}\n".encode() for n in range(1000)))
    tracemalloc.start()
    try:
        assert [*LocalBackend(tmp_path / "home").logs("big", last=3)] == [
            "[rank 1] 997",
            "[rank 0] 998",
            "[rank 1] 999",
        ]
        assert [*LocalBackend(tmp_path / "home").logs("big", rank=0, last=2)] == ["996", "998"]
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_logs_are_merged_by_their_times_and_shares_are_even() -> None:
    first, second = [(f"{n:03}", f"a{n}") for n in range(0, 100, 2)], [(f"{n:03}", f"b{n}") for n in range(1, 20, 2)]
    assert lines.newest([iter(first), iter(second)], 3) == first[-3:]
    assert lines.newest([first[:5], second[:5]], 4) == [("006", "a6"), ("007", "b7"), ("008", "a8"), ("009", "b9")]
    late = [("5", "x"), ("4", "y")]  # written in this order, by two streams
    assert [text for _, text in lines.newest([late, [("3", "z")]], 9)] == ["z", "x", "y"]
    assert lines.shares([10, 10, 10], 8) == [3, 3, 2] and lines.shares([1, 10, 0], 8) == [1, 7, 0]
    assert lines.shares([5, 5], 0) == [0, 0] and lines.shares([2, 2], 100) == [2, 2]
    assert lines.shares([9] * 20, 3) == [1, 1, 1] + [0] * 17
