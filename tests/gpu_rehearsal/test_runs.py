"""Whole runs on GPUs of the stand-in: types, the pinned loader, evaluation, kills, signals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from tests import product
from tests.events import events, summary_of
from tests.gpu_rehearsal.conftest import OnCpu
from tests.gpu_rehearsal.rehearsal import (
    RANK,
    STEPS,
    differing,
    environment,
    rehearsed,
    rehearsing,
    saved,
    settings,
    trained,
)
from tests.processes import PYTHON, poll, run
from tests.runs import tensors

pytestmark = pytest.mark.promise("gpu-standin")


@pytest.mark.parametrize("precision", ["bfloat16", "float16", "float64"])
def test_every_type_gives_the_numbers_of_the_cpu(
    tmp_path: Path, data_root: Path, on_cpu: OnCpu, precision: str
) -> None:
    """Half precision is multiplied in float32 here, and rounded; a GPU's own sums are not seen."""
    _, actual = trained(tmp_path, data_root, precision=precision)
    assert differing(actual, on_cpu(precision=precision)) == []


@pytest.mark.parametrize("capture", ["never", "auto"])
def test_a_float16_step_that_overflows_is_taken_again(
    tmp_path: Path, data_root: Path, on_cpu: OnCpu, capture: str
) -> None:
    """With half the scale, until it does not; the recorded steps behind it read the scale that is left."""
    changes: dict[str, object] = {"precision": "float16", "loss__reduction": "sum", "lr": 0.002}
    _, actual = trained(tmp_path, data_root, capture=capture, **changes)
    assert differing(actual, on_cpu(**changes)) == []
    state = product.newest_checkpoint(tmp_path / "run")
    assert state["shared"]["kept"]["objects"]["scaler"]["scale"] < torch.amp.GradScaler("cpu").get_scale()


@pytest.mark.parametrize("late", ["", "oldest", "newest"])
def test_from_pinned_memory_come_the_same_samples(tmp_path: Path, data_root: Path, on_cpu: OnCpu, late: str) -> None:
    gang, actual = trained(tmp_path, data_root, data__resident="never", options={"STANDIN_LATE": late})
    assert differing(actual, on_cpu()) == []
    for rank in gang.ranks:  # outside of the steps an evaluation keeps the test images on the device
        copies = {what for what in rank.counts["step"] if "batches.py" in what}
        assert copies == {"copy cpu->cuda pinned by data/batches.py:<lambda>"}


def test_the_score_is_that_of_the_cpu(tmp_path: Path, data_root: Path) -> None:
    """In the run, and of its directory afterwards."""
    scores = {}
    for device in ("cpu", "cuda"):
        run_dir = tmp_path / device / "run"
        trained(tmp_path / device, data_root, device=device, options={"devices": 2 if device == "cuda" else 0})
        scores[device] = summary_of(run_dir)["accuracy"]
    again = rehearsed(tmp_path / "again", ["evaluate", str(run_dir), "--trust-model", "--set", "device=cuda"], ranks=2)
    assert scores["cpu"] == scores["cuda"]
    assert f"accuracy {scores['cuda']:.4f}" in again.ranks[0].output


@pytest.mark.parametrize(("ranks", "late"), [(2, ""), (2, "newest"), (1, "oldest"), (1, "newest")])
def test_losses_and_norms_are_read_without_waiting(tmp_path: Path, data_root: Path, ranks: int, late: str) -> None:
    """The run copies losses and norms while it trains, and reports them when they arrive. They equal the CPU's."""
    reports = {}
    nonfinite = "stop" if ranks > 1 else "ignore"  # then nothing else has waited before
    for device in ("cpu", "cuda"):
        options: dict[str, object] = {"devices": 2 if device == "cuda" else 0, "STANDIN_LATE": late, "ranks": ranks}
        gang, _ = trained(
            tmp_path / device, data_root, options=options, log__every=1, device=device, nonfinite=nonfinite
        )
        steps = events(tmp_path / device / "run", "step")
        reports[device] = [(event["step"], event["train_loss"], event["grad_norm"]) for event in steps]
    assert reports["cuda"] == reports["cpu"] and len(reports["cpu"]) == 8
    waits = {what for rank in gang.ranks for what in rank.counts["step"] if "observe/steps.py" in what}
    passed = "cudaEventSynchronize by observe/steps.py:poll"  # of an event that has been asked already
    assert waits <= {"copy cuda->cpu pinned by observe/steps.py:_to_host", passed}


def _words(folder: Path, data_root: Path, **changes: object) -> list[str]:
    values = {"model": "tests.nets:DyingPlain", "checkpoint__every_steps": 2, "evaluate__every": 100, **changes}
    return ["run", "smoke", "--run-dir", str(folder / "run"), *settings(data_root, **values)]


@pytest.mark.parametrize("capture", ["never", "auto"])
def test_killed_and_run_again_it_ends_in_the_same_bits(tmp_path: Path, data_root: Path, capture: str) -> None:
    """Eager steps have dropout, too, which draws from the GPU's generator. What `auto` stands for is decided once."""
    calm, dying = ("tests.nets:NormedConv", "Dying") if capture == "never" else ("tests.nets:SmallConv", "DyingPlain")
    form: dict[str, object] = {"precision": "bfloat16", "compile": "false"}
    auto = dict.fromkeys(form, "auto")
    trained(tmp_path / "calm", data_root, capture=capture, model=calm, **form)
    words = _words(tmp_path, data_root, capture=capture, model=f"tests.nets:{dying}", **auto)
    with rehearsing(tmp_path, words, LOCKSTEP_TEST_FATE="1:4:KILL") as gang:
        poll(lambda: gang.ranks[1].code is not None, 240, "the death of rank 1")
        assert gang.ranks[1].code == -9, gang.output
        poll(lambda: list((tmp_path / "run" / "checkpoints").glob("step-*2")), 240, "a checkpoint")
    assert "Resuming at step 2" in rehearsed(tmp_path, words).output
    expected = tensors(tmp_path / "calm" / "run", STEPS)
    assert differing(tensors(tmp_path / "run", STEPS), expected) == []
    rehearsed(tmp_path, [*words, "device=cpu"])
    config = yaml.safe_load((tmp_path / "run/run.yaml").read_text())["config"]
    assert {name: str(config[name]).lower() for name in form} == form, "another device has another form"


def test_the_others_continue_without_a_lost_rank(tmp_path: Path, data_root: Path, on_cpu: OnCpu) -> None:
    """The lost rank is killed within a step."""
    changes = {"sync__name": "exact", "model": "tests.nets:DyingPlain"}
    words = ["run", "smoke", "--run-dir", str(tmp_path / "run"), *settings(data_root, **changes)]
    env = environment(3, TMPDIR=str(tmp_path), LOCKSTEP_TEST_FATE="1:12:KILL")
    launch = [PYTHON, "-m", "lockstep.training", "launch", "--live", "--ranks", "3", "--", PYTHON, *RANK, *words]
    result = run(launch, env, 150)
    assert result.code == 0, result.output
    assert "Ranks that train now: 2" in result.output
    assert differing(saved(tmp_path / "run"), on_cpu(**changes)) == []


def test_the_launcher_starts_a_rank_a_gpu(tmp_path: Path, data_root: Path, on_cpu: OnCpu) -> None:
    """Every process from a shell."""
    words = ["run", "smoke", "--run-dir", str(tmp_path / "run"), *settings(data_root)]
    result = run(
        [PYTHON, "-m", "lockstep.training", "launch", "--", PYTHON, *RANK, *words],
        environment(2, TMPDIR=str(tmp_path)),
        150,
    )
    assert result.code == 0, result.output
    assert "2 ranks on cuda" in result.output
    assert differing(saved(tmp_path / "run"), on_cpu()) == []


@pytest.mark.parametrize("strategy", ["flat", "zero1"])
def test_ranks_share_a_gpu_over_gloo(tmp_path: Path, data_root: Path, on_cpu: OnCpu, strategy: str) -> None:
    gang, actual = trained(tmp_path, data_root, backend="gloo", sync__name=strategy, options={"devices": 1})
    assert "2 ranks on cuda over gloo" in gang.ranks[0].output
    assert differing(actual, on_cpu(sync__name=strategy)) == []
