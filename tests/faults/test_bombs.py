"""Small files that would fill the memory, and things behind a file's name that never end: refused within seconds."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import product
from tests.product import UserError

pytestmark = pytest.mark.promise("hostile-files")

GROWTH = 96 << 20
"""Bytes that a refused file may cost."""


@contextlib.contextmanager
def cheap(seconds: float = 60.0) -> Iterator[None]:
    """The most memory that this process has had grows by less than `GROWTH`, and it takes no longer than `seconds`."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, began = _peak(), time.monotonic()
    yield
    assert _peak() - before < GROWTH, f"{(_peak() - before) >> 20} MiB more"
    assert time.monotonic() - began < seconds


def _peak() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


def test_a_small_state_that_would_fill_the_memory(tmp_path: Path) -> None:
    """Its manifest is sealed as it should be."""
    path = product.save(tmp_path / "checkpoints", 1, {"shared": {}, "ranks": []})
    (path / "state.json").write_bytes(b'{"a": [' + b"[]," * (40 << 20) + b"[]]}")
    product.seal(path)
    with cheap(60), pytest.raises(UserError, match="at most"):
        product.read("checkpoint", path)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2 << 30)


@pytest.mark.parametrize(
    "put", [_sparse, os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to(path.name)],
    ids=["2 GiB", "FIFO", "/dev/zero", "a link to itself"],
)  # fmt: skip
def test_behind_every_file_name(tmp_path: Path, put: Callable[[Path], None]) -> None:
    """Covers every reader of a file that people or other processes write."""
    run, checkpoint = tmp_path / "run", product.save(tmp_path / "checkpoints", 1, {"shared": {}, "ranks": []})
    (checkpoint / "manifest.json").unlink()
    (run / "metrics").mkdir(parents=True)
    (run / "run.yaml").write_text("config: {}\nglobal_batch_size: 3\ndata: {}\n")
    for name in ("status.json", "summary.json", "events.jsonl", "metrics/rank-00000.prom"):
        put(run / name)
    for path in (tmp_path / "recipe.yaml", tmp_path / "w.pth", tmp_path / "labels", checkpoint / "manifest.json"):
        put(path)
    with cheap():
        for kind, path in {"recipe": tmp_path / "recipe.yaml", "weights": tmp_path / "w.pth", "idx": tmp_path / "labels",
                           "checkpoint": checkpoint}.items():  # fmt: skip
            with pytest.raises(UserError, match=path.name):
                product.read(kind, path)
        assert "no end is recorded" in product.read("report", run)
        assert product.read("metrics", run) == {}


def test_many_lines_without_an_event(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("config: {}\nglobal_batch_size: 3\ndata: {}\n")
    (tmp_path / "events.jsonl").write_bytes(b"{}\n" * 3_000_000)
    with cheap():
        product.read("report", tmp_path)
