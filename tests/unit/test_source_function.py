"""A function of one's own as a source: what it may give, when it is called, and when not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

from lockstep.training import config
from lockstep.training.contract import UserError
from lockstep.training.data import shards, sources
from lockstep.training.data.shards import Manifest
from tests.processes import PYTHON, ROOT, clean_env, run
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


def _data(source: str, **options: object) -> config.Data:
    return config.Data(source=f"own_source:{source}", root="data", options=options, num_shards=2)


def _made(source: str, **options: object) -> Manifest:
    return Manifest.read(shards.prepare(_data(source, **options)))


def test_pieces_or_the_whole(module: Path) -> None:
    made = _made("pieces", n=30)
    assert (made.count("train"), made.count("test"), made.shape) == (30, 6, (3, 3, 3)) and made.classes == [
        "even",
        "odd",
    ]
    numbers = np.arange(30)
    images = np.broadcast_to(numbers[:, None, None, None], (30, 3, 3, 3)).astype(np.uint8)
    raw = sources.Raw((images, numbers % 2), (images[:6], numbers[:6] % 2), ["even", "odd"])
    assert made.checksum == shards.write(raw, module.parent / "same", "array", 2).checksum
    sys.modules["own_source"].CLASSES = None  # type: ignore[attr-defined]
    whole = _made("whole")
    assert (whole.count("train"), whole.shape, whole.classes) == (9, (4,), ["class 0", "class 1", "class 2"])
    assert sources.load("own_source:whole", Path("data"), False, {"n": 6}).train[0].shape == (6, 4)


def test_its_code_and_its_arguments_belong_to_the_key(module: Path) -> None:
    first = shards.cache_directory(_data("pieces"))
    assert shards.cache_directory(_data("pieces", n=21)) != first and first.name.startswith("own_source-pieces-")
    assert shards.cache_directory(_data("pieces")) == first
    module.write_text(MODULE.replace("offset = 0", "offset = 1"))
    assert shards.cache_directory(_data("pieces")) != first


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("wrong", {}, "piece 0 is a str, expected"),
        ("wrong", {"what": "lists"}, r"is \(list, list\), expected two numpy arrays"),
        ("wrong", {"what": "short"}, "labels of int64 .* for 3 samples"),
        ("wrong", {"what": "three"}, r"piece 0 is a tuple, expected \(samples, labels\)"),
        ("wrong", {"what": "number"}, r"gives a int, expected \(samples, labels\)"),
        ("wrong", {"what": "nothing"}, "has no sample for the split train"),
        ("pieces", {"m": 1}, "has no option 'm'"),
        ("pieces", {"split": "test"}, "has no option 'split'"),
        ("without_split", {}, "is not a function with a parameter `split`"),
        ("NotAFunction", {}, "is not a function with a parameter `split`"),
        ("elsewhere", {}, "is not a function with a parameter `split`"),
        ("none", {}, "cannot import the source own_source:none"),
    ],
)
def test_what_is_no_source(module: Path, source: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        _made(source, **options)
    assert not Path("called").exists()


def test_what_the_function_raises_is_its_own(module: Path) -> None:
    with pytest.raises(KeyError, match="of their own"):
        _made("failing")
    with pytest.raises(UserError, match="the source own_source:unreadable failed: .*/nowhere/at/all"):
        _made("unreadable")
    assert not [path for path in Path("data/shards").iterdir() if path.is_dir()]


@pytest.mark.parametrize("name", ["own_source", "a b:c", "os.system:", ":f", "a:b:c", "../evil:f", "1a:b"])
def test_names_that_are_no_source(name: str) -> None:
    with pytest.raises(UserError, match=r"data\.source must be digits \| .* \| package\.module:function"):
        config.load("smoke", [f"data.source={name!r}"])


@pytest.mark.parametrize("name", ["no_such_module:f", "no.such.module:f", "sys:exit"])
def test_a_module_that_is_not_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="cannot find the module of the source"):
        shards.prepare(config.Data(source=name, root=str(tmp_path)))


def test_a_run_directory_of_somebody_else_calls_no_source(module: Path, tmp_path: Path) -> None:
    """It trains where its user names it, and goes on; `evaluate` wants to be told, `report` and `export` never import it."""
    env = clean_env(PYTHONPATH=f"{ROOT}:{tmp_path}")
    words = [
        "--run-dir",
        str(tmp_path / "run"),
        "--set",
        "data.source=own_source:pieces",
        f"data.root={tmp_path / 'data'}",
    ]
    words += [
        "model=mlp",
        "global_batch_size=4",
        "epochs=1",
        "augment.crop=0",
        "uneven=drop",
        "metrics.enabled=false",
        "mean=[0]",
    ]
    words += ["std=[1]", "bias_lr_factor=1", "optim.name=sgd", "ema.decay=0"]
    (tmp_path / "data").mkdir()
    done = training("run", "smoke", *words, env=env)
    assert done.code == 0, done.output
    assert training("run", "smoke", *words, "epochs=2", env=env).code == 0
    target = str(tmp_path / "run")
    refused = training("evaluate", target, env=env)
    assert (
        refused.code == 2
        and "names the source own_source:pieces, and reading it runs code: add --trust-model" in refused.output
    )
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
