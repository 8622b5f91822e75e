"""Settings: what a recipe, a file and words after --set may hold, and which changes make another run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lockstep.tools.settings import json_schema
from lockstep.training import config
from lockstep.training.config import settings
from tests.product import UserError


@pytest.mark.parametrize("name", config.recipes())
def test_every_recipe_loads_and_survives_a_round_trip(name: str) -> None:
    loaded = config.load(name)
    again = config.of_run(yaml.safe_load(yaml.safe_dump(config.to_dict(loaded))), "round trip")
    assert loaded.recipe == name and again == loaded and config.differences(loaded, again) == []


WRONG = {
    "optim.lr": ["lr=abc", "lr=.inf", "lr=", "lr=true", "lr=-1", "lr=1e400"],
    "epochs": ["epochs=1.5", "epochs=true", "epochs=0", "epochs", "epochs=two", "epochs=99999999999999999999"],
    "flip must be 'none', 'random' or 'alternating'": ["flip=Random", "flip=3", "flip=[none]"],
    "unknown setting 'leraning'": ["leraning=1"], "did you mean 'optim.lr'": ["optim.lrr=1"], "unknown setting 'optim'": ["optim=3"],
    "optim.name, sync.name": ["name=x"], "write the whole name": ["every=3"],
    "sync.name must be 'ddp', .* 'zero1'": ["sync.name=dpp"], r"data.mean.1": ["data.mean=[1,x]"], "std": ["data.std=[]", "data.std=[1,0]"],
    "model_options": ["model_options={a: 2026-11-21}", "model_options={a: {1: 2}}", "model_options=[1]"],
    "collective_timeout": ["collective_timeout=1e300"], "schedule": ["schedule=[[1,1],[1,2]]"], "--set lr": ["lr=[1"],
    "ema.decay": ["ema.decay=1"], "exactly one of batch_size": ["batch_size=8 global_batch_size=8"],
    "every_seconds must be a valid number, got 'x'; .* 'auto', got 'x'$": ["checkpoint.every_seconds=x"],
    "'auto', got null$": ["compile=null"],
    "checkpoint.keep_best must be 'max' or 'min', got 3$": ["checkpoint.keep_best={accuracy: 3}"], "momentum": ["momentum=1"],
    "checkpoint.keep_best is .* the most accuracy or the least test_loss": [
        "checkpoint.keep_best={accuracy: min}", "checkpoint.keep_best={test_loss: max}", "checkpoint.keep_best={loss: min}",
    ],
    "NaN": ["model_options={a: [.nan]}", "data.options={a: .nan}"],
    "deterministic": ["deterministic=true tf32=true", "deterministic=true cudnn_benchmark=true"],
}  # fmt: skip
"""What the one line has to name → words after --set."""


@pytest.mark.promise("bad-input")
@pytest.mark.parametrize(
    ("named", "words"), [(named, words) for named, all_words in WRONG.items() for words in all_words]
)
def test_a_wrong_setting_is_one_line_that_names_it(named: str, words: str) -> None:
    with pytest.raises(UserError, match=named) as caught:
        config.load("smoke", words.split() if "{" not in words else [words])
    assert "\n" not in str(caught.value)


def test_numbers_and_short_names_as_people_write_them() -> None:
    words = ["lr=1e-3", "batch_size=64", "seed=7", "model_options.stem=stock", "padding=zero"]
    loaded = config.load("resnet18", words)
    assert (loaded.optim.lr, loaded.batch_size, loaded.seed) == (1e-3, 64, 7)
    assert loaded.model_options == {"stem": "stock"} and loaded.data.augment.padding == "zero"
    for word, value in (("lr=1", 1.0), ("lr=1.0e-3", 1e-3), ("lr=1_000", 1000.0), ("lr=0x10", 16.0), ("epochs=2", 2)):
        settings_of_word = config.load("smoke", [word])
        actual = getattr(settings_of_word if word[0] == "e" else settings_of_word.optim, word.split("=")[0])
        assert actual == value and type(actual) is type(value), word


@pytest.mark.promise("bad-input", "hostile-files")
@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("epochs: 1\nepochs: 2\n", "line 2: key 'epochs'"), ("a: &x [1]\nb: *x\n", "line 2: aliases"), ("- 1\n", "a list"),
        ("epochs: [\n", "line 2"), ("? [1, 2]\n: 3\n", "line 1: found unhashable key"),
        (f"epochs: {'1:' * 200_000}1\n", "line 1: a number of 400001 characters"),
        ("epochs: !!python/object/apply:os.system ['true']\n", "line 1"),
        ("optim: 3\n", "optim must be a valid dictionary"), ("\x00", "not valid YAML"),
        ("seed: x\nepochs: 0\noptim: {lrr: 1}\n", r"'optim.lrr'; did you mean 'lr'\?; epochs must .*; seed must "),
    ],
)  # fmt: skip
def test_a_hostile_recipe_file_is_refused(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("epochs: 3\nbatch_size: 4\n")
    assert config.load(str(path)).recipe == "mine"
    path.write_text(text)
    with pytest.raises(UserError, match=named):
        config.load(str(path))
    for name, message in (("smokey", "smoke"), (str(tmp_path / "none.yaml"), "none.yaml")):
        with pytest.raises(UserError, match=message):
            config.load(name)


def test_only_a_setting_that_is_not_free_makes_another_run() -> None:
    first = config.load("smoke")
    for words in (
        ["epochs=99", "data.root=/elsewhere", "checkpoint.keep=9", "log.every=1", "threads=3"],
        ["tf32=false"],
    ):
        assert config.differences(first, config.load("smoke", words)) == []
    for words, difference in ((["lr=3e-3"], "optim.lr: 0.002 → 0.003"), (["tf32=true"], "tf32: false → true")):
        assert config.differences(first, config.load("smoke", words)) == [difference]


def test_the_schema_of_a_recipe() -> None:
    """Editors read the schema: it accepts every recipe, and rejects a person's mistakes."""
    schema = json_schema(config.Config)
    check = jsonschema.Draft202012Validator(schema)
    for path in config.RECIPES.glob("*.yaml"):
        check.validate(yaml.safe_load(path.read_text()))
    wrong: list[dict[str, Any]] = [
        {"epochs": 0}, {"optim": {"lrr": 1}}, {"optim": {"lr": "x"}}, {"optim": {"groups": {"head": {"lr": -1}}}},
        {"sync": {"name": "dpp"}}, {"data": {"std": [0]}}, {"preempt": {"signals": ["KILL"]}}, {"ema": {"decay": 1}},
        {"optim": {"momentum": 1.5}}, {"optim": {"groups": {"head": {"momentum": 1.5}}}},
    ]  # fmt: skip
    assert [values for values in wrong if check.is_valid(values)] == []
    described = [field for part in (schema, *schema["$defs"].values()) for field in part.get("properties", {}).values()]
    assert len(described) > 80 and sum("description" not in field for field in described) == 4, "those of optim.groups"


def test_a_script_whose_settings_differ_from_themselves_is_refused() -> None:
    with pytest.raises(UserError, match=r"config must not have a NaN"):
        config.own_settings("script", {"a": [float("nan")]}, {}, ())
    config.own_settings("script", {"a": float("inf"), "b": {"c": [1, 2.5, None, "x"]}}, {}, ())


NAMES = st.sampled_from([name for name, _ in settings.leaves(config.Config)])
ODD = st.sampled_from(
    ["1e999", "nan", "[[1,2],[3]]", "!!python/object:os.system x", "&a [*a]", "\x00", "~", "1_000", "2026-11-21"]
)


@given(st.text(max_size=40) | st.builds("{}={}".format, NAMES, ODD | st.text(max_size=9)))
def test_any_text_after_set_is_a_value_or_one_line(text: str) -> None:
    try:
        config.load("smoke", [text])
    except UserError as error:
        assert str(error)
