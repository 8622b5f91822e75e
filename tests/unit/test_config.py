from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lockstep.training import config
from lockstep.training.__main__ import main
from lockstep.training.config import load, settings
from lockstep.training.config.own import own_settings
from lockstep.training.contract import UserError
from lockstep.training.run import context
from tests.processes import ROOT


@pytest.mark.parametrize("name", config.recipes())
def test_every_recipe_loads_and_survives_a_round_trip(name: str) -> None:
    loaded = config.load(name)
    assert loaded.recipe == name
    again = config.from_dict(yaml.safe_load(yaml.safe_dump(config.to_dict(loaded))), "round trip")
    assert again == loaded and again.hash() == loaded.hash()


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["lr=abc"], "optim.lr must be a number, got 'abc'"),
        (["epochs=1.5"], "epochs must be a whole number, got 1.5"),
        (["epochs=true"], "epochs must be a whole number, got True"),
        (["epochs=0"], "epochs must be at least 1, got 0"),
        (["leraning=1"], "unknown setting 'leraning'"),
        (["optim.lrr=1"], "did you mean 'optim.lr'?"),
        (["epochs"], "--set takes NAME=VALUE, got 'epochs'"),
        (["name=x"], "could be any of optim.name, sync.name"),
        (["every=3"], "write the whole name"),
        (["sync.name=dpp"], "sync.name must be ddp | allreduce | flat | hooks | horovod | zero1"),
        (["data.mean=[1,x]"], "data.mean[1] must be a number, got 'x'"),
        (["data.std=[]"], "std must have one number, or one for each channel"),
        (["data.std=[1,0]"], "data.std[1] must be above 0, got 0"),
        (["lr=.inf"], "optim.lr must be a number, got inf"),
        (["optim=3"], "unknown setting 'optim'"),
        (["model_options={a: 2026-11-21}"], "model_options must be a mapping of plain values"),
        (["model_options={a: {1: 2}}"], "must be a mapping of plain values"),
        (["collective_timeout=1e300"], "must be at least 1 and at most 1000000, got 1e+300"),
        (["model_options=[1]"], "model_options must be a mapping of plain values"),
        (["schedule=[[1,1],[1,2]]"], "schedule must have increasing epochs"),
        (["batch_size=8", "global_batch_size=8"], "set exactly one of batch_size"),
        (["lr=[1"], "--set lr"),
        (["ema.decay=1"], "ema.decay must be at least 0 and below 1, got 1"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(assignments: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        config.load("smoke", assignments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_short_names_and_numbers_as_people_write_them() -> None:
    loaded = config.load("resnet18", ["lr=1e-3", "batch_size=64", "seed=7", "model_options.stem=stock", "padding=zero"])
    assert (loaded.optim.lr, loaded.batch_size, loaded.seed) == (1e-3, 64, 7)
    assert loaded.model_options == {"stem": "stock"}
    assert loaded.data.augment.padding == "zero"


def test_one_batch_size_replaces_the_other() -> None:
    assert config.load("bag_of_tricks", ["batch_size=128"]).global_batch_size is None
    assert config.load("resnet18", ["global_batch_size=128"]).batch_size is None


def test_unknown_recipe_and_own_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'smoke'"):
        config.load("smokey")
    with pytest.raises(UserError, match="cannot read"):
        config.load(str(tmp_path / "none.yaml"))
    own = tmp_path / "mine.yaml"
    own.write_text("epochs: 3\nbatch_size: 4\n")
    assert config.load(str(own)).recipe == "mine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epochs: 1\nepochs: 2\n", "line 2: key 'epochs' twice"),
        ("a: &x [1]\nb: *x\n", "line 2: aliases are not allowed"),
        ("- 1\n", "holds a list, expected a mapping"),
        ("epochs: [\n", "line 2"),
        ("? [1, 2]\n: 3\n", "keys must be plain names"),
        ("epochs: !!python/object/apply:os.system ['true']\n", "line 1"),
        ("optim: 3\n", "optim is a group of settings, got 3"),
        ("\x00", "not valid YAML"),
    ],
)
def test_a_hostile_recipe_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        config.load(str(path))
    assert message in str(caught.value)


def test_what_may_change_between_two_starts_is_outside_the_hash() -> None:
    first = config.load("smoke")
    later = config.load("smoke", ["epochs=99", "data.root=/elsewhere", "checkpoint.keep=9", "log.every=1", "threads=3"])
    assert first.hash() == later.hash() and config.differences(first, later) == []
    other = config.load("smoke", ["lr=3e-3"])
    assert first.hash() != other.hash()
    assert config.differences(first, other) == ["optim.lr: 0.002 → 0.003"]


def test_every_setting_is_documented() -> None:
    entries = list(settings.documentation(config.Config))
    assert len(entries) > 50
    assert [name for name, _, _, text in entries if len(text) < 10] == []
    assert {name for name, *_ in entries} == dict(settings.leaves(config.Config)).keys()


def test_the_schema_of_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    """Editors read it: it is up to date, it takes every recipe, and it finds what a person gets wrong."""
    assert main(["settings", "--schema"], {}) == 0
    assert capsys.readouterr().out == (ROOT / "recipe.schema.json").read_text(), "make schema"
    schema = json.loads((ROOT / "recipe.schema.json").read_text())
    check = jsonschema.Draft202012Validator(schema)
    for path in config.RECIPES.glob("*.yaml"):
        text = path.read_text()
        first = text.partition("\n")[0]
        assert (path.parent / first.partition("$schema=")[2]).resolve() == ROOT / "recipe.schema.json"
        check.validate(yaml.safe_load(text))
    wrong: list[dict[str, Any]] = [
        {"epochs": 0}, {"optim": {"lrr": 1}}, {"optim": {"lr": "x"}}, {"optim": {"groups": {"head": {"lr": -1}}}},
        {"sync": {"name": "dpp"}}, {"data": {"std": [0]}}, {"preempt": {"signals": ["KILL"]}}, {"ema": {"decay": 1}},
        {"optim": {"momentum": 1.5}}, {"optim": {"groups": {"head": {"momentum": 1.5}}}},
    ]  # fmt: skip
    assert [values for values in wrong if check.is_valid(values)] == []
    described = [field for part in (schema, *schema["$defs"].values()) for field in part["properties"].values()]
    assert len(described) > 80 and sum("description" not in field for field in described) == 4, "those of optim.groups"


def test_dotted_names_of_nested_values() -> None:
    found = settings.dotted({"a": {"b": 1, "c": {}}, "d": [{"e": 2}], "f": None})
    assert found == {"a.b": 1, "a.c": {}, "d": [{"e": 2}], "f": None}


def test_an_empty_mapping_of_a_script_is_a_setting_that_it_has() -> None:
    script = {"options": {}}
    found = own_settings("train", script, {}, ["config.options={depth: 3}"])
    assert found.config == {"options": {"depth": 3}} and script == {"options": {}}
    with pytest.raises(UserError, match="expected a value like the script's {}, got 3"):
        own_settings("train", script, {}, ["config.options=3"])


def test_a_config_is_changed_in_place_and_copied() -> None:
    first = config.load("smoke")
    second = first.model_copy(deep=True)
    second.optim.lr, second.epochs = 0.5, 3
    assert (first.optim.lr, first.epochs) == (2e-3, 12) and config.to_dict(second)["optim"]["lr"] == 0.5
    assert pickle.loads(pickle.dumps(second)) == second != first
    with pytest.raises(ValueError, match="lrr"):
        second.optim.lrr = 1  # type: ignore[attr-defined]


def test_several_mistakes_are_one_line_and_a_misspelt_name_is_told_first(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("seed: x\nepochs: 0\noptim: {lrr: 1}\n")
    with pytest.raises(UserError) as caught:
        config.load(str(path))
    assert str(caught.value) == "recipe mine: unknown setting 'optim.lrr'; did you mean 'lr'? (and 2 more)"


@given(
    st.dictionaries(
        st.sampled_from(["seed", "epochs", "optim.lr", "ema.every", "data.num_shards"]), st.integers(1, 999)
    ),
    st.permutations(range(5)),
)
def test_overrides_of_different_settings_commute(values: dict[str, int], order: list[int]) -> None:
    assignments = [f"{name}={value}" for name, value in values.items()]
    shuffled = [assignments[i] for i in order if i < len(assignments)]
    assert config.load("smoke", assignments) == config.load("smoke", shuffled)


@given(st.text(max_size=40))
def test_any_text_after_set_is_accepted_or_refused_cleanly(text: str) -> None:
    try:
        config.load("smoke", [text])
    except UserError as error:
        assert str(error)


def test_another_model_gets_no_options_of_the_recipes() -> None:
    assert load("smoke").model_options == {"width": 0.25}
    assert load("smoke", ["model=my.nets:Net"]).model_options == {}
    assert load("smoke", ["model=my.nets:Net", "model_options.depth=3"]).model_options != {}
    assert load("smoke", ["model=bag_of_tricks"]).model_options == {"width": 0.25}


def test_the_settings_of_a_recipe_are_listed_with_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "smoke", "--set", "lr=0.3"], {}) == 0
    told = capsys.readouterr().out
    assert "optim.lr = 0.3  (a number, default" in told and "seed = 0  (a whole number)" in told


def test_a_setting_that_came_later_is_in_the_hash_only_where_it_is_set() -> None:
    plain = config.load("smoke")
    assert plain.hash() == config.load("smoke", ["tf32=false", "cudnn_benchmark=false"]).hash()
    assert plain.hash() == "3769541fd34aa74c34f4f893a8697becefe6f70fa814067f0af0e313c7f13576"
    assert (
        len(
            {
                plain.hash(),
                config.load("smoke", ["tf32=true"]).hash(),
                config.load("smoke", ["cudnn_benchmark=true"]).hash(),
            }
        )
        == 3
    )
    assert config.differences(plain, config.load("smoke", ["tf32=true"])) == ["tf32: False → True"]


@pytest.mark.parametrize("name", ["tf32", "cudnn_benchmark"])
def test_deterministic_takes_no_kernels_that_may_change(name: str) -> None:
    with pytest.raises(UserError, match="deterministic: true needs"):
        config.load("smoke", ["deterministic=true", f"{name}=true"])


def test_a_gpu_computes_float32_in_float32_unless_it_is_told_otherwise() -> None:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    fast: Any
    exact: Any
    flags: list[tuple[Any, str]]
    if hasattr(matmul, "fp32_precision"):
        fast, exact, flags = "tf32", "ieee", [(matmul, "fp32_precision"), (cudnn.conv, "fp32_precision")]
    else:  # torch 2.8 and before
        fast, exact, flags = True, False, [(matmul, "allow_tf32"), (cudnn, "allow_tf32")]
    flags.append((cudnn, "benchmark"))
    before = [getattr(owner, name) for owner, name in flags]
    changed = ["tf32=true", "cudnn_benchmark=true"]
    try:
        for words, expected in ((changed, [fast, fast, True]), ([], [exact, exact, False])):
            context._arithmetic(config.load("smoke", words))
            assert [getattr(owner, name) for owner, name in flags] == expected
    finally:
        for (owner, name), value in zip(flags, before):
            setattr(owner, name, value)
