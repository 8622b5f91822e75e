"""`check_parameter_closeness`: replicas that are the same pass, and the first difference is named on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lockstep.training.parallel.world import World
from lockstep.training.resilience.closeness import ReplicasDiffer, check_parameter_closeness
from tests.nets import NormedConv
from tests.processes import clean_env
from tests.ranks import gang, on_ranks, training


def _message(model: torch.nn.Module, **options: object) -> str:
    try:
        check_parameter_closeness(model, **options)  # type: ignore[arg-type]
    except ReplicasDiffer as error:
        return str(error)
    return ""


def _several_models(world: World) -> dict[str, str]:
    torch.manual_seed(0)
    model = NormedConv()
    found = {"same": _message(torch.nn.parallel.DistributedDataParallel(model))}
    last = world.rank == world.size - 1
    with torch.no_grad():
        model.head.bias[0] += last
        model.conv2.weight[1, 2] += 1e-4 * last
    found["perturbed"] = _message(model)
    found["within tolerance"] = _message(model, atol=2.0)
    found["NaN"] = ""
    torch.manual_seed(0)
    other = NormedConv()
    with torch.no_grad():
        other.conv1.bias[0] = float("nan")
    found["NaN on all"] = _message(other)
    with torch.no_grad():
        other.conv1.bias[0] = float("nan") if last else 0.0
    found["NaN on one"] = _message(other)
    torch.manual_seed(0)
    fresh = NormedConv()
    fresh.norm.running_mean += world.rank
    fresh.norm.num_batches_tracked += world.rank
    found["statistics"] = _message(fresh)
    found["without statistics"] = _message(fresh, batch_statistics=False)
    found["another model"] = _message(NormedConv(width=4 if last else 8))
    pair = dist.new_group([0, 1])
    if world.rank < 2:
        torch.manual_seed(world.rank)
        found["a group"] = _message(torch.nn.Linear(2, 2), process_group=pair)
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_the_first_tensor_that_differs_is_named_on_every_rank(size: int) -> None:
    results = on_ranks(_several_models, size)
    last = size - 1
    for found in results:
        assert found["same"] == found["within tolerance"] == found["NaN on all"] == found["without statistics"] == ""
        assert found["perturbed"].startswith(
            f"conv2.weight on rank {last} differs from rank 0's: by up to 0.0001 in 9 of 1152"
        )
        assert found["NaN on one"].startswith(f"conv1.bias on rank {last} differs")
        ranks = ", ".join(str(rank) for rank in range(1, size))
        assert found["statistics"].startswith(
            f"norm.running_mean on rank {ranks} differs from rank 0's: by up to {last}"
        )
        assert found["another model"] == f"rank {last} has parameters of other names or shapes than rank 0"
    assert all(found["a group"].startswith("weight on rank 1 differs") for found in results[:2])


def test_a_run_checks_itself_and_ends_where_a_rank_drifts_apart(tiny: list[str], tmp_path: Path) -> None:
    words = ("run", "smoke", "--check-closeness", "every=4", "--set", *tiny, "model=tests.nets:NormedConv")
    done = gang(2, *words, "--run-dir", str(tmp_path / "good"))
    assert done.code == 0, done.output
    env = clean_env(LOCKSTEP_TEST_FATE="1:6:DRIFT")
    words = (*words[:-1], "model=tests.nets:Dying")
    done = gang(2, *words, "--run-dir", str(tmp_path / "bad"), env=env)
    assert (
        done.code == 1 and "the replicas are not the same after step 8: head.bias on rank 1 differs" in done.output
    ), done.output
    assert "Traceback" not in done.output
    assert "step 8: head.bias on rank 1" in (tmp_path / "bad/status.json").read_text()


@pytest.mark.parametrize("every", [1, 100])
def test_a_run_that_is_apart_after_its_first_steps_ends_before_it_saves(
    tiny: list[str], tmp_path: Path, every: int
) -> None:
    """Nobody has asked for a check. What is compared goes with the ranks' other wishes, or before the first save."""
    words = ("run", "smoke", "--set", *tiny, "model=tests.nets:Dying", f"checkpoint.every_steps={every}")
    env = clean_env(LOCKSTEP_TEST_FATE="1:2:DRIFT")
    done = gang(2, *words, "--run-dir", str(tmp_path / "bad"), env=env)
    assert done.code == 1 and "head.bias on rank 1 differs" in done.output, done.output
    assert "Traceback" not in done.output
    saved = [path.name for path in (tmp_path / "bad").glob("checkpoints/step-*")]
    assert len(saved) == (1 if every == 1 else 0), saved  # of the step before


def test_an_interval_that_is_none(tmp_path: Path) -> None:
    done = training("run", "smoke", "--check-closeness", "often", "--run-dir", str(tmp_path / "x"))
    assert done.code == 2 and "check_closeness must be a whole number, got 'often'" in done.output, done.output
