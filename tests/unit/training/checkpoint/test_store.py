"""Checkpoints on the disk: every bit comes back, damage is detected, and a power cut or a kill leaves whole ones under their names."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.training import files
from lockstep.training.checkpoint import store
from lockstep.training.checkpoint.store import CorruptCheckpoint, Writer, load, newest_verified, verify
from tests import product


def _state(step: int) -> dict[str, Any]:
    return {
        "shared": {"model": {"w": torch.full((5, 3), float(step)), "b": torch.zeros(0)}, "cursor": [step, 1]},
        "ranks": [{"rng": (3, tuple(range(9)), None), 0: torch.tensor(True), "x": torch.ones(2, dtype=torch.bfloat16)}],
    }


@pytest.fixture
def writer(tmp_path: Path) -> Any:
    instance = Writer(tmp_path / "checkpoints", keep=2, keep_best=True)
    yield instance
    instance.wait()


def test_a_save_starts_and_ends_no_thread(writer: Writer) -> None:
    """A process that a loader forks meanwhile could hang for ever (CPython 3.11)."""
    before = set(threading.enumerate())
    saving = {
        thread for thread in before if thread.name.startswith("checkpoint")
    }  # others may end: those of another test
    samples = []
    for step in (1, 2):
        pending = writer.save(step, _state(step))
        while not pending.done():
            samples.append(set(threading.enumerate()))
        pending.result()
    assert (
        saving and len(samples) > 2 and all(saving <= each <= before for each in [*samples, set(threading.enumerate())])
    )


def test_a_disk_that_hangs_keeps_no_other_run_of_the_process_waiting(
    writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, forced = threading.Event(), files.fsync

    def fsync(descriptor: int) -> None:
        if str(tmp_path / "gone") in os.readlink(f"/proc/self/fd/{descriptor}"):
            assert answers.wait(60)
        forced(descriptor)

    monkeypatch.setattr(files, "fsync", fsync)
    hanging = Writer(tmp_path / "gone", keep=2, keep_best=False).save(1, _state(1))
    following = Writer(tmp_path / "there", keep=2, keep_best=False)
    assert following.save(2, _state(2)).result(30).path.exists() and not hanging.done()
    answers.set()
    hanging.result(30)


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


_leaves = (
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=5)
    | st.builds(
        lambda kind, shape: (torch.rand(shape) * 9).to(kind),
        st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3),
    )
)  # fmt: skip


trees = st.recursive(
    _leaves,
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(st.text(max_size=4) | st.integers(-9, 9), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(trees)
def test_every_tree_can_be_saved_and_read(tree: Any) -> None:
    """Keys may hold slashes, and two places of a tree may have the same text."""
    with tempfile.TemporaryDirectory() as folder:
        writer = Writer(Path(folder), keep=1, keep_best=False)
        assert same(load(writer.save(1, tree).result().path), tree)
        writer.wait()


@pytest.mark.promise("atomic-saves")
def test_older_checkpoints_are_removed_only_after_the_new_one_was_read_back(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        writer.save(step, _state(step)).result()

    def bad(path: Path) -> dict[str, Any]:
        raise CorruptCheckpoint("the disk lies")

    monkeypatch.setattr(store, "verify", bad)
    with pytest.raises(OSError, match="the disk lies"):
        writer.save(3, _state(3)).result()
    assert len(store.candidates(writer.directory)) == 3


DEEP = "[" * 100_000 + "]" * 100_000

WORDS: list[dict[str, Any]] = [
    {"files": []},
    {"files": {"state.json": 1, "state.safetensors": 2}},
    {"format": True},
    {"step": {}},
    {"files": {"state.json": {"bytes": 1e999, "sha256": "x"}, "state.safetensors": {"bytes": 1, "sha256": "x"}}},
]


@pytest.mark.promise("hostile-files")
@pytest.mark.parametrize("content", ["null", '{"sha256": {}}', DEEP, *WORDS], ids=lambda content: str(content)[:20])
def test_a_manifest_of_another_kind_under_its_own_seal(writer: Writer, content: Any) -> None:
    """As a program that is not ours, or a later version of it, might write it."""
    for step in (1, 2):
        path = writer.save(step, _state(step)).result().path / "manifest.json"
    if isinstance(content, dict):
        manifest = {key: value for key, value in json.loads(path.read_text()).items() if key != "sha256"} | content
        content = json.dumps({**manifest, "sha256": product.sealed(manifest)})
    path.write_text(content)
    with pytest.raises(CorruptCheckpoint, match=r"manifest\.json"):
        verify(path.parent)
    newest = newest_verified(writer.directory)
    assert newest is not None and store.step_of(newest) == 1


@pytest.mark.promise("atomic-saves")
def test_every_file_and_folder_is_forced_to_the_disk_before_the_name_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls are real. `unsafe` holds the paths whose data is in the kernel's memory only."""
    unsafe: set[Path] = set()
    renamed = []

    def noting(name: str, note: Callable[..., None]) -> None:
        real = getattr(files, name)

        def call(*args: Any) -> None:
            real(*args)
            note(*args)

        monkeypatch.setattr(files, name, call)

    def open_file(descriptor: int) -> Path:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}"))

    def written(descriptor: int, data: Any) -> None:
        unsafe.update((open_file(descriptor), open_file(descriptor).parent))  # its bytes, and that it is there

    def moved(source: Path, target: Path) -> None:
        source, target = (path.parent.resolve() / path.name for path in (source, target))  # it writes by a descriptor
        if target.name.startswith("step-"):
            renamed.append(target.name)
            assert not [path for path in unsafe if source in (path, path.parent)], "the name came before the bytes"
            unsafe.add(target.parent)

    noting("write_all", written)
    noting("fsync", lambda descriptor: unsafe.discard(open_file(descriptor)))
    noting("rename", moved)
    folder = (tmp_path / "checkpoints").resolve()
    writer = Writer(folder, keep=1, keep_best=False)
    for step in (1, 2, 2):
        writer.save(step, _state(step)).result()
        assert not unsafe, "a save that is reported as done is on the disk"
    writer.wait()
    assert renamed == ["step-00000001", "step-00000002", "step-00000002"]
