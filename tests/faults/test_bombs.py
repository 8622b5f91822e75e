"""Small files that would fill the memory, and things behind a file's name that never end: refused within seconds."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import json
import os
import socket
import struct
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lockstep.jobs.cli import ranks
from lockstep.training import contract, files
from lockstep.training.checkpoint import store, weights
from lockstep.training.checkpoint.store import CorruptCheckpoint
from lockstep.training.config import Data, settings
from lockstep.training.contract import UserError
from lockstep.training.data import sources
from lockstep.training.data.sources.fashion_mnist import _split, read_idx
from lockstep.training.observe.report import record
from tests.faults.test_hostile_files import resealed
from tests.ranks import training
from tests.runs import Job

GROWTH = 96 << 20
"""Bytes that a refused file may cost."""


@contextlib.contextmanager
def cheap(seconds: float = 20.0) -> Iterator[None]:
    """The most memory that this process has had grows by less than `GROWTH`, and it takes no longer than `seconds`."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, began = _peak(), time.monotonic()
    yield
    assert _peak() - before < GROWTH, f"{(_peak() - before) >> 20} MiB more"
    assert time.monotonic() - began < seconds


def _peak() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


def test_a_packed_label_file_that_says_it_holds_a_gigabyte(tmp_path: Path) -> None:
    images, labels = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
    (tmp_path / images).write_bytes(struct.pack(">BBBBiii", 0, 0, 8, 3, 2, 4, 4) + bytes(32))
    for size, why in ((1 << 30, "at most"), (1 << 27, "there are 2 images")):
        with gzip.open(tmp_path / f"{labels}.gz", "wb", 1) as file:
            file.write(struct.pack(">BBBBi", 0, 0, 8, 1, size) + bytes(1 << 27))
        with cheap(), pytest.raises(UserError, match=why):
            _split(tmp_path, images, labels)


def test_packed_weights(tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    torch.save({"w": torch.zeros(1 << 26)}, tmp_path / "plain.pth")
    with (
        zipfile.ZipFile(tmp_path / "plain.pth") as plain,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed,
    ):
        for entry in plain.infolist():
            packed.writestr(entry.filename, plain.read(entry))
    (tmp_path / "plain.pth").unlink()
    assert path.stat().st_size < 2 << 20
    with cheap(), pytest.raises(UserError, match="is compressed"):
        weights.read(path)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x40\x00\x85R.",  # 1 GiB
        b"\x80\x02ctorch\nTensor\n](K\x01K\x01eq\x00"
        + b"".join(b"0](h%ch%ceq%c" % (n, n, n + 1) for n in range(28))
        + b"\x85R.",
    ],
    ids=["bytearray", "lists in lists"],
)
def test_a_pickle_that_asks_for_a_gigabyte(tmp_path: Path, pickled: bytes, zipped: bool) -> None:
    path = tmp_path / "w.pth"
    torch.save({"w": torch.zeros(1)}, path, _use_new_zipfile_serialization=zipped)
    if zipped:
        with zipfile.ZipFile(path) as plain, zipfile.ZipFile(tmp_path / "bomb.pth", "w") as bomb:
            for entry in plain.infolist():
                bomb.writestr(entry.filename, pickled if entry.filename.endswith("data.pkl") else plain.read(entry))
        path = tmp_path / "bomb.pth"
    else:
        protocol = path.read_bytes()
        path.write_bytes(protocol[: protocol.index(b"ccollections")] + pickled)
    with cheap(), pytest.raises(UserError, match="not a file of plain weights"):
        weights.read(path)


def _npy(shape: tuple[int, ...], descr: str) -> bytes:
    head = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head


@pytest.mark.parametrize(("samples", "labels"), [((1 << 25, 1), 1 << 25), ((2, 1 << 28), 2)])
def test_a_packed_npz_that_fills_the_memory(tmp_path: Path, samples: tuple[int, int], labels: int) -> None:
    with zipfile.ZipFile(tmp_path / "train.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed:
        for name, head, size in (
            ("samples", _npy(samples, "<f2"), 2 * samples[0] * samples[1]), ("labels", _npy((labels,), "<i8"), 8 * labels)
        ):  # fmt: skip
            with packed.open(f"{name}.npy", "w", force_zip64=True) as member:
                member.write(head)
                for _ in range(0, size, 1 << 24):
                    member.write(bytes(min(size, 1 << 24)))
    with cheap(), pytest.raises(UserError, match=r"train.npz.* at most \d+ are"):
        sources.stream(Data(source="arrays", root=str(tmp_path))).gathered()


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2 << 30)


@pytest.mark.parametrize(
    "put", [_sparse, os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to(path.name)],
    ids=["2 GiB", "FIFO", "/dev/zero", "a link to itself"],
)  # fmt: skip
def test_behind_every_file_name(tmp_path: Path, put: Callable[[Path], None]) -> None:
    """What reads a file that people or other processes write."""
    run = tmp_path / "run"
    run.mkdir()

    def at(name: str) -> Path:
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        put(path)
        return path

    with cheap():
        recipe = at("recipe.yaml")
        with pytest.raises(UserError, match=r"recipe.yaml: (it has|it is not a regular file|Too many levels)"):
            settings.read_yaml(recipe)
        assert files.read_json(at("ended.json")) is None
        with pytest.raises(UserError):
            weights.read(at("w.pth"))
        with pytest.raises(CorruptCheckpoint):
            store.verify(at("checkpoints/step-00000001/manifest.json").parent)
        with pytest.raises(UserError):
            read_idx(run, at("labels").name, 1)
        for name in (contract.STATUS_FILE, contract.SUMMARY_FILE, contract.EVENTS_FILE):
            at(name)
        at(f"{contract.METRICS}/rank-00000.prom")
        at(f"{contract.ENDPOINTS}/rank-00000.json")
        (run / contract.RUN_FILE).write_text("config: {}\n")
        found = record.read(run)
        assert (found.status, found.summary, found.events, found.ranks) == ({}, {}, [], [])
        assert ranks.Reader(run).read() == {}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("!!bool x", "not valid YAML"),
        ("!!timestamp x", "not valid YAML"),
        ("!!int x", "not valid YAML"),
        ("0x" + "f" * 5000, "5002 characters"),
        ("1" + ":1" * 200_000, "400001 characters"),
    ],
)
def test_a_number_or_a_tag_that_yaml_chokes_on(text: str, what: str, tmp_path: Path) -> None:
    with cheap(5), pytest.raises(UserError, match=what):
        settings.parse_yaml(f"epochs: {text}", "here")
    answer = training("run", "smoke", "--run-dir", str(tmp_path / "run"), "--set", f"epochs={text[:6000]}")
    assert answer.code == 2 and len(answer.output.splitlines()) == 1, answer.output
    assert not (tmp_path / "run").exists()


class _Endless(http.server.BaseHTTPRequestHandler):
    """/metrics of a rank that sends on for ever, or sends elsewhere."""

    server: _Stranger

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.server.redirects:
            self.send_response(302)
            self.send_header("Location", "/elsewhere")
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(b"# a line that is followed by another\n")
                time.sleep(0.01)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


class _Stranger(http.server.ThreadingHTTPServer):
    """Keeps the paths that it was asked for."""

    daemon_threads = True

    def __init__(self, redirects: bool) -> None:
        self.redirects = redirects
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), _Endless)


@pytest.mark.parametrize("redirects", [False, True], ids=["endless", "redirect"])
def test_top_asks_no_longer_and_nowhere_else(tmp_path: Path, redirects: bool) -> None:
    server = _Stranger(redirects)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        _endpoint(tmp_path, "127.0.0.1", server.server_port)
        with cheap(ranks.TIMEOUT * 5):
            assert ranks.Reader(tmp_path).read() == {}
        assert server.asked == ["/metrics"]
    finally:
        server.shutdown()
        server.server_close()


def test_an_endpoint_of_somebody_else_names_no_other_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fetch(host: str, port: int, rank_id: object) -> str:
        asked.append(host)
        return ""

    monkeypatch.setattr(ranks, "_fetch", fetch)
    _endpoint(tmp_path, "node2", 1)
    ranks.Reader(tmp_path).read()
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    if os.getuid() == 0:
        os.chown(contract.endpoint_file(tmp_path, 0), 4712, -1)
    ranks.Reader(tmp_path).read()
    _endpoint(tmp_path, socket.gethostname(), 1)
    ranks.Reader(tmp_path).read()
    assert asked == ["node2", socket.gethostname()]


def _endpoint(run: Path, host: str, port: int) -> None:
    (run / contract.RUN_FILE).write_text("config: {}\n")
    path = contract.endpoint_file(run, 0)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"host": host, "port": port, "pid": 1}))


def test_a_state_of_many_megabytes(job: Job) -> None:
    """Sealed as it should be: what it costs is bounded before it is parsed."""
    job.ranks = 1
    assert job.go().code == 0
    newest = store.candidates(job.run_dir / contract.CHECKPOINTS)[0]
    resealed(newest, b'{"a": [' + b"[]," * (40 << 20) + b"[]]}")
    store.verify(newest)
    with cheap(60), pytest.raises(CorruptCheckpoint, match="at most"):
        store.load(newest)
