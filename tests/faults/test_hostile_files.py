"""Thousands of damaged or malformed files and texts: each is refused with one clean sentence, and none is run."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.training import config, files
from lockstep.training.__main__ import main
from lockstep.training.checkpoint import store, weights
from lockstep.training.checkpoint.store import CorruptCheckpoint, Writer
from lockstep.training.config import settings
from lockstep.training.contract import UserError
from lockstep.training.data import shards, sources
from lockstep.training.data.shards import Manifest, Samples
from lockstep.training.manifest import seal
from lockstep.training.observe import rundir
from tests.processes import ROOT, clean_env
from tests.ranks import training
from tests.runs import Job
from tests.warm.gang import python

ROUNDS = int(os.environ.get("LOCKSTEP_HOSTILE", "500"))
"""Of each kind of file; 3000 at night."""


def _damaged(data: bytes, chance: random.Random) -> bytes:
    kind = chance.randrange(6)
    at = chance.randrange(max(len(data), 1))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
    if kind == 2:
        return data[:at] + chance.randbytes(chance.randrange(1, 9)) + data[at:]
    if kind == 3:
        return chance.randbytes(chance.randrange(200))
    if kind == 4:
        end = min(len(data), at + chance.randrange(1, 40))
        return data[:at] + data[end:]
    return data[:at] + data[at : at + 30] * chance.randrange(2, 5) + data[at + 30 :]


def _refused(action: Callable[[], Any], errors: tuple[type[Exception], ...] = (UserError,)) -> bool:
    """Whether it was refused. Any other exception fails the test."""
    try:
        action()
    except errors as error:
        assert str(error) and len(str(error)) < 3000
        return True
    return False


def _saved(folder: Path) -> Path:
    writer = Writer(folder, keep=1, keep_best=False)
    state = {"shared": {"model": {"w": torch.arange(50.0)}, "n": [1, 2]}, "ranks": [{"rng": (1, None)}]}
    path = writer.save(3, state).result().path
    writer.wait()
    return path


def test_checkpoints(tmp_path: Path) -> None:
    good = _saved(tmp_path / "good")
    weights = store.load(good)["shared"]["model"]
    files = {path.name: path.read_bytes() for path in good.iterdir()}
    chance = random.Random(1)
    bad = tmp_path / "bad" / good.name
    bad.mkdir(parents=True)
    for number in range(ROUNDS):
        name = sorted(files)[number % 3]
        damaged = _damaged(files[name], chance)
        for other, data in files.items():
            (bad / other).write_bytes(damaged if other == name else data)

        def use() -> Any:
            store.verify(bad)
            return store.load(bad)

        refused = _refused(use, (CorruptCheckpoint,))
        if not refused:  # white space in the manifest, say: then it must hold exactly the same
            found = use()["shared"]["model"]
            assert all(torch.equal(tensor, found[name]) for name, tensor in weights.items())
        # Without the manifest's protection the parsers alone must hold, too.
        if name != "manifest.json":
            _refused(lambda: store.load(bad), (CorruptCheckpoint,))


def resealed(path: Path, state: bytes) -> None:
    """Another state in a checkpoint, under a manifest that vouches for it."""
    (path / store.STATE).write_bytes(state)
    manifest = json.loads((path / store.MANIFEST).read_bytes())
    manifest["files"][store.STATE] = {"bytes": len(state), "sha256": hashlib.sha256(state).hexdigest()}
    del manifest["sha256"]
    manifest["sha256"] = seal(manifest)
    (path / store.MANIFEST).write_text(json.dumps(manifest))


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of a tree; of a list the first two, and of mappings that name tensors the first entry."""
    yield at
    if isinstance(value, dict):
        for key in list(value)[: 1 if value and all("$tensor" in str(v) for v in value.values()) else None]:
            yield from _places(value[key], (*at, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value[:2]):
            yield from _places(inner, (*at, index))


def _changed(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    if not at:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = _changed(value[at[0]], at[1:], new)
    return copy


def test_a_sealed_checkpoint_of_another_structure(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`export`, `evaluate` and a resume: one line and 2, or they do as if nothing were wrong, never a traceback."""
    job.ranks = 1
    # Stopped on its way: what is complete is not read again.
    assert job.go(**{"LOCKSTEP_TEST_FATE": "0:9:TERM"}).code == 75
    newest = store.candidates(job.run_dir / "checkpoints")[0]
    good = json.loads((newest / store.STATE).read_bytes())
    chance, refused = random.Random(12), 0
    wrong = [
        None,
        [],
        {},
        "x",
        -1,
        True,
        1e400,
        10**30,
        {"$tensor": 0},
        {"$tensor": 10**9},
        {"$tensor": "model/conv1.weight"},
        {"$tensor": "nobody"},
        {"$tuple": [1]},
        {"$items": [[[], 1]]},
    ]
    places = list(_places(good))
    for place in places:
        new = chance.choice(wrong)
        resealed(newest, json.dumps(_changed(good, place, new)).encode())
        out = tmp_path / "weights.pth"
        out.unlink(missing_ok=True)
        code = main(["export", str(job.run_dir), str(out)], {})
        told = capsys.readouterr()
        assert code in (0, 2) and (code == 0) == out.exists() and len(told.err.splitlines()) == (code != 0), (
            place,
            new,
            told,
        )
        refused += code == 2
    assert refused > len(places) // 3, (refused, len(places))
    own = [
        place
        for place in places
        if place[:2] in (("shared", "optimizer"), ("shared", "history")) or place[2:3] == ("sync",)
    ]
    for place in [*chance.sample(places, 10), *chance.sample(own, 10)]:
        new = chance.choice(wrong)
        resealed(newest, json.dumps(_changed(good, place, new)).encode())
        run = tmp_path / "again"
        shutil.copytree(job.run_dir, run)
        done = training(*job.words[:3], str(run), *job.words[4:], env=job.env())
        assert "Traceback" not in done.output and (
            done.code in (0, 2)
            or any(word in done.output for word in ("diverged at step", "a weight is NaN or infinite"))
        ), (
            place,
            new,
            done,
        )
        assert done.code != 2 or done.output.splitlines()[-1].startswith("error: "), (place, new, done)
        shutil.rmtree(run)


def test_shards_and_manifests(tmp_path: Path) -> None:
    raw = sources.load("synthetic", tmp_path, False, {"n": 12, "n_test": 3, "size": 4})
    good = shards.write(raw, tmp_path / "good", "synthetic", 2)
    bad = tmp_path / "bad"
    shutil.copytree(good.directory, bad)
    chance = random.Random(2)
    for number in range(ROUNDS):
        name = ["manifest.json", "train-00000.safetensors"][number % 2]
        data = (good.directory / name).read_bytes()
        (bad / name).write_bytes(_damaged(data, chance))
        verify = number % 4 < 3
        _refused(lambda: Samples.open(Manifest.read(bad), "train", 0, 12, verify))
        (bad / name).write_bytes(data)


def test_recipes_and_run_files(tmp_path: Path) -> None:
    good = (config.RECIPES / "bag_of_tricks.yaml").read_bytes()
    run = json.dumps({"config": config.to_dict(config.load("smoke")), "global_batch_size": 3, "data": {}}).encode()
    chance = random.Random(3)
    path = tmp_path / "recipe.yaml"
    for number in range(ROUNDS):
        path.write_bytes(_damaged(good, chance))
        _refused(lambda: config.load(str(path)))
        if number % 3 == 0:
            (tmp_path / "run.yaml").write_bytes(_damaged(run, chance))
            _refused(lambda: rundir.read_run(tmp_path))


def test_words_after_set() -> None:
    chance = random.Random(4)
    names = [name for name, _ in settings.leaves(config.Config)]
    values = ["1", "-1", "1e999", "nan", "[]", "{}", "[[1,2],[3]]", "!!python/object:os.system x", "&a [*a]", "{a: {b: 1}}",
              "'", '"', "\x00", "null", "true", "~", "0x1F", "1_000", "2026-11-21", "é" * 50, "- 1", ":", "%", "@", "`"]  # fmt: skip
    refused = 0
    for _ in range(ROUNDS):
        name = chance.choice(names)
        if chance.random() < 0.3:
            at = chance.randrange(len(name) + 1)
            name = name[:at] + chance.choice(["", ".", "=", " ", "x", "\n"]) + name[at + 1 :]
        word = name + chance.choice(["=", "=", "=", "", "=="]) + chance.choice(values)

        def use() -> None:
            loaded = config.load("smoke", [word])
            again = config.from_dict(config.to_dict(loaded), "round trip")
            assert config.differences(loaded, again) == [] and loaded.hash() == again.hash()
            shards.cache_directory(loaded.data)

        refused += _refused(use)
    assert ROUNDS // 6 < refused < ROUNDS


def test_weight_files_run_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    monkeypatch.chdir(tmp_path)

    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (Path("bomb-went-off"),))

    path = tmp_path / "w.pth"
    torch.save({"w": torch.ones(3)}, path)
    good, chance = path.read_bytes(), random.Random(5)
    torch.save({"w": Bomb()}, path)
    bombs = [path.read_bytes(), pickle.dumps(Bomb()), pickle.dumps({"w": Bomb()}, protocol=2)]
    for number in range(ROUNDS):
        path.write_bytes(_damaged(bombs[number % 3] if number % 2 else good, chance) if number > 2 else bombs[number])
        _refused(lambda: weights.read(path))
    assert not (tmp_path / "bomb-went-off").exists()


@pytest.mark.parametrize("words", [
    "run smoke --run-dir P", "evaluate P", "export P out.pth", "export RUN P", "report P", "report RUN --out P",
    "run P.yaml --run-dir new", "evaluate P.pth --recipe smoke", "shard smoke --out P", "launch --ranks 1 run smoke --run-dir P",
    "run smoke --run-dir other --set data.shards=P",
])  # fmt: skip
@pytest.mark.parametrize("name", ["loop", "b\udcff d"], ids=["a link to itself", "not UTF-8"])
def test_a_name_that_leads_nowhere(name: str, words: str, tmp_path: Path, job: Job) -> None:
    """One line and 2, and the name stays what it was."""
    for link in (tmp_path / "loop", tmp_path / "loop.yaml", tmp_path / "loop.pth"):
        link.symlink_to(link.name)
    if "RUN" in words:
        job.ranks = 1
        assert job.go().code == 0
    told = [word.replace("P", str(tmp_path / name)).replace("RUN", str(job.run_dir)) for word in words.split()]
    done = python("-m", "lockstep.training", *told, cwd=tmp_path, env=clean_env(PYTHONPATH=str(ROOT)))
    assert done.code == 2 and len(done.output.splitlines()) == 1 and "error: " in done.output, done
    assert os.readlink(tmp_path / "loop") == "loop" and not (tmp_path / "new").exists()


def test_an_export_to_a_full_disk_leaves_nothing(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job.ranks = 1
    assert job.go().code == 0
    folder = tmp_path / "out"
    folder.mkdir()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "fsync", full)
    assert main(["export", str(job.run_dir), str(folder / "weights.pth")], {}) == 2
    assert list(folder.iterdir()) == []
