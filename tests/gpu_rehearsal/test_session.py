"""A user's loop on two GPUs of the stand-in: the bits of the CPU, also after a signal."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest

from tests.gpu_rehearsal.own import SCALE
from tests.gpu_rehearsal.rehearsal import differing, rehearsed, rehearsing, saved
from tests.gpu_rehearsal.test_strategies import LOOK_FOR_NAN, READING

pytestmark = pytest.mark.promise("gpu-standin")

OWN = str(Path(__file__).parent / "own.py")
SETTINGS = ["checkpoint.every_steps=2", "metrics.enabled=false"]


def test_pinned_batches_a_scaler_and_micro_batches_that_a_signal_ended_resume_to_the_bits_of_the_cpu(
    tmp_path: Path,
) -> None:
    words = {
        device: [OWN, str(tmp_path / device / "run"), "sync.name=ddp", f"device={device}", *SETTINGS]
        for device in ("cpu", "cuda")
    }
    calm = rehearsed(tmp_path / "cpu", words["cpu"], devices=0)
    scale = calm.ranks[0].output.partition("scale ")[2].split()[0]
    assert int(scale) < SCALE, "nothing has overflowed"
    with rehearsing(tmp_path / "cuda", words["cuda"], LOCKSTEP_TEST_FATE="1:5:TERM") as gang:
        assert gang.wait(240) == [75, 75], gang.output
    gang.assert_sound()
    again = rehearsed(tmp_path / "cuda", words["cuda"])
    assert "Resuming at step" in again.output and f"scale {scale}\n" in again.ranks[0].output
    assert differing(saved(tmp_path / "cuda" / "run"), saved(tmp_path / "cpu" / "run")) == []
    for rank, resumed in zip(gang.ranks, again.ranks):
        waits = collections.Counter(rank.counts["step"]) + collections.Counter(resumed.counts["step"])
        waits = collections.Counter({what: times for what, times in waits.items() if what not in READING})
        finite, overflowed = 5, 3
        assert waits == {
            "copy cpu->cuda pinned by data/pytree.py:to_device": 2 * (finite + overflowed),  # images and labels
            LOOK_FOR_NAN: finite + overflowed,
            "cudaStreamSynchronize by run/step.py:<genexpr>": 2 * overflowed,  # the losses of two micro-batches
            "cudaStreamSynchronize by run/step.py:_reject": overflowed,
            # At a save within the epoch, of the variable `batch`: changes of `tensor.data` are not counted.
            "cudaStreamSynchronize by run/variables.py:<listcomp>": 2 * 2,
            "cudaStreamSynchronize by run/batch_mean.py:_leaves_out": 4
            + 3,  # at the losses 1, 2, 4, 8 of each start, if it has so many
        }
