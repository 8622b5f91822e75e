"""Ten thousand damaged or malformed files and texts: each is refused with one clean sentence, and none is run."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from training import checkpoint, config, rundir, settings, weights
from training.checkpoint import CorruptCheckpoint, Writer
from training.contract import UserError
from training.data import shards, sources
from training.data.shards import Manifest, Samples


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


def test_checkpoints(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "good", keep=1, keep_best=False)
    state = {"shared": {"w": torch.arange(50.0), "n": [1, 2]}, "ranks": [{"rng": (1, None)}]}
    good = writer.save(3, state).result().path
    writer.close()
    files = {path.name: path.read_bytes() for path in good.iterdir()}
    chance = random.Random(1)
    bad = tmp_path / "bad" / good.name
    bad.mkdir(parents=True)
    for number in range(3000):
        name = sorted(files)[number % 3]
        damaged = _damaged(files[name], chance)
        for other, data in files.items():
            (bad / other).write_bytes(damaged if other == name else data)

        def use() -> Any:
            checkpoint.verify(bad)
            return checkpoint.load(bad)

        refused = _refused(use, (CorruptCheckpoint,))
        if not refused:  # white space in the manifest, say: then it must hold exactly the same
            assert torch.equal(use()["shared"]["w"], state["shared"]["w"])
        # Without the manifest's protection the parsers alone must hold, too.
        if name != "manifest.json":
            _refused(lambda: checkpoint.load(bad), (CorruptCheckpoint,))


def test_shards_and_manifests(tmp_path: Path) -> None:
    raw = sources.load("synthetic", tmp_path, False, {"n": 12, "n_test": 3, "size": 4})
    good = shards.write(raw, tmp_path / "good", "synthetic", 2)
    bad = tmp_path / "bad"
    shutil.copytree(good.directory, bad)
    chance = random.Random(2)
    for number in range(2500):
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
    for number in range(1500):
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
    for _ in range(3000):
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
    assert 500 < refused < 3000


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
    for number in range(600):
        path.write_bytes(_damaged(bombs[number % 3] if number % 2 else good, chance) if number > 2 else bombs[number])
        _refused(lambda: weights.read(path))
    assert not (tmp_path / "bomb-went-off").exists()
