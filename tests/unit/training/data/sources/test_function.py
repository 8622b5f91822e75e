"""A function of one's own as a source: what it may give, when it is called, and when not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests import product
from tests.processes import PYTHON, ROOT, clean_env, run
from tests.product import UserError
from tests.ranks import training

MODULE = """
import numpy as np
CLASSES = ["even", "odd"]
offset = 0

def pieces(split: str, root, n: int = 20, size: int = 3):
    assert root.is_dir()
    for low in range(0, n if split == "train" else 6, 7):
        numbers = np.arange(low, min(low + 7, n if split == "train" else 6))
        yield (numbers[:, None, None, None] + np.zeros((size, size, 3))).astype(np.uint8) + offset, numbers % 2

def whole(split, n=9):
    return np.full((n, 4), 0.5), np.arange(n) % 3

def wrong(split, what="text"):
    given = {"text": "nothing", "lists": ([1], [2]), "short": (np.zeros((3, 2)), np.zeros(2, int)),
             "three": [(1, 2, 3)], "number": 3, "nothing": []}
    return given[what]

def failing(split):
    raise KeyError("of their own")

def unreadable(split):
    open("/nowhere/at/all")

class NotAFunction:
    def __init__(self, split): open("called", "w")

def without_split(path):
    open("called", "w")

from json import dumps as elsewhere
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module `own_source` that Python finds in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "own_source.py"
    path.write_text(MODULE)
    yield path
    sys.modules.pop("own_source", None)


def _made(source: str, **options: object) -> Any:
    return product.prepared(product.data(source=f"own_source:{source}", root="data", options=options, num_shards=2))


@pytest.mark.promise("sources")
def test_pieces_or_the_whole(module: Path) -> None:
    made = _made("pieces", n=30)
    assert (made.count("train"), made.count("test"), made.shape, made.classes) == (30, 6, (3, 3, 3), ["even", "odd"])
    numbers = np.arange(30)
    images = np.broadcast_to(numbers[:, None, None, None], (30, 3, 3, 3)).astype(np.uint8)
    train, test = ((images[:n], numbers[:n] % 2) for n in (30, 6))
    assert made.checksum == product.sharded(module.parent / "same", train, test, ["even", "odd"]).checksum
    sys.modules["own_source"].CLASSES = None  # type: ignore[attr-defined]
    whole = _made("whole")
    assert (whole.count("train"), whole.shape, whole.classes) == (9, (4,), ["class 0", "class 1", "class 2"])


@pytest.mark.promise("sources")
def test_its_code_and_its_arguments_make_other_shards(module: Path) -> None:
    first = _made("pieces").directory
    assert _made("pieces", n=21).directory != first == _made("pieces").directory
    module.write_text(MODULE.replace("offset = 0", "offset = 1"))
    assert _made("pieces").directory != first


@pytest.mark.parametrize(
    ("source", "options"),
    [
        *(("wrong", {"what": what}) for what in ("text", "lists", "short", "three", "number", "nothing")),
        ("pieces", {"m": 1}), ("pieces", {"split": "test"}), ("without_split", {}), ("NotAFunction", {}), ("elsewhere", {}),
        ("none", {}), ("unreadable", {}),
    ],
)  # fmt: skip
def test_what_is_no_source(module: Path, source: str, options: dict[str, object]) -> None:
    with pytest.raises(UserError, match=source if source != "pieces" else f"no option '{next(iter(options))}'"):
        _made(source, **options)
    assert not Path("called").exists() and not [path for path in Path("data/shards").glob("*") if path.is_dir()]


@pytest.mark.parametrize("name", ["no_such_module:f", "sys:exit"])
def test_a_module_that_is_not_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=name):
        product.prepared(product.data(source=name, root=str(tmp_path)))


@pytest.mark.promise("no-foreign-code")
def test_a_run_directory_of_somebody_else_calls_no_source(module: Path, tmp_path: Path) -> None:
    """It trains where its user names it, and goes on; `evaluate` wants to be told, `report` and `export` never import it."""
    env = clean_env(PYTHONPATH=f"{ROOT}:{tmp_path}")
    target = str(tmp_path / "run")
    words = [
        "run",
        "smoke",
        "--run-dir",
        target,
        "--set",
        "data.source=own_source:pieces",
        f"data.root={tmp_path / 'data'}",
    ]
    words += ["model=mlp", "global_batch_size=4", "epochs=1", "augment.crop=0", "uneven=drop", "metrics.enabled=false"]
    words += ["mean=[0]", "std=[1]", "bias_lr_factor=1", "optim.name=sgd", "ema.decay=0"]
    (tmp_path / "data").mkdir()
    for more in ([], ["epochs=2"]):
        done = training(*words, *more, env=env)
        assert done.code == 0, done.output
    refused = training("evaluate", target, env=env)
    assert refused.code == 2 and "own_source:pieces" in refused.output and "--trust-model" in refused.output
    assert training("evaluate", target, "--trust-model", env=env).code == 0
    (ready,) = (tmp_path / "data/shards").glob("own_source-*/")
    assert training("evaluate", target, "--set", f"data.shards={ready}", env=env).code == 0, "ready shards run no code"
    (tmp_path / "evil.py").write_text("open('bomb-went-off', 'w')\ndef f(split): pass\n")
    run_file = tmp_path / "run/run.yaml"
    values = yaml.safe_load(run_file.read_text())
    values["config"]["data"]["source"] = "evil:f"
    run_file.write_text(yaml.safe_dump(values))
    for command in (["evaluate", target], ["export", target, str(tmp_path / "w.pth")], ["report", target]):
        run([PYTHON, "-m", "lockstep.training", *command], env, cwd=tmp_path)
    assert not (tmp_path / "bomb-went-off").exists()
