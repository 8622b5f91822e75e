"""Checkpoints on the disk: every bit comes back, damage is found, and a power cut or a kill finds whole ones under their names."""

from __future__ import annotations

import errno
import json
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given

from lockstep.training import files
from lockstep.training.checkpoint import store
from lockstep.training.checkpoint.store import CorruptCheckpoint, Writer, load, newest_verified, verify
from tests import product
from tests.unit.trees import same, trees


def _state(step: int) -> dict[str, Any]:
    return {
        "shared": {"model": {"w": torch.full((5, 3), float(step)), "b": torch.zeros(0)}, "cursor": [step, 1]},
        "ranks": [{"rng": (3, tuple(range(9)), None), 0: torch.tensor(True), "x": torch.ones(2, dtype=torch.bfloat16)}],
    }


@pytest.fixture
def writer(tmp_path: Path) -> Any:
    made = Writer(tmp_path / "checkpoints", keep=2, keep_best=True)
    yield made
    made.wait()


def test_a_save_starts_and_ends_no_thread(writer: Writer) -> None:
    """A process that a loader forks meanwhile could hang for ever (CPython 3.11)."""
    before = {thread.ident for thread in threading.enumerate()}
    for step in (1, 2):
        seen = []
        pending = writer.save(step, _state(step))
        while not pending.done():
            seen.append({thread.ident for thread in threading.enumerate()})
        assert seen and all(each == before for each in seen), "while it is written"
        pending.result()
    assert {thread.ident for thread in threading.enumerate()} == before


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


@given(trees)
def test_every_tree_can_be_saved_and_read(tree: Any) -> None:
    """Whatever its keys make of the tensors' names: a key may hold a slash, and two places of a tree the same text."""
    with tempfile.TemporaryDirectory() as folder:
        writer = Writer(Path(folder), keep=1, keep_best=False)
        assert same(load(writer.save(1, tree).result().path), tree)
        writer.wait()


@pytest.mark.promise("open-format")
def test_each_tensor_has_a_name_that_says_what_it_is(writer: Writer) -> None:
    one = torch.ones(1)
    kept = {"conv.weight": {"momentum_buffer": one, "step": 3}, "a/b": {"x": one}, "a": {"b/x": one}}
    rank = {"rng": {"torch": one}, "buffers": {"n.mean": one}, "sync": {"errors": {0: one, -1: one}, "rng": ["M", one]}}
    weight = {"conv.weight": one}
    shared = {"model": weight, "average": weight, "optimizer": {"state": kept}, "x": (1, [one])}
    tree = {"shared": shared, "ranks": [rank, {"\ud800": one}], "": one, "__metadata__": one}
    path = writer.save(1, tree).result().path
    with safetensors.safe_open(path / store.TENSORS, framework="pt") as file:
        assert sorted(file.keys()) == sorted([
            "model/conv.weight", "average/conv.weight", "optim/conv.weight/momentum_buffer", "optim/a/b/x", "optim/a/b/x~",
            "x/1/0", "ranks/0/rng/torch", "ranks/0/buffers/n.mean", "ranks/0/sync/errors/0", "ranks/0/sync/errors/-1",
            "ranks/0/sync/rng/1", "ranks/1/?", "~", "__metadata__~",
        ])  # fmt: skip
        assert file.metadata() == {"format": "pt"}
    assert list(load(path)["ranks"][1]) == ["\ud800"]


def test_each_tensor_lies_at_a_multiple_of_the_size_of_its_elements(writer: Writer) -> None:
    tensors = [
        torch.ones(3, dtype=getattr(torch, kind)) for kind in ("uint8", "float64", "bool", "bfloat16", "float32")
    ]
    data = (writer.save(1, tensors).result().path / store.TENSORS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    for number, tensor in enumerate(tensors):
        assert header[str(number)]["data_offsets"][0] % tensor.element_size() == 0


@pytest.mark.parametrize("limit", ["MAX_STATE_BYTES", "MAX_HEADER_BYTES"])
def test_what_could_not_be_read_back_is_not_written(
    writer: Writer, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.save(1, _state(1)).result()
    monkeypatch.setattr(store, limit, 100)
    with pytest.raises(OSError, match="at most 100 are read"):
        writer.save(2, _state(2)).result()
    assert [path.name for path in writer.directory.iterdir()] == ["step-00000001"]


def test_a_checkpoint_gives_back_every_bit(writer: Writer) -> None:
    state = _state(7)
    path = writer.save(7, state).result().path
    state["shared"]["model"]["w"].zero_()  # the live tensors go on; the copy was taken at once
    assert same(load(path), _state(7))
    assert path.name == "step-00000007" and verify(path)["step"] == 7


def test_newest_and_best_are_kept(writer: Writer) -> None:
    for step, score in ((1, 0.1), (2, 0.9), (3, 0.3), (4, None), (5, 0.2)):
        writer.save(step, _state(step), score).result()
    assert [store.step_of(path) for path in store.candidates(writer.directory)] == [5, 4, 2]


@pytest.mark.promise("damaged-checkpoints")
@pytest.mark.parametrize("name", ["state.json", "state.safetensors", "manifest.json"])
def test_any_damage_is_found_and_the_one_before_is_used(writer: Writer, name: str) -> None:
    writer.save(1, _state(1)).result()
    path = writer.save(2, _state(2)).result().path / name
    data = path.read_bytes()
    flipped = [data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :] for at in (0, len(data) // 2, len(data) - 2)]
    for damaged in (*flipped, data[: len(data) // 2], b"", None):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        warnings: list[str] = []
        found = newest_verified(writer.directory, warnings.append)
        assert found is not None and store.step_of(found) == 1 and [name in warning for warning in warnings] == [True]


@pytest.mark.promise("atomic-saves")
def test_older_ones_go_only_after_the_new_one_was_read_back(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        writer.save(step, _state(step)).result()

    def bad(path: Path) -> dict[str, Any]:
        raise CorruptCheckpoint("the disk lies")

    monkeypatch.setattr(store, "verify", bad)
    with pytest.raises(OSError, match="the disk lies"):
        writer.save(3, _state(3)).result()
    assert len(store.candidates(writer.directory)) == 3


def test_a_step_that_is_saved_again_replaces_the_old_one_and_keeps_its_score(writer: Writer) -> None:
    writer.save(1, _state(1), 0.5).result()
    path = writer.save(1, _state(9)).result().path
    assert same(load(path), _state(9)) and len(list(writer.directory.iterdir())) == 1
    assert verify(path)["score"] == 0.5


def test_a_replacement_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(tmp_path, keep=1, keep_best=False)
    writer.save(1, _state(1)).result()
    real, calls = files.rename, [0]

    def failing(source: Path, target: Path) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(source, target)

    monkeypatch.setattr(files, "rename", failing)
    with pytest.raises(OSError, match="Input/output"):
        writer.save(1, _state(9)).result()
    writer.wait()
    found = newest_verified(tmp_path)
    assert found is not None and same(load(found), _state(1))


DEEP = "[" * 100_000 + "]" * 100_000

WORDS: list[dict[str, Any]] = [
    {"files": None}, {"files": []}, {"files": {"state.json": 1, "state.safetensors": 2}}, {"format": []}, {"format": True}, {"step": {}},
    *({"files": {"state.json": {"bytes": size, "sha256": "x"}, "state.safetensors": {"bytes": 1, "sha256": "x"}}}
      for size in (1e999, None, "many")),
]  # fmt: skip


@pytest.mark.promise("hostile-files")
@pytest.mark.parametrize(
    "content", ["[]", "null", "{}", '{"sha256": {}}', DEEP, *WORDS], ids=lambda content: str(content)[:20]
)
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
    found = newest_verified(writer.directory)
    assert found is not None and store.step_of(found) == 1


@pytest.mark.promise("atomic-saves")
def test_every_file_and_folder_is_forced_to_the_disk_before_the_name_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls are the real ones; what each of them leaves in the kernel's memory alone is kept count of."""
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


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_removal_that_is_cut_short_leaves_no_candidate(tmp_path: Path) -> None:
    """Killed at every single file of the old checkpoint that goes."""
    kill_at, survived = 1, False
    while not survived:
        folder = tmp_path / str(kill_at)
        first = Writer(folder, keep=2, keep_best=False)
        for step in (1, 2):
            first.save(step, _state(step)).result()
        first.wait()
        survived = _saves(folder, 3, kill_at)
        assert [store.step_of(path) for path in store.candidates(folder)] == [3, 2]
        for path in store.candidates(folder):
            store.verify(path)
        store.clean(folder)
        assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", "step-00000003"]
        kill_at += 1
    assert kill_at > 3, "an old checkpoint has three files"


def _saves(folder: Path, step: int, kill_at: int) -> bool:
    """Saves in a forked child that is killed where its n-th file would go. Whether it lived."""
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL)
        return status == 0
    try:
        real, gone = os.unlink, [0]

        def unlink(*args: Any, **kwargs: Any) -> None:
            gone[0] += 1
            if gone[0] == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            real(*args, **kwargs)

        os.unlink = unlink
        Writer(folder, keep=2, keep_best=False).save(step, _state(step)).result()
        os._exit(0)
    except BaseException:
        os._exit(99)
