"""The last lines of a log: of any length and any ranks, in bounded memory."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.jobs import lines
from lockstep.jobs.lines import STAMPED, Pieces
from lockstep.jobs.local.backend import LocalBackend
from lockstep.jobs.slurm import logs as slurm_logs
from lockstep.jobs.slurm.transport.local import LOCAL
from lockstep.jobs.spec.model import JobSpec
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


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """A job that has ended, with a line of 200 MB in its log."""
    backend = Bare(tmp_path / "home")
    backend.submit(JobSpec(name="big", command=["python", "-c", "pass"], max_restarts=0, ranks_per_node=2))
    assert backend.wait("big", 60).final
    with (tmp_path / "home/big/log.txt").open("wb") as file:
        file.write(b"[rank 0] first\n[rank 1] ")
        for _ in range(200):
            file.write(b"x" * 1_000_000)
        file.write(b"\n[rank 0] last\n")
    return tmp_path / "home"


def _read(found: Iterator[str]) -> tuple[list[str], int]:
    """The first and last lines, and how many letters the others have; within a bound of time and memory."""
    began = time.process_time()
    tracemalloc.start()
    try:
        first, letters, last = next(found), 0, ""
        for line in found:
            letters += len(last.removeprefix("[rank 1] "))
            last = line
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < 30, "each byte is looked at once"
    return [first, last], letters


def test_a_line_of_200_megabytes_is_read_once_and_in_pieces(endless: Path) -> None:
    backend = LocalBackend(endless)
    assert _read(backend.logs("big")) == (["[rank 0] first", "[rank 0] last"], 200_000_000)
    assert _read(backend.logs("big", last=3)) == (["[rank 0] first", "[rank 0] last"], 200_000_000)
    pieces = [*backend.logs("big", rank=1)]
    assert sum(map(len, pieces)) == 200_000_000 and {*"".join(pieces)} == {"x"}, "every piece is that rank's"
    assert [*backend.logs("big", rank=0)] == ["first", "last"]


def test_a_line_of_200_megabytes_of_a_slurm_job(endless: Path) -> None:
    (endless / "1_0_log.out").hardlink_to(endless / "big/log.txt")
    record = {"submitit": str(endless), "job_id": "1"}
    found = slurm_logs.lines(LOCAL, record, [0], False, lambda: True, 0.1, 0)
    assert _read(found) == (["[rank 0] first", "[rank 0] last"], 200_000_000)


def test_pieces_of_a_line_begin_as_the_line_does() -> None:
    """Of an engine's log, in which each line has its time; however the chunks fall."""
    whole = b"2026-01-01T00:00:00Z [rank 3] " + b"y" * 5000 + b"\nshort line\n\nunended"
    for size in (1, 7, 64, 10_000):
        pieces = Pieces(b"\n", STAMPED, longest=100)
        found = [piece for at in range(0, len(whole), size) for piece in pieces.of(whole[at : at + size])]
        *long, short, empty = found
        assert (short, empty, pieces.rest()) == (b"short line", b"", b"unended")
        assert all(piece.startswith(b"2026-01-01T00:00:00Z [rank 3] ") for piece in long)
        assert sum(piece.count(b"y") for piece in long) == 5000
        plain = Pieces(b"\n", longest=None)
        chunks = [whole[at : at + size] for at in range(0, len(whole), size)]
        assert [line for chunk in chunks for line in plain.of(chunk)] == whole.split(b"\n")[:-1]


def test_logs_are_merged_by_their_times_and_shares_are_even() -> None:
    first, second = [(f"{n:03}", f"a{n}") for n in range(0, 100, 2)], [(f"{n:03}", f"b{n}") for n in range(1, 20, 2)]
    assert lines.newest([iter(first), iter(second)], 3) == first[-3:]
    assert lines.newest([first[:5], second[:5]], 4) == [("006", "a6"), ("007", "b7"), ("008", "a8"), ("009", "b9")]
    late = [("5", "x"), ("4", "y")]  # written in this order, by two streams
    assert [text for _, text in lines.newest([late, [("3", "z")]], 9)] == ["z", "x", "y"]
    assert lines.shares([10, 10, 10], 8) == [3, 3, 2] and lines.shares([1, 10, 0], 8) == [1, 7, 0]
    assert lines.shares([5, 5], 0) == [0, 0] and lines.shares([2, 2], 100) == [2, 2]
    assert lines.shares([9] * 20, 3) == [1, 1, 1] + [0] * 17
