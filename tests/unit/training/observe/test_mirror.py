"""The copy of a run directory in a bucket, over a store in memory."""

from __future__ import annotations

import json
import math
import os
import threading
import zlib
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from lockstep.training.bucket import Bucket, Head
from lockstep.training.observe.mirror import PART, Damaged, Mirror, Snapshot, listed
from tests.processes import poll

pytestmark = pytest.mark.promise("object-stores")
FIRST = Head(run="0" * 32, holder="a" * 32, commit="c" * 32)
SECOND = FIRST.model_copy(update={"holder": "b" * 32, "before": FIRST.holder})


def mirror(bucket: Bucket, head: Head, directory: Path) -> Mirror:
    return Mirror(bucket, lambda: head, directory, lambda: math.inf)


def content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def packed(name: str, rest: int) -> bytes:
    """A snapshot of one file that has so many bytes, by what it says of itself; there are three."""
    table = {"format": 1, "files": {name: {"parts": [], "rest": rest, "bytes": rest, "time": 1}}}
    return zlib.compress(json.dumps(table).encode() + b"\nabc")


@pytest.fixture
def bucket() -> Bucket:
    found = Bucket("s3://bucket/run")
    found._store = MemoryStore()
    return found


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Files of several parts, and of none."""
    folder = tmp_path / "run"
    for name, data in {
        "events.jsonl": os.urandom(2 * PART + 5),
        "time.jsonl": b'{"attempt": 1}\n',
        "status.json": b'{"attempt": 1}',
        "metrics/rank-00000.prom": "äö".encode(),
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def test_what_has_not_changed_is_sent_once_and_nothing_else_is_sent(bucket: Bucket, run: Path, tmp_path: Path) -> None:
    expected = content(run)
    (run / "checkpoints").mkdir()
    (run / "checkpoints/state.safetensors").write_text("large")
    (tmp_path / "secret").write_text("of somebody else")
    (run / "metrics/rank-00001.prom").symlink_to(tmp_path / "secret")
    sends = mirror(bucket, FIRST, run)
    sends.send()
    parts = bucket.keys().keys() - {FIRST.snapshots[0]}
    assert len(parts) == 2
    with (run / "events.jsonl").open("ab") as file:
        file.write(more := os.urandom(PART))
    sends.send()
    assert len(bucket.keys()) == 1 + len(parts) + 1 and parts < bucket.keys().keys()
    Snapshot.of(bucket, FIRST).restore(tmp_path)
    expected["events.jsonl"] += more
    assert {name: data for name, data in content(tmp_path).items() if name in expected} == expected
    times = [(folder / "metrics/rank-00000.prom").stat().st_mtime_ns for folder in (run, tmp_path)]
    assert times[0] == times[1]  # when the rank has told it
    assert not (tmp_path / "metrics/rank-00001.prom").exists() and not (tmp_path / "checkpoints").exists()


def test_a_file_that_goes_meanwhile_takes_no_other_one_along(run: Path) -> None:
    done = threading.Event()

    def come_and_go() -> None:
        while not done.is_set():
            for number in range(9):
                (run / f"metrics/rank-{number + 1:05d}.prom").touch()
                (run / f"metrics/rank-{number + 1:05d}.prom").unlink()

    expected = set(content(run))
    (thread := threading.Thread(target=come_and_go)).start()
    try:
        assert all(expected <= listed(run).keys() for _ in range(1500))
    finally:
        done.set()
        thread.join(30)


def test_a_disk_that_is_behind_gets_all_and_one_that_is_ahead_keeps_what_it_has(
    bucket: Bucket, run: Path, tmp_path: Path
) -> None:
    other, before = tmp_path / "other", content(run)
    other.mkdir()
    for name in ("run.yaml", "hang.jsonl"):  # of that attempt alone
        (run / name).write_text("{}")
    mirror(bucket, FIRST, run).send()
    goes_on = mirror(bucket, SECOND, other)
    goes_on.bring()
    assert content(other) == before
    for name in ("run.yaml", "hang.jsonl"):
        (run / name).unlink()
    with (run / "events.jsonl").open("ab") as file:
        file.write(b"not sent before the kill\n")
    mirror(bucket, SECOND, run).bring()  # it comes back on the same node
    assert (run / "events.jsonl").read_bytes().endswith(b"not sent before the kill\n")
    with (other / "events.jsonl").open("ab") as file:
        file.write(b"the second attempt\n")
    (other / "status.json").write_bytes(b'{"attempt": 2}')
    goes_on.send()
    mirror(bucket, SECOND, run).bring()
    assert content(run) == content(other)
    with (run / "events.jsonl").open("r+b") as file:  # it differs in the middle alone
        file.write(b"of another run")
    mirror(bucket, SECOND, run).bring()
    assert content(run) == content(other)


def test_it_is_sent_at_once_and_then_again_and_again(
    bucket: Bucket, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for head, seconds in ((FIRST, 60.0), (SECOND, 0.05)):
        monkeypatch.setattr("lockstep.training.observe.mirror.SECONDS", seconds)
        sends = mirror(bucket, head, run)
        sends.begin()
        poll(lambda: bucket.keys().get(head.snapshots[0]), 30)
        if seconds < 1:
            (run / "status.json").write_text("{}")
            poll(lambda: Snapshot.of(bucket, SECOND).files["status.json"].bytes == 2, 30)
        sends.close()


@pytest.mark.parametrize(("bound", "left"), [(0.1, math.inf), (60.0, 0.1)])
def test_a_bucket_that_does_not_answer_keeps_the_end_no_longer_than_a_bound(
    bound: float,
    left: float,
    bucket: Bucket,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Its own, and the rest of the grace. It is said."""
    hangs, answers = threading.Event(), list[bool]()
    monkeypatch.setattr("lockstep.training.observe.mirror.LAST_SECONDS", bound)
    monkeypatch.setattr(bucket, "put", lambda *_: answers.append(hangs.wait(30)))
    sends = Mirror(bucket, lambda: FIRST, run, lambda: left)
    sends.begin()
    sends.close()
    assert not answers and capfd.readouterr().err.count("the run directory could not be sent within") == 1
    hangs.set()
    sends._thread.join(30)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no zlib",
        zlib.compress(b"x" * (65 << 20)),
        zlib.compress(b"{" * 100_000),
        packed("../events.jsonl", 3),
        packed("/etc/passwd", 3),
        packed("checkpoints/x", 3),
        packed("status.json", 2),
        packed("time.jsonl", 4),
    ],
)
def test_a_snapshot_of_somebody_else_is_refused_and_a_run_goes_on_without(
    data: bytes, bucket: Bucket, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(run)
    bucket.put(FIRST.snapshots[0], data)
    with pytest.raises(Damaged, match="is not what a run writes"):
        Snapshot.of(bucket, FIRST)
    mirror(bucket, SECOND, run).bring()
    assert content(run) == before and "earlier attempts have written down is lost" in capsys.readouterr().err


def test_a_damaged_part_is_named(bucket: Bucket, run: Path, tmp_path: Path) -> None:
    mirror(bucket, FIRST, run).send()
    (part, *_) = sorted(bucket.keys().keys() - {FIRST.snapshots[0]})
    bucket.put(part, b"x")
    with pytest.raises(Damaged, match=part):
        Snapshot.of(bucket, FIRST).restore(tmp_path)


def test_what_is_damaged_on_its_way_is_read_again(
    bucket: Bucket, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror(bucket, FIRST, run).send()
    read, damaged, other = bucket.read, set[str](), tmp_path / "other"
    other.mkdir()

    def once(key: str, limit: int) -> tuple[bytes, object]:
        data, tag = read(key, limit)
        if key in damaged:
            return data, tag
        damaged.add(key)
        return data[:-1], tag

    monkeypatch.setattr(bucket, "read", once)
    Snapshot.of(bucket, FIRST).restore(other)
    assert content(other) == content(run) and len(damaged) == 1 + 2
