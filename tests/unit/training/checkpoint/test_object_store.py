"""The files of a run directory in the commits of a bucket, over a store in memory."""

from __future__ import annotations

import asyncio
import io
import os
import threading
import zipfile
from pathlib import Path
from typing import Any

import obstore
import pytest
import torch
from obstore.exceptions import GenericError, PreconditionError
from obstore.store import MemoryStore

from lockstep.training.checkpoint.object_store import Head, ObjectStore
from lockstep.training.checkpoint.store import Writer
from tests.product import UserError

pytestmark = pytest.mark.promise("object-stores")
SENT = ("run.yaml", "events.jsonl", "time.jsonl", "status.json", "metrics/rank-00000.prom")


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    memory = MemoryStore()
    monkeypatch.setattr("obstore.store.from_url", lambda *_, **__: memory)
    return memory


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    for name in SENT:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{os.urandom(50).hex()}\n")
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
    for name in ("hang.jsonl", "report.html"):
        (run / name).write_text("of this node")
    acquired(run).commit(None)
    acquired(tmp_path / "other")
    assert content(tmp_path / "other") == expected


def test_a_commit_starts_no_thread_and_leaves_no_other_object(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader may fork meanwhile."""
    objects = acquired(run)
    monkeypatch.delattr(threading.Thread, "start")
    for _ in range(2):
        objects.commit(None)
        assert len(objects.keys()) == 2


def test_a_disk_without_settings_commits_nothing(run: Path) -> None:
    objects = acquired(run)
    (run / "run.yaml").unlink()
    with pytest.raises(OSError, match=r"run\.yaml"):
        objects.commit(None)
    assert len(objects.keys()) == 1


@pytest.mark.parametrize("done", [True, False])
def test_the_head_shows_whether_a_swap_without_an_answer_was_done(
    done: bool, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects, put = acquired(run), obstore.put

    def lost(store: Any, key: str, *content: Any, **options: Any) -> None:
        if done or key != "head":
            put(store, key, *content, **options)
        if key == "head":
            raise GenericError("connection reset")

    monkeypatch.setattr(obstore, "put", lost)
    if done:
        objects.commit(None)
        assert len(objects.keys()) == 2
    else:
        with pytest.raises(OSError, match="connection reset"):
            objects.commit(None)


def test_a_store_that_refuses_its_own_tag_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    acquired(run)

    def refused(*_: Any, **__: Any) -> None:
        raise PreconditionError("If-Match")

    monkeypatch.setattr(obstore, "put", refused)
    with pytest.raises(UserError, match="the store refuses the tag of the head"):
        acquired(run)


@pytest.mark.parametrize("name", ["../events.jsonl", "/etc/passwd", "checkpoints/x", "events.jsonl/x", "hang.jsonl"])
def test_names_of_other_files_are_not_written(name: str, run: Path, tmp_path: Path) -> None:
    objects = acquired(run)
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr(name, b"of another program")
    head = Head(run="0" * 32, holder="a" * 32, commit="c" * 32, run_yaml="{}", archive="files.zip")
    objects.put("files.zip", data.getvalue())
    objects.put("head", head.text())
    (tmp_path / "copy").mkdir()
    ObjectStore("s3://bucket/run").download(tmp_path / "copy", print)
    assert content(tmp_path / "copy") == {"run.yaml": b"{}"}


def test_an_event_loop_that_runs_is_not_in_the_way(run: Path, tmp_path: Path) -> None:
    """As in Jupyter."""
    acquired(run).commit(None)

    async def cell() -> None:
        ObjectStore("s3://bucket/run").download(tmp_path / "copy", print)

    (tmp_path / "copy").mkdir()
    asyncio.run(cell())
    assert content(tmp_path / "copy") == content(run)


def checkpoint(directory: Path, step: int) -> Path:
    Writer(directory / "checkpoints", 9, False).save(step, {"w": torch.full((4,), float(step))}).result()
    return directory / f"checkpoints/step-{step:08d}"


@pytest.mark.parametrize("file", ["state.safetensors", "state.json", "manifest.json", "files.zip"])
@pytest.mark.parametrize("cut", [True, False])
def test_what_is_damaged_on_its_way_is_read_again(
    cut: bool, file: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a start resumes from an older checkpoint, and removes the newest one, which is good."""
    objects, get = acquired(run), obstore.get_range
    objects.commit(checkpoint(run, 3))
    damaged = list[str]()

    def once(store: Any, key: str, **options: Any) -> Any:
        data = bytes(get(store, key, **options))
        if key.endswith(file) and not damaged:
            damaged.append(key)
            data = data[: len(data) // 2] if cut else data[:-1] + bytes([data[-1] ^ 1])
        return data

    monkeypatch.setattr(obstore, "get_range", once)
    warnings = list[str]()
    reader = ObjectStore("s3://bucket/run")
    (tmp_path / "other").mkdir()
    reader.check(tmp_path / "other", False)
    newest = reader.acquire(False, warnings.append)
    assert len(damaged) == 1 and newest is not None and newest.name == "step-00000003" and not warnings
    assert content(tmp_path / "other") == content(run)


def test_of_two_runs_that_begin_at_once_in_one_place_the_later_one_is_refused(run: Path, tmp_path: Path) -> None:
    """The later run would resume from the first run's checkpoint, under other settings."""
    (tmp_path / "other").mkdir()
    later = ObjectStore("s3://bucket/run")
    later.check(tmp_path / "other", "word")
    acquired(run).commit(checkpoint(run, 3))
    with pytest.raises(UserError, match="another run"):
        later.acquire("word", print)
    assert not (tmp_path / "other/checkpoints").exists()


def test_a_commit_during_a_download_is_no_damage(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects, get = acquired(run), obstore.get_range
    objects.commit(checkpoint(run, 3))

    def committing(store: Any, key: str, **options: Any) -> Any:
        if "step-00000003" in key and not (run / "checkpoints/step-00000006").exists():
            objects.commit(checkpoint(run, 6))
        return get(store, key, **options)

    monkeypatch.setattr(obstore, "get_range", committing)
    warnings = list[str]()
    (tmp_path / "copy").mkdir()
    ObjectStore("s3://bucket/run").download(tmp_path / "copy", warnings.append)
    assert not warnings and [path.name for path in (tmp_path / "copy/checkpoints").iterdir()] == ["step-00000006"]


def test_an_archive_that_would_fill_the_memory_is_not_unpacked(run: Path, tmp_path: Path) -> None:
    objects, warnings, data = acquired(run), list[str](), io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("events.jsonl", bytes(1 << 20))
    objects.put("files.zip", data.getvalue())
    objects.put("head", Head(run="0" * 32, holder="a" * 32, commit="c" * 32, run_yaml="{}", archive="files.zip").text())
    (tmp_path / "copy").mkdir()
    ObjectStore("s3://bucket/run").download(tmp_path / "copy", warnings.append)
    assert len(warnings) == 1 and "compressed" in warnings[0] and content(tmp_path / "copy") == {"run.yaml": b"{}"}
