"""A loop of one's own on two GPUs of the stand-in: the bits of the CPU, also after a kill."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest

from tests.gpu_rehearsal.own import SCALE
from tests.gpu_rehearsal.rehearsal import differing, rehearsed, rehearsing, saved
from tests.processes import poll

pytestmark = pytest.mark.promise("gpu-standin")

OWN = ["-m", "tests.gpu_rehearsal.own"]
LOOK_FOR_NAN = "cudaStreamSynchronize by run/step.py:update"
STAGED = "copy cpu->cuda pageable by data/trees.py:to_device"
SETTINGS = ["checkpoint.every_steps=2", "metrics.enabled=false", "log.report=false"]


@pytest.mark.parametrize("strategy", ["flat", "ddp"])
def test_killed_and_run_again_a_loop_of_ones_own_ends_in_the_bits_of_the_cpu(tmp_path: Path, strategy: str) -> None:
    folders = {device: tmp_path / device for device in ("cpu", "cuda")}
    words = {
        device: [str(folder / "run"), "part", f"sync.name={strategy}", f"device={device}", *SETTINGS]
        for device, folder in folders.items()
    }
    rehearsed(folders["cpu"], words["cpu"], devices=0, program=OWN)
    folder = folders["cuda"]
    with rehearsing(folder, words["cuda"], program=OWN, LOCKSTEP_TEST_FATE="1:6:KILL") as gang:
        poll(lambda: gang.ranks[1].code is not None, 60, "the death of rank 1")
        assert gang.ranks[1].code == -9, gang.output
        poll(lambda: list((folder / "run" / "checkpoints").glob("step-*4")), 60, "a checkpoint")
    gang = rehearsed(folder, words["cuda"], program=OWN)
    assert "Resuming at step 4" in gang.output
    for rank in gang.ranks:
        assert rank.lines("COMMUNICATOR"), "nothing went through NCCL"
        assert rank.found["step"] == {LOOK_FOR_NAN: 4, STAGED: 4}, "once a step, of those that were left"
    assert differing(saved(folder / "run"), saved(folders["cpu"] / "run")) == []


def test_pinned_batches_a_scaler_and_micro_batches_that_a_signal_ended_go_on_to_the_bits_of_the_cpu(
    tmp_path: Path,
) -> None:
    words = {
        device: [str(tmp_path / device / "run"), "batches", "sync.name=ddp", f"device={device}", *SETTINGS]
        for device in ("cpu", "cuda")
    }
    calm = rehearsed(tmp_path / "cpu", words["cpu"], devices=0, program=OWN)
    scale = calm.ranks[0].output.partition("scale ")[2].split()[0]
    assert int(scale) < SCALE, "nothing has overflowed"
    with rehearsing(tmp_path / "cuda", words["cuda"], program=OWN, LOCKSTEP_TEST_FATE="1:5:TERM") as gang:
        assert gang.wait(60) == [75, 75], gang.output
    gang.assert_sound()
    again = rehearsed(tmp_path / "cuda", words["cuda"], program=OWN)
    assert "Resuming at step" in again.output and f"scale {scale}\n" in again.ranks[0].output
    assert differing(saved(tmp_path / "cuda" / "run"), saved(tmp_path / "cpu" / "run")) == []
    for rank, resumed in zip(gang.ranks, again.ranks):
        waits = collections.Counter(rank.found["step"]) + collections.Counter(resumed.found["step"])
        assert waits == _waits(finite=5, overflowed=3)


def _waits(finite: int, overflowed: int) -> dict[str, int]:
    """Of so many steps with a scaler, each of two micro-batches."""
    return {
        "copy cpu->cuda pinned by data/trees.py:to_device": 2 * (finite + overflowed),  # images and labels
        LOOK_FOR_NAN: finite + overflowed,
        "cudaStreamSynchronize by run/step.py:<genexpr>": 2 * overflowed,  # the losses
        "cudaStreamSynchronize by run/step.py:_scale_too_high": overflowed,  # the scale
    }
