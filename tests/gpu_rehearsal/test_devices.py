"""Each rank works on the GPU that its launcher's variables and the visible GPUs name, and touches no other."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tests.gpu_rehearsal.rehearsal import Gang, rehearsed, rehearsing, settings
from tests.processes import ROOT

pytestmark = pytest.mark.promise("gpu-standin")

JOIN = """
import json
import torch
import torch.distributed as dist
from tests import product

with product.user_errors(), product.joined(30, "auto") as world:
    dist.barrier()  # with no tensor that says on which GPU
    total = torch.full((4,), float(world.rank + 1), device=world.device)
    dist.all_reduce(total)
    place = {"rank": world.rank, "local": world.local_rank, "device": str(world.device), "total": float(total.sum())}
    print(json.dumps(place), flush=True)
"""
Place = tuple[int, int, int]
"""(rank, node, rank within the node)"""
CYCLIC: list[Place] = [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
PAIR: list[Place] = [(0, 0, 0), (1, 0, 1)]
APART: list[Place] = [(0, 0, 0), (1, 1, 0)]


def _torchrun(rank: int, node: int, local: int, size: int, locals_: int) -> dict[str, str]:
    values = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": locals_, "GROUP_RANK": node}
    return {name: str(value) for name, value in values.items()}


def _slurm(rank: int, node: int, local: int, size: int, locals_: int) -> dict[str, str]:
    return {
        "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local), "SLURM_STEP_TASKS_PER_NODE": f"{locals_}(x{size // locals_})",
        "SLURM_STEP_NODELIST": f"n[0-{size // locals_ - 1}]",
    }  # fmt: skip


LAUNCHERS = {"torchrun": (_torchrun, PAIR), "a process a pod": (_torchrun, APART), "slurm, cyclic": (_slurm, CYCLIC)}


@pytest.fixture
def join(tmp_path: Path) -> list[str]:
    """A script that joins, sums over the ranks, and prints its place."""
    (tmp_path / "join.py").write_text(JOIN)
    return [str(tmp_path / "join.py")]


def _contexts(gang: Gang) -> list[list[int]]:
    """Returns the machine's numbers of the GPUs that each process has touched."""
    return [[int(line.split("gpu=")[1].split()[0]) for line in rank.lines("CONTEXT")] for rank in gang.ranks]


@pytest.mark.parametrize(
    ("launcher", "visible"), [*itertools.product(LAUNCHERS, ("all", "own")), ("a process a pod", "one")]
)
def test_each_rank_has_its_own_gpu(tmp_path: Path, join: list[str], launcher: str, visible: str) -> None:
    variables, places = LAUNCHERS[launcher]
    size, locals_ = len(places), max(local for _, _, local in places) + 1
    each = [{**variables(*place, size, locals_), "STANDIN_NODE": str(place[1])} for place in places]
    for (_, _, local), env in zip(places, each):
        env |= {"all": {}, "own": {"CUDA_VISIBLE_DEVICES": str(local)}, "one": {"CUDA_VISIBLE_DEVICES": "1"}}[visible]
    with rehearsing(tmp_path, join, each=each) as gang:
        codes = gang.wait(240)
    assert codes == [0] * size, gang.output
    gang.assert_sound()
    reports = [json.loads(rank.output.splitlines()[-1]) for rank in gang.ranks]
    for (rank, _, local), report in zip(places, reports):
        index = local if visible == "all" else 0
        assert report == {"rank": rank, "local": local, "device": f"cuda:{index}", "total": 4.0 * size * (size + 1) / 2}
    assert _contexts(gang) == [[1 if visible == "one" else local] for _, _, local in places]


def test_fewer_gpus_than_ranks_are_one_line(tmp_path: Path, join: list[str]) -> None:
    each = [_torchrun(rank, 0, rank, 3, 3) for rank in range(3)]
    with rehearsing(tmp_path, join, each=each) as gang:
        assert gang.wait(240) == [2, 2, 2], gang.output
    assert "3 ranks on this node are more than its visible GPUs (2): start 2" in gang.output


def test_on_the_cpu_no_gpu_is_touched(tmp_path: Path, data_root: Path) -> None:
    """A context takes some hundred megabytes of a GPU that may be another user's."""
    words = ["run", "smoke", "--run-dir", str(tmp_path / "run"), *settings(data_root, device="cpu")]
    gang = rehearsed(tmp_path, words)
    assert _contexts(gang) == [[], []] and [rank.log for rank in gang.ranks] == [[], []]


@pytest.mark.parametrize(("devices", "where"), [(4, "two GPUs a rank"), (2, "both halves on one cuda device")])
def test_the_toys_halves_end_in_the_parameters_of_one_process(tmp_path: Path, devices: int, where: str) -> None:
    with rehearsing(tmp_path, [str(ROOT / "examples/modules/toy.py")], devices=devices) as gang:
        assert gang.wait(240) == [0, 0], gang.output
    assert f"model parallel under DDP ({where}" in gang.ranks[0].output
    gpus = [set(gpus) for gpus in _contexts(gang)]
    if devices == 4:  # torch's gloo thread returns to GPU 0 after use of another GPU
        gpus[1].discard(0)
    assert gpus == [set(range(rank, devices, 2)) for rank in range(2)]
    assert [rank.lines("VIOLATION") for rank in gang.ranks] == [[], []]
