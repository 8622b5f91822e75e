"""A loop of one's own on two GPUs that are none: the bits of the CPU, also after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu_rehearsal.rehearsal import differing, rehearsed, rehearsing, saved
from tests.processes import poll

OWN = ["-m", "tests.gpu_rehearsal.own"]
SETTINGS = ["checkpoint.every_steps=2", "metrics.enabled=false", "log.report=false"]


@pytest.mark.parametrize("strategy", ["flat", pytest.param("ddp", marks=pytest.mark.matrix)])
def test_killed_and_run_again_a_loop_of_ones_own_ends_in_the_bits_of_the_cpu(tmp_path: Path, strategy: str) -> None:
    folders = {device: tmp_path / device for device in ("cpu", "cuda")}
    words = {
        device: [str(folder / "run"), f"sync.name={strategy}", f"device={device}", *SETTINGS]
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
    assert all(rank.lines("COMMUNICATOR") for rank in gang.ranks), "nothing went through NCCL"
    assert differing(saved(folder / "run"), saved(folders["cpu"] / "run")) == []
