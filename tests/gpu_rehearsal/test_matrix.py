"""The whole matrix (`make test-gpu-rehearsal-all`): every recipe and type, every strategy with each way to be late."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.training import config
from tests.gpu_rehearsal.conftest import OnCpu
from tests.gpu_rehearsal.rehearsal import differing, rehearsed, trained
from tests.gpu_rehearsal.test_strategies import STRATEGIES, changes_of
from tests.processes import ROOT

pytestmark = pytest.mark.matrix
RECIPES = sorted(path.stem for path in (ROOT / "training" / "recipes").glob("*.yaml"))
SMALL = [
    "data.source=synthetic", "data.num_shards=2", "epochs=1", "global_batch_size=64", "device=cuda", "capture=auto",
    "log.report=false", "metrics.enabled=false", "data.options={n: 384, n_test: 64, size: 32}", "sync.name=flat", "compile=false",
]  # fmt: skip


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_takes_its_steps(tmp_path: Path, data_root: Path, recipe: str, precision: str) -> None:
    words = [
        "run",
        recipe,
        "--run-dir",
        str(tmp_path / "run"),
        "--set",
        f"data.root={data_root}",
        *SMALL,
        f"precision={precision}",
    ]
    words += ["data.options={n: 384, n_test: 64, size: 28}"] if recipe == "fashion_cnn" else []
    gang = rehearsed(tmp_path, words, timeout=300)
    assert "Final validation accuracy" in gang.ranks[0].output
    for rank in gang.ranks:
        rank.assert_recorded(config.load(recipe).optim.name)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("late", ["", "oldest", "newest"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_and_type_however_late(
    tmp_path: Path, data_root: Path, on_cpu: OnCpu, strategy: str, late: str, precision: str
) -> None:
    changes = {**changes_of(strategy), "precision": precision}
    _, found = trained(tmp_path, data_root, options={"STANDIN_LATE": late}, **changes)
    assert differing(found, on_cpu(**changes)) == []


@pytest.mark.parametrize("late", ["", "oldest", "newest"])
@pytest.mark.parametrize("optimizer", ["nesterov", "sgd", "adam", "muon"])
@pytest.mark.parametrize("resident", ["auto", "never"])
def test_every_optimizer_with_and_without_recording(
    tmp_path: Path, data_root: Path, optimizer: str, late: str, resident: str
) -> None:
    changes = {"optim__name": optimizer, "lr": 0.01, "data__resident": resident}
    _, eager = trained(tmp_path / "eager", data_root, **changes)
    options: dict[str, object] = {"STANDIN_LATE": late}
    gang, found = trained(tmp_path / "recorded", data_root, options=options, **changes, capture="auto")
    assert differing(found, eager) == []
    for rank in gang.ranks:
        rank.assert_recorded(optimizer)
