"""A run as a command is given it by its URL, over a store in memory."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from lockstep.training.bucket import HEAD, Bucket, Found, Head
from lockstep.training.observe.mirror import Mirror
from lockstep.training.run.opened import opened

pytestmark = pytest.mark.promise("object-stores")
FIRST = Head(run="0" * 32, holder="a" * 32, commit="c" * 32)
SECOND = FIRST.model_copy(update={"holder": "b" * 32, "before": None})


def test_each_look_shows_what_is_there_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another attempt takes the run over between the two things that a look asks for."""
    store, run = MemoryStore(), tmp_path / "run"
    monkeypatch.setattr("obstore.store.from_url", lambda *_, **__: store)
    bucket, shown = Bucket("s3://bucket/run"), opened("s3://bucket/run")
    bucket.put(HEAD, FIRST.text())
    (run / "metrics").mkdir(parents=True)

    def sent(head: Head, **files: str) -> None:
        for name, text in files.items():
            (run / f"metrics/{name.replace('_', '-')}.prom").write_text(text)
        Mirror(bucket, lambda: head, run, lambda: math.inf).send()

    def seen() -> dict[str, str]:
        shown.look()
        return {path.name: path.read_text() for path in (shown.path / "metrics").iterdir()}

    sent(FIRST, rank_00000="a", rank_00001="b")
    assert seen() == {"rank-00000.prom": "a", "rank-00001.prom": "b"}
    (run / "metrics/rank-00000.prom").unlink()
    sent(FIRST, rank_00001="c")
    assert seen() == {"rank-00001.prom": "c"}
    read, taken = Bucket.read_head, list[Head]()

    def late(self: Bucket) -> Found | None:
        found = read(self)
        if not taken:
            taken.append(SECOND)
            bucket.remove(FIRST.snapshots)
            bucket.put(HEAD, SECOND.text())
            sent(SECOND, rank_00001="d")
        return found

    monkeypatch.setattr(Bucket, "read_head", late)
    assert seen() == {"rank-00001.prom": "d"}
