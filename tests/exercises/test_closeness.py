"""`check_parameter_closeness`: equal replicas pass, and every rank names the first difference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep.training.parallel.world import World
from lockstep.training.resilience.closeness import ReplicasDiffer, check_parameter_closeness
from tests.nets import NormedConv
from tests.processes import clean_env
from tests.ranks import gang, on_ranks

pytestmark = pytest.mark.promise("replicas-apart")


def _message(model: nn.Module, **options: object) -> str:
    try:
        assert check_parameter_closeness(model, **options)  # type: ignore[arg-type] # it stands in an assert
    except ReplicasDiffer as error:
        return str(error)
    return ""


def _several_models(world: World) -> dict[str, str]:
    torch.manual_seed(0)
    model, with_nan, fresh = NormedConv(), NormedConv(), NormedConv()
    messages = {"same": _message(nn.parallel.DistributedDataParallel(model))}
    last = world.rank == world.size - 1
    with torch.no_grad():
        model.head.bias[0] += last
        model.conv2.weight[1, 2] += 1e-4 * last
        with_nan.conv1.bias[0] = float("nan") if last else 0.0
    messages["perturbed"] = _message(model)
    messages["within tolerance"] = _message(model, atol=2.0)
    messages["NaN on one"] = _message(with_nan)
    fresh.norm.running_mean += world.rank
    messages["statistics"] = _message(fresh)
    messages["without statistics"] = _message(fresh, batch_statistics=False)
    messages["another model"] = _message(NormedConv(width=4 if last else 8))
    return messages


def test_the_first_tensor_that_differs_is_named_on_every_rank() -> None:
    for messages in on_ranks(_several_models, 3):
        assert messages["same"] == messages["within tolerance"] == messages["without statistics"] == ""
        assert "conv2.weight on rank 2" in messages["perturbed"] and "0.0001 in 9 of 1152" in messages["perturbed"]
        assert (
            "conv1.bias on rank 2" in messages["NaN on one"]
            and "norm.running_mean on rank 1, 2" in messages["statistics"]
        )
        assert "rank 2" in messages["another model"]


def test_a_run_checks_itself_and_ends_where_a_rank_drifts_apart(tiny: list[str], tmp_path: Path) -> None:
    words = ("run", "smoke", "--set", *tiny, "check_closeness=4", "model=tests.nets:Dying")
    done = gang(2, *words, "--run-dir", str(tmp_path / "good"))
    assert done.code == 0, done.output
    done = gang(2, *words, "--run-dir", str(tmp_path / "bad"), env=clean_env(LOCKSTEP_TEST_FATE="1:6:DRIFT"))
    assert done.code == 1 and "after step 8: head.bias on rank 1 differs" in done.output, done.output
    assert "Traceback" not in done.output and "head.bias on rank 1" in (tmp_path / "bad/status.json").read_text()
