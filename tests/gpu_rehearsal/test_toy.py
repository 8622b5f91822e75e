"""The toy's two halves on two GPUs of each rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu_rehearsal.rehearsal import rehearsing
from tests.processes import ROOT

pytestmark = pytest.mark.promise("gpu-standin")


@pytest.mark.parametrize(("devices", "where"), [(4, "two GPUs a rank"), (2, "both halves on one cuda device")])
def test_the_toy_ends_in_the_parameters_of_one_process(tmp_path: Path, devices: int, where: str) -> None:
    with rehearsing(tmp_path, [str(ROOT / "examples/modules/toy.py")], ranks=2, devices=devices) as gang:
        assert gang.wait(90) == [0, 0], gang.output
    assert f"model parallel under DDP ({where}" in gang.ranks[0].output
    touched = [{int(line.split("gpu=")[1].split()[0]) for line in rank.lines("CONTEXT")} for rank in gang.ranks]
    if devices == 4:  # torch's gloo goes back to GPU 0 in a thread of its own that has been on another
        touched[1].discard(0)
    assert touched == [set(range(rank, devices, 2)) for rank in range(2)]
    assert [rank.lines("VIOLATION") for rank in gang.ranks] == [[], []]
