"""Where the last lines of a log begin, lines that are too long, and the last error."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from lockstep.jobs import logs
from lockstep.jobs.logs import LineSplitter


@pytest.mark.parametrize("end", ["\n", ""], ids=["ended", "unended"])
def test_where_the_last_lines_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """With blocks that end anywhere in a line, and lines that are longer than a block."""
    monkeypatch.setattr(logs, "BLOCK", 100)
    draw, path = random.Random(7), tmp_path / "log"
    for _ in range(200):
        length = draw.randrange(12)
        texts = [f"[rank {draw.randrange(3)}] {'x' * draw.choice((0, 1, 5, 99, 250))}" for _ in range(length)]
        text = "\n".join(texts) + (end if texts else "")
        path.write_text(text)
        for mark in ("", "[rank 1] "):
            expected = [line for line in texts if line.startswith(mark)]
            for count in (0, 1, 2, 5, 100):
                start = logs.tail_offset(path, count, lambda head, mark=mark: head.startswith(mark.encode()))
                rest = text[start:].removesuffix("\n")
                lines = [line for line in (rest.split("\n") if rest else []) if line.startswith(mark)]
                assert lines == (expected[-count:] if count else [])


def test_a_line_that_is_too_long_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """However the chunks fall."""
    monkeypatch.setattr(logs, "LONGEST", 100)
    whole = b"y" * 5000 + b"\nshort line\n\nunended"
    for size in (1, 7, 64, 10_000):
        splitter = LineSplitter()
        lines = [line for at in range(0, len(whole), size) for line in splitter.of(whole[at : at + size])]
        assert lines[1:] == [b"short line", b""] and splitter.rest() == b"unended"
        assert lines[0].startswith(b"y" * 100 + b"... (cut")


def test_the_last_error_of_a_log_is_not_that_of_an_earlier_start(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("error: of the first start\n")
    since = log.stat().st_size
    with log.open("a") as file:
        file.write("[rank 1] a.b.SomeError: x\x1b[0m y\n[rank 2] error: too large\nno error here\n")
    assert logs.last_error(log) == "[rank 2] too large"
    assert logs.last_error(log, log.stat().st_size) == "" == logs.last_error(tmp_path / "none")
    log.write_bytes(log.read_bytes().replace(b"error: too", b"too"))
    assert logs.last_error(log, since) == "[rank 1] a.b.SomeError: x[0m y"
