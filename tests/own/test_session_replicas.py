"""The ranks of a loop of one's own stay the same model: what would train them apart is an error on all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from tests.own.job import script, shared
from tests.processes import Result

CODE = """
import sys, torch, torch.nn.functional as F
from lockstep import Session
run_dir, how, *words = sys.argv[1:]
def past(step):
    who, _, since = how.partition(":")
    return step >= int(since or 0) and who in ("all", f"rank{run.rank}")
with Session(run_dir, "checkpoint.every_steps=1", *words, config={"name": "replicas"}) as run:
    torch.manual_seed(3)
    data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
    if how == "dict" or how == "twice":
        net = torch.nn.ModuleDict({"a": torch.nn.Linear(6, 8), "b": torch.nn.Linear(8, 3)})
        net.forward = lambda x: net["b"](net["a"](x))
    else:
        net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    model = run.replicate(net, example=torch.ones(2, 6) if "powersgd" in " ".join(words) else None)
    optimizer = run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.05))
    for epoch in run.epochs(1):
        for x, y in run.batches(data, 8):
            if how == "dict":
                loss = F.cross_entropy(net["b"](net["a"](x)), y)
            elif how == "twice":  # the second pass is of a network that the first one left out
                run.backward(model(x).sum(), samples=0)
                loss = F.cross_entropy(net["b"](net["a"](x)), y)
            else:
                loss = F.cross_entropy((net if past(run.steps) else model)(x), y)
            run.step(loss)
print("THE END\\n", end="")
"""


def train(run_dir: Path, how: str, *words: str) -> Result:
    return script(2, CODE, run_dir, how, *words)


def assert_refused(done: Result, run_dir: Path, sync: str, saved: int) -> None:
    assert done.code == 2, done.output
    assert f"sync.name={sync} has not summed the gradient of" in done.output, done.output
    assert "call that network" in done.output and "Traceback" not in done.output, done.output
    checkpoints = [path.name for path in (run_dir / "checkpoints").iterdir()] if saved else []
    assert len(checkpoints) == min(saved, 3), checkpoints


@pytest.mark.parametrize("looks", ["nonfinite=stop", "nonfinite=ignore"])
@pytest.mark.parametrize("how", ["all", "all:3", "dict"])
@pytest.mark.parametrize("options", ["{}", "{find_unused: true}"])
def test_a_forward_pass_that_goes_past_ddp_is_an_error_at_that_step(
    tmp_path: Path, options: str, how: str, looks: str
) -> None:
    done = train(tmp_path / "run", how, "sync.name=ddp", f"sync.options={options}", looks)
    assert_refused(done, tmp_path / "run", "ddp", saved=3 if how == "all:3" else 0)


@pytest.mark.parametrize("options", ["{}", "{find_unused: true}"])
@pytest.mark.parametrize("sync", ["ddp", "powersgd"])
def test_it_is_an_error_on_the_ranks_that_did_it_right(tmp_path: Path, sync: str, options: str) -> None:
    """They wait for that rank's gradients in their backward pass, and are told at the same step."""
    done = train(tmp_path / "run", "rank1:3", f"sync.name={sync}", f"sync.options={options}")
    assert_refused(done, tmp_path / "run", sync, saved=3)
    assert "rank 1: sync.name" in done.output, done.output


def test_past_fsdp_it_is_an_error_too(tmp_path: Path) -> None:
    done = train(tmp_path / "run", "all:2", "sync.name=fsdp")
    assert done.code in (1, 2) and "THE END" not in done.output, done.output


@pytest.mark.parametrize("sync", ["flat", "allreduce", "hooks", "horovod", "zero1", "bf16_compress"])
def test_the_others_sum_whatever_has_come(tmp_path: Path, sync: str) -> None:
    weights = []
    for how in ("all", "none"):
        done = train(tmp_path / how, how, f"sync.name={sync}")
        assert done.code == 0 and done.output.count("THE END") == 2, done.output
        weights.append(shared(tmp_path / how)["model"])
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_pass_for_what_an_earlier_one_left_out_is_not_summed_either(tmp_path: Path) -> None:
    """DDP has summed for the first backward pass, and leaves those of the second one to the ranks."""
    done = train(tmp_path / "run", "twice", "sync.name=ddp", "sync.options={find_unused: true}")
    assert_refused(done, tmp_path / "run", "ddp", saved=0)


APART = """
import sys, torch, torch.nn.functional as F
from lockstep import Session
run_dir, at, every, epochs, *words = sys.argv[1:]
with Session(run_dir, f"checkpoint.every_steps={every}", *words, config={"name": "apart"}) as run:
    torch.manual_seed(3)
    data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    model = run.replicate(net)
    optimizer = run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.05))
    run.average(0.9)
    for epoch in run.epochs(int(epochs)):
        for x, y in run.batches(data, 8):
            run.step(F.cross_entropy(model(x), y))
            if run.steps == int(at) and run.rank == 1:
                with torch.no_grad():
                    net[2].weight[0, 0] += 1e-6
print("THE END\\n", end="")
"""


def steps_saved(run_dir: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1].split(".")[0]) for path in (run_dir / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("sync", ["ddp", "flat"])
@pytest.mark.parametrize(("at", "every"), [(1, 1), (2, 3), (3, 100), (1, 2)])
def test_replicas_that_differ_after_the_first_steps_are_named_before_anything_is_saved(
    tmp_path: Path, at: int, every: int, sync: str
) -> None:
    done = script(2, APART, tmp_path / "run", str(at), str(every), "1", f"sync.name={sync}")
    assert done.code == 1 and "the replicas are not the same after step" in done.output, done.output
    assert "2.weight on rank 1 differs from rank 0's" in done.output and "replicate()" in done.output, done.output
    assert done.output.count("THE END") == 0 and "Traceback" not in done.output, done.output
    assert not (tmp_path / "run/checkpoints").exists() or steps_saved(tmp_path / "run") == []


def test_they_are_compared_after_a_resume_too(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert script(2, APART, run_dir, "0", "8", "1").code == 0
    done = script(2, APART, run_dir, "10", "1000", "2")
    assert done.code == 1 and "the replicas are not the same after step" in done.output, done.output
    assert steps_saved(run_dir) == [8]
    assert script(2, APART, run_dir, "0", "8", "2").code == 0


def strategy(run_dir: Path) -> str:
    config = yaml.safe_load((run_dir / "run.yaml").read_text())["config"]
    return str(config["sync"]["name"])


def test_a_run_is_flat_unless_it_was_begun_otherwise(tmp_path: Path) -> None:
    """`ddp` was what a Session without a word about it began with: such a run goes on with it, and is not refused."""
    for begun, then, expected in (
        ([], [], "flat"),
        (["sync.bucket_mb=5"], ["sync.bucket_mb=5"], "flat"),
        (["sync.name=ddp"], [], "ddp"),
    ):
        run_dir = tmp_path / "-".join(["run", *begun])
        first = script(2, APART, run_dir, "0", "8", "1", *begun)
        assert first.code == 0 and strategy(run_dir) == expected, first.output
        again = script(2, APART, run_dir, "0", "8", "2", *then)
        assert again.code == 0 and strategy(run_dir) == expected and steps_saved(run_dir)[-1] == 16, again.output
    other = script(2, APART, tmp_path / "run", "0", "8", "3", "sync.name=ddp")
    assert other.code == 2 and "sync.name: flat → ddp" in other.output, other.output
    code = APART.replace("*words, config", "*words, fresh=True, config")
    fresh = script(2, code, tmp_path / "run-sync.name=ddp", "0", "8", "1")
    assert fresh.code == 0 and strategy(tmp_path / "run-sync.name=ddp") == "flat", fresh.output
