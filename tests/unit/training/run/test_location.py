"""A run as a command is given it by its URL, over a store in memory."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore

from lockstep.training.bucket import HEAD, Bucket, Damaged, File, Head
from lockstep.training.contract import UserError
from lockstep.training.run.location import Location

pytestmark = pytest.mark.promise("object-stores")
FIRST = Head(run="0" * 32, holder="a" * 32, commit="c" * 32)
SECOND = FIRST.model_copy(update={"holder": "b" * 32, "commit": "d" * 32})


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    store = MemoryStore()
    monkeypatch.setattr("obstore.store.from_url", lambda *_, **__: store)
    return Bucket("s3://bucket/run")


def commit(bucket: Bucket, head: Head, **texts: str) -> Head:
    """Of metrics of ranks."""
    run_files = {}
    for name, text in texts.items():
        key = f"{head.holder}/{len(bucket.keys())}-run/metrics/{name.replace('_', '-')}.prom"
        digest = hashlib.sha256(text.encode()).hexdigest()
        run_files[key.partition("-run/")[2]] = File(key=key, sha256=digest, bytes=len(text))
        bucket.put(key, text.encode())
    head = head.model_copy(update={"run_files": run_files})
    bucket.put(HEAD, head.text())
    return head


def test_each_look_shows_the_last_commit(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another attempt commits between the two things that a look asks for."""
    shown = Location("s3://bucket/run")

    def seen() -> dict[str, str]:
        shown.look()
        return {path.name: path.read_text() for path in (shown.path / "metrics").iterdir()}

    commit(bucket, FIRST, rank_00000="a", rank_00001="b")
    assert seen() == {"rank-00000.prom": "a", "rank-00001.prom": "b"}
    first = commit(bucket, FIRST, rank_00001="c")
    assert seen() == {"rank-00001.prom": "c"}
    read, taken = Bucket.read_head, list[Head]()

    def late(self: Bucket) -> Any:
        found = read(self)
        if not taken:
            taken.append(commit(bucket, SECOND, rank_00001="d"))
            bucket.remove(first.keys)
        return found

    (shown.path / "metrics/rank-00001.prom").unlink()  # it is fetched again
    monkeypatch.setattr(Bucket, "read_head", late)
    assert seen() == {"rank-00001.prom": "d"}


@pytest.mark.parametrize("name", ["../events.jsonl", "/etc/passwd", "checkpoints/x", "events.jsonl/x", "hang.jsonl"])
def test_a_head_with_names_of_other_files_is_refused(name: str, bucket: Bucket) -> None:
    file = commit(bucket, FIRST, rank_00000="a").run_files["metrics/rank-00000.prom"]
    bucket.put(HEAD, FIRST.model_copy(update={"run_files": {name: file}}).text())
    with pytest.raises(UserError, match="is not what a run writes"):
        Location("s3://bucket/run").look()


def test_a_damaged_file_is_named(bucket: Bucket, tmp_path: Path) -> None:
    head = commit(bucket, FIRST, rank_00000="a")
    (key,) = head.keys
    bucket.put(key, b"x")
    with pytest.raises(Damaged, match=key):
        bucket.restore(head.run_files, tmp_path)
