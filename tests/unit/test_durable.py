"""What a power cut or a kill finds on the disk: whole checkpoints under their names, in every order of events."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.training import files
from lockstep.training.checkpoint import store
from lockstep.training.checkpoint.store import Writer


def _state(step: int) -> dict[str, Any]:
    return {"shared": {"w": torch.full((1000,), float(step))}, "ranks": [{"x": step}]}


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
