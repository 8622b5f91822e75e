"""Files that are damaged, or sound in form and absurd: a value, or one line that names the file. Nothing in them is run, and none
takes the memory that it claims.

`LOCKSTEP_HOSTILE=3000` takes more rounds of each kind (500), `LOCKSTEP_HOSTILE_SEED` others.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests import product
from tests.processes import ROOT, clean_env
from tests.product import UserError
from tests.runs import Job
from tests.warm.gang import python

pytestmark = pytest.mark.promise("hostile-files")

ROUNDS = int(os.environ.get("LOCKSTEP_HOSTILE", "500"))
SEED = int(os.environ.get("LOCKSTEP_HOSTILE_SEED", "33"))
VALUES: list[Any] = [
    None, True, -1, 0, 1 << 63, 1 << 64, 10**400, 1e308, "", "x", "\n", "\x1b[2J", "\ud800", [], [[]], {}, {"": {}}, [None] * 9,
]  # fmt: skip


def refused(kind: str, path: Path, name: str = "", **more: Any) -> bool:
    """Returns whether the file is refused, in one line that names it. Any other exception fails the test."""
    try:
        product.read(kind, path, **more)
    except UserError as error:
        message = str(error)
        assert message.isprintable() and 0 < len(message) < 3000 and name in message, message
        return True
    return False


# Damaged ones.


def damaged(data: bytes, chance: random.Random) -> bytes:
    kind, at = chance.randrange(6), chance.randrange(max(len(data), 1))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
    if kind == 2:
        return data[:at] + chance.randbytes(chance.randrange(1, 9)) + data[at:]
    if kind == 3:
        return chance.randbytes(chance.randrange(200))
    if kind == 4:
        return data[:at] + data[min(len(data), at + chance.randrange(1, 40)) :]
    return data[:at] + data[at : at + 30] * chance.randrange(2, 5) + data[at + 30 :]


Round = Callable[[int, random.Random], bool]
"""Damages and reads one file; returns whether the file is refused."""


def damaging(paths: list[Path], read: Callable[[int, Path], bool]) -> Round:
    """Damages these files in turn, and restores each afterwards."""

    def turn(number: int, chance: random.Random) -> bool:
        path = paths[number % len(paths)]
        before = path.read_bytes()
        path.write_bytes(damaged(before, chance))
        was_refused = read(number, path)
        path.write_bytes(before)
        return was_refused

    return turn


def checkpoints(root: Path) -> Round:
    weights, state = torch.arange(50.0), {"n": [1, 2], "ranks": [{"rng": (1, None)}]}
    folder = product.save(root, 3, {"shared": {"model": {"w": weights}, **state}, "ranks": []})

    def read(number: int, path: Path) -> bool:
        was_refused = refused("checkpoint", folder, folder.name)
        if not was_refused:  # white space in the manifest, say: then it must hold exactly the same
            assert torch.equal(product.read("checkpoint", folder)["shared"]["model"]["w"], weights)
        if path.name != "manifest.json":  # without the manifest's protection the parsers alone must hold, too
            refused("checkpoint", folder, folder.name, verify=False)
        return was_refused

    return damaging(sorted(folder.iterdir()), read)


def shards(root: Path) -> Round:
    folder = product.make_shards(root / "shards")
    paths = [folder / name for name in ("manifest.json", "train-00000.safetensors")]
    return damaging(paths, lambda number, _: refused("shards", folder, verify=number % 4 < 3))


def recipes(root: Path) -> Round:
    path = shutil.copy(ROOT / "training/recipes/bag_of_tricks.yaml", root / "recipe.yaml")
    return damaging([path], lambda *_: refused("recipe", path))


def run_files(root: Path) -> Round:
    (root / "run.yaml").write_text(_run_file())
    return damaging([root / "run.yaml"], lambda *_: refused("run", root))


def weight_files(root: Path) -> Round:
    """Includes pickles whose code leaves a file in `root`."""
    path, plain = root / "w.pth", root / "w.safetensors"
    torch.save({"w": torch.ones(3)}, path)
    safetensors.torch.save_file({"w": torch.ones(3)}, plain)
    good, packed = path.read_bytes(), plain.read_bytes()
    torch.save({"w": Bomb()}, path)
    bombs = [path.read_bytes(), pickle.dumps(Bomb()), pickle.dumps({"w": Bomb()}, protocol=2)]

    def turn(number: int, chance: random.Random) -> bool:
        path.write_bytes(damaged(bombs[number % 3] if number % 2 else good, chance) if number > 2 else bombs[number])
        plain.write_bytes(damaged(packed, chance))
        refused("weights", plain, "w.safetensors")
        was_refused = refused("weights", path, "w.pth")
        assert not (root / "bomb-went-off").exists()
        return was_refused

    return turn


class Bomb:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("bomb-went-off"),))


@pytest.mark.parametrize(
    "kind", [checkpoints, shards, recipes, run_files, weight_files], ids=lambda kind: kind.__name__
)
def test_damaged_files_are_refused_and_run_no_code(
    kind: Callable[[Path], Round], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    turn, chance = kind(tmp_path), random.Random(SEED)
    count = sum(turn(number, chance) for number in range(ROUNDS))
    assert ROUNDS // 8 < count <= ROUNDS, "neither all is read nor nothing was damaged"


# Sound in form.


def _run_file() -> str:
    return json.dumps(
        {"config": product.read("recipe", Path("smoke")).model_dump(), "global_batch_size": 3, "data": {}}
    )


def test_odd_files_of_a_run_directory_are_a_value_or_one_line(tmp_path: Path) -> None:
    chance = random.Random(SEED)

    def value() -> Any:
        names = ("code", "step", "attempt", "reason", "time", "event")
        return chance.choice([*VALUES, {chance.choice(names): chance.choice(VALUES)}])

    for _ in range(max(25, ROUNDS // 20)):
        run = json.loads(_run_file())
        section = run if chance.random() < 0.7 else run["config"]
        section[chance.choice(list(section))] = value()
        (tmp_path / "run.yaml").write_text(json.dumps(run))
        for name in ("status.json", "summary.json", "metrics/rank-00000.prom"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(json.dumps(value()))
        event = {"event": "epoch", "time": chance.choice(VALUES), "step": chance.choice(VALUES)}
        (tmp_path / "events.jsonl").write_text(f"{json.dumps(value())}\n{json.dumps(event)}")
        refused("run", tmp_path)
        product.read("metrics", tmp_path)


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the places of a tree: of a list the first two, of a mapping of tensors the first entry."""
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
    """One line and 2, or the weights as if nothing were wrong, never a traceback."""
    job.ranks = 1
    assert job.go(LOCKSTEP_TEST_FATE="0:9:TERM").code == 75  # what is complete is not read again
    newest = job.run_dir / f"checkpoints/step-{job.steps()[0]:08d}"
    good = json.loads((newest / "state.json").read_bytes())
    wrong = [None, [], {}, "x", -1, True, 1e400, 10**30, {"$tensor": 0}, {"$tensor": 10**9}, {"$tensor": "model/conv1.weight"},
             {"$tensor": "nobody"}, {"$tuple": [1]}, {"$items": [[[], 1]]}]  # fmt: skip
    chance, count = random.Random(12), 0

    def put(place: tuple[Any, ...]) -> tuple[Any, ...]:
        new = chance.choice(wrong)
        (newest / "state.json").write_text(json.dumps(_changed(good, place, new)))
        product.seal(newest)
        return place, new

    # An export does not read the digests of variables, whose number depends on the process that runs the test.
    places, out = [place for place in _places(good) if "variables" not in place], tmp_path / "weights.pth"
    for place in places:
        what = put(place)
        code = product.export(str(job.run_dir), str(out))
        captured = capsys.readouterr()
        assert code in (0, 2) and (code == 0) == out.exists() and len(captured.err.splitlines()) == (code != 0), (
            what,
            captured,
        )
        out.unlink(missing_ok=True)
        count += code == 2
    assert count > len(places) // 3, (count, len(places))


# Names.


@pytest.mark.promise("bad-input")
def test_a_name_that_leads_nowhere(tmp_path: Path) -> None:
    """One line and 2, and the name stays what it was."""
    for link in (tmp_path / "loop", tmp_path / "loop.yaml", tmp_path / "loop.pth"):
        link.symlink_to(link.name)
    for words in ("run smoke --run-dir P", "evaluate P", "report P", "run P.yaml --run-dir new", "shard smoke --out P",
                  "run smoke --run-dir P\udcff"):  # fmt: skip
        command = [word.replace("P", str(tmp_path / "loop")) for word in words.split()]
        result = python("-m", "lockstep.training", *command, cwd=tmp_path, env=clean_env(PYTHONPATH=str(ROOT)))
        assert result.code == 2 and len(result.output.splitlines()) == 1 and "error: " in result.output, (words, result)
    assert os.readlink(tmp_path / "loop") == "loop" and not (tmp_path / "new").exists()
