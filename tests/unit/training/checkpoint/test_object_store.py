"""The files of a run directory in the commits of a bucket, over a store in memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from lockstep.training.checkpoint.object_store import ObjectStore

pytestmark = pytest.mark.promise("object-stores")
SENT = ("run.yaml", "events.jsonl", "time.jsonl", "status.json", "metrics/rank-00000.prom")


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    found = MemoryStore()
    monkeypatch.setattr("obstore.store.from_url", lambda *_, **__: found)
    return found


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    for name in SENT:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(os.urandom(50) + b"\n")
    return folder


def acquired(directory: Path) -> ObjectStore:
    directory.mkdir(exist_ok=True)
    objects = ObjectStore("s3://bucket/run")
    objects.check(directory, False)
    objects.acquire(False, print)
    return objects


def content(directory: Path) -> dict[str, bytes]:
    paths = (path for path in directory.rglob("*") if path.is_file() and path.name != "bucket.json")
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def test_another_disk_gets_what_was_committed_and_nothing_else_is_sent(run: Path, tmp_path: Path) -> None:
    expected = content(run)
    (tmp_path / "secret").write_text("of somebody else")
    (run / "metrics/rank-00001.prom").symlink_to(tmp_path / "secret")
    for name in ("hang.jsonl", "report.html", "STOP"):
        (run / name).write_text("of this node")
    acquired(run).commit(None)
    acquired(tmp_path / "other")
    assert content(tmp_path / "other") == expected


def test_only_what_has_changed_is_sent_again(run: Path) -> None:
    objects = acquired(run)
    objects.commit(None)
    before = {*objects.keys()}
    assert len(before) == 1 + len(SENT)
    with (run / "events.jsonl").open("ab") as file:
        file.write(b"more\n")
    objects.commit(None)
    assert len(before - {*objects.keys()}) == len({*objects.keys()} - before) == 1


def test_a_disk_that_is_behind_gets_all_and_one_that_is_ahead_keeps_what_it_has(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    acquired(run).commit(None)
    with (run / "events.jsonl").open("ab") as file:
        file.write(b"not committed before the kill\n")
    before = content(run)
    acquired(run)  # it comes back on the same node
    assert content(run) == before
    goes_on = acquired(other)
    with (other / "events.jsonl").open("ab") as file:
        file.write(b"the second attempt\n")
    (other / "status.json").write_bytes(b'{"attempt": 2}')
    goes_on.commit(None)
    acquired(run)
    assert content(run) == content(other)


def test_a_disk_without_settings_commits_nothing(run: Path) -> None:
    objects = acquired(run)
    (run / "run.yaml").unlink()
    with pytest.raises(OSError, match="run.yaml cannot be read"):
        objects.commit(None)
    assert len(objects.keys()) == 1
