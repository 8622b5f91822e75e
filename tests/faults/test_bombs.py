"""Small files that would fill the memory, and things behind a file's name that never end: refused within seconds."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import product
from tests.jobs.helpers import top
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


def _rezipped(
    root: Path, change: Callable[[str, bytes], bytes], kind: int = zipfile.ZIP_STORED, size: int = 1
) -> tuple[str, Path]:
    """A weight file whose entries are changed, or packed."""
    torch.save({"w": torch.zeros(size)}, root / "plain.pth")
    with (
        zipfile.ZipFile(root / "plain.pth") as plain,
        zipfile.ZipFile(root / "w.pth", "w", kind, compresslevel=1) as packed,
    ):
        for entry in plain.infolist():
            packed.writestr(entry.filename, change(entry.filename, plain.read(entry)))
    (root / "plain.pth").unlink()
    assert (root / "w.pth").stat().st_size < 2 << 20
    return "weights", root / "w.pth"


def _pickled(root: Path, pickled: bytes) -> tuple[str, Path]:
    return _rezipped(root, lambda name, data: pickled if name.endswith("data.pkl") else data)


def _old_pickle(root: Path) -> tuple[str, Path]:
    """In the form that torch wrote before it packed its files."""
    torch.save({"w": torch.zeros(1)}, root / "w.pth", _use_new_zipfile_serialization=False)
    data = (root / "w.pth").read_bytes()
    (root / "w.pth").write_bytes(data[: data.index(b"ccollections")] + GIGABYTE)
    return "weights", root / "w.pth"


def _state(root: Path) -> tuple[str, Path]:
    """Of a checkpoint, sealed as it should be."""
    path = product.save(root / "checkpoints", 1, {"shared": {}, "ranks": []})
    (path / "state.json").write_bytes(b'{"a": [' + b"[]," * (40 << 20) + b"[]]}")
    product.seal(path)
    return "checkpoint", path


GIGABYTE = b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x40\x00\x85R."
LISTS = (
    b"\x80\x02ctorch\nTensor\n](K\x01K\x01eq\x00"
    + b"".join(b"0](h%ch%ceq%c" % (n, n, n + 1) for n in range(28))
    + b"\x85R."
)
BOMBS: dict[str, tuple[Callable[[Path], tuple[str, Path]], str]] = {
    "packed weights": (
        lambda root: _rezipped(root, lambda _, data: data, zipfile.ZIP_DEFLATED, 1 << 26),
        "is compressed",
    ),
    "a pickle of a gigabyte": (lambda root: _pickled(root, GIGABYTE), "w.pth"),
    "a pickle of lists in lists": (lambda root: _pickled(root, LISTS), "w.pth"),
    "an old pickle of a gigabyte": (_old_pickle, "w.pth"),
    "a state of many megabytes": (_state, "at most"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_that_would_fill_the_memory(name: str, tmp_path: Path) -> None:
    make, why = BOMBS[name]
    kind, path = make(tmp_path)
    with cheap(60), pytest.raises(UserError, match=why):
        product.read(kind, path)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2 << 30)


@pytest.mark.parametrize(
    "put", [_sparse, os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to(path.name)],
    ids=["2 GiB", "FIFO", "/dev/zero", "a link to itself"],
)  # fmt: skip
def test_behind_every_file_name(tmp_path: Path, put: Callable[[Path], None]) -> None:
    """What reads a file that people or other processes write."""
    run, checkpoint = tmp_path / "run", product.save(tmp_path / "checkpoints", 1, {"shared": {}, "ranks": []})
    (checkpoint / "manifest.json").unlink()
    (run / "metrics").mkdir(parents=True)
    (run / "endpoints").mkdir()
    (run / "run.yaml").write_text("config: {}\nglobal_batch_size: 3\ndata: {}\n")
    for name in ("status.json", "summary.json", "events.jsonl", "metrics/rank-00000.prom", "endpoints/rank-00000.json"):
        put(run / name)
    for path in (tmp_path / "recipe.yaml", tmp_path / "w.pth", tmp_path / "labels", checkpoint / "manifest.json"):
        put(path)
    with cheap():
        for kind, path in {"recipe": tmp_path / "recipe.yaml", "weights": tmp_path / "w.pth", "idx": tmp_path / "labels",
                           "checkpoint": checkpoint}.items():  # fmt: skip
            with pytest.raises(UserError, match=path.name):
                product.read(kind, path)
        found = product.read("report", run)
        assert (found.status, found.summary, found.events, found.ranks) == ({}, {}, [], [])
        assert product.read("metrics", run) == {}


class _Metrics(http.server.BaseHTTPRequestHandler):
    """/metrics of a rank that sends on for ever, or sends elsewhere."""

    server: _Stranger

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.send_response(302 if self.server.redirects else 200)
        self.send_header("Location", "/elsewhere")
        self.end_headers()
        with contextlib.suppress(OSError):
            while not self.server.redirects:
                self.wfile.write(b"# a line that is followed by another\n")
                time.sleep(0.01)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


class _Stranger(http.server.ThreadingHTTPServer):
    """Keeps the paths that it was asked for."""

    daemon_threads = True

    def __init__(self, redirects: bool, host: str) -> None:
        self.redirects, self.asked = redirects, list[str]()
        super().__init__((host, 0), _Metrics)


@contextlib.contextmanager
def _served(run: Path, redirects: bool, host: str = "127.0.0.1") -> Iterator[tuple[Path, _Stranger]]:
    """An endpoint of a run, and what serves there."""
    server = _Stranger(redirects, host)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (run / "run.yaml").write_text("config: {}\n")
    (run / "endpoints").mkdir()
    endpoint = run / "endpoints/rank-00000.json"
    endpoint.write_text(json.dumps({"host": host, "port": server.server_port, "pid": 1}))
    try:
        yield endpoint, server
    finally:
        server.shutdown()
        server.server_close()


def _top(run: Path) -> Any:
    done = top(run, str(run), "--json")
    assert "Traceback" not in done.stderr and '"live"' not in done.stdout, done


@pytest.mark.parametrize("redirects", [False, True], ids=["endless", "redirect"])
def test_top_asks_no_longer_and_nowhere_else(tmp_path: Path, redirects: bool) -> None:
    """What serves at a rank's endpoint sends metrics without an end, or names another address to ask."""
    with _served(tmp_path, redirects) as (_, server), cheap(30):
        _top(tmp_path)
        assert set(server.asked) == {"/metrics"}


@pytest.mark.promise("other-users")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to another user")
def test_an_endpoint_of_another_user_names_no_other_host(tmp_path: Path) -> None:
    """`lockstep top` would ask whom he likes, as this user. 127.0.0.2 is none of this machine's own names."""
    with _served(tmp_path, True, "127.0.0.2") as (endpoint, server):
        os.chown(endpoint, 4712, -1)
        _top(tmp_path)
        assert server.asked == []
        os.chown(endpoint, 0, -1)
        _top(tmp_path)
        assert server.asked
