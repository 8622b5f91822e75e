"""Every launcher's variables, and what it shows of the GPUs: each rank works on its own, and touches no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu_rehearsal.rehearsal import Gang, rehearsed, rehearsing, settings

pytestmark = pytest.mark.promise("gpu-standin")

JOIN = ["-m", "tests.gpu_rehearsal.join"]
Place = tuple[int, int, int]
"""(rank, node, rank within the node)"""
BLOCK: list[Place] = [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
CYCLIC: list[Place] = [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
PAIR: list[Place] = [(0, 0, 0), (1, 0, 1)]
APART: list[Place] = [(0, 0, 0), (1, 1, 0)]


def _torchrun(rank: int, node: int, local: int, size: int, locals_: int) -> dict[str, str]:
    group = {"GROUP_RANK": str(node), "GROUP_WORLD_SIZE": str(size // locals_), "TORCHELASTIC_RUN_ID": "rehearsal"}
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(locals_),
        **group,
    }


def _slurm(rank: int, node: int, local: int, size: int, locals_: int) -> dict[str, str]:
    return {
        "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local), "SLURM_STEP_TASKS_PER_NODE": f"{locals_}(x{size // locals_})",
        "SLURM_STEP_NODELIST": f"n[0-{size // locals_ - 1}]",
    }  # fmt: skip


def _mpi(rank: int, node: int, local: int, size: int, locals_: int) -> dict[str, str]:
    names = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local, "LOCAL_SIZE": locals_}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()}


def _kubernetes(rank: int, node: int, local: int, size: int, locals_: int) -> dict[str, str]:
    """One process a container, which the operator tells no local rank."""
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(locals_)}


LAUNCHERS = {
    "torchrun": (_torchrun, PAIR),
    "torchrun on two nodes": (_torchrun, BLOCK),
    "slurm, block": (_slurm, BLOCK),
    "slurm, cyclic": (_slurm, CYCLIC),
    "slurm, a task a node": (_slurm, APART),
    "mpi": (_mpi, PAIR),
    "kubernetes": (_kubernetes, APART),
}


def _each(launcher: str, visible: str) -> tuple[list[Place], list[dict[str, str]]]:
    variables, places = LAUNCHERS[launcher]
    locals_ = max(local for _, _, local in places) + 1
    shown = {"all": None, "own": "{local}", "one": "1"}[visible]
    each = []
    for rank, node, local in places:
        own = {**variables(rank, node, local, len(places), locals_), "STANDIN_NODE": str(node)}
        if shown is not None:
            own["CUDA_VISIBLE_DEVICES"] = shown.format(local=local)
        each.append(own)
    return places, each


def _contexts(gang: Gang) -> list[list[int]]:
    """The machine's numbers of the GPUs that each process has touched."""
    return [[int(line.split("gpu=")[1].split()[0]) for line in rank.lines("CONTEXT")] for rank in gang.ranks]


@pytest.mark.parametrize("visible", ["all", "own", "one"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_each_rank_has_its_own_gpu(tmp_path: Path, launcher: str, visible: str) -> None:
    places, each = _each(launcher, visible)
    shared = visible == "one" and any(local for _, _, local in places)
    with rehearsing(tmp_path, [], each=each, program=JOIN) as gang:
        codes = gang.wait(60)
    if shared:
        first, second = (rank for rank, node, _ in places if node == 0)
        assert codes == [2] * len(places), gang.output
        assert f"ranks {first} and {second} share one GPU" in gang.output and "Traceback" not in gang.output
        return
    assert codes == [0] * len(places), gang.output
    gang.assert_sound()
    found = [json.loads(rank.output.splitlines()[-1]) for rank in gang.ranks]
    size = len(places)
    for (rank, _, local), said in zip(places, found):
        index = local if visible == "all" else 0
        assert said == {"rank": rank, "local": local, "device": f"cuda:{index}", "total": 4.0 * size * (size + 1) / 2}
    assert _contexts(gang) == [[1 if visible == "one" else local] for _, _, local in places]


@pytest.mark.parametrize("launcher", ["torchrun", "mpi"])
def test_fewer_gpus_than_ranks_are_one_line(tmp_path: Path, launcher: str) -> None:
    variables, _ = LAUNCHERS[launcher]
    each = [variables(rank, 0, rank, 3, 3) for rank in range(3)]
    with rehearsing(tmp_path, [], each=each, program=JOIN) as gang:
        assert gang.wait(60) == [2, 2, 2], gang.output
    assert "3 ranks on this node, but only 2 GPUs are visible: start 3 ranks" not in gang.output
    assert "3 ranks on this node, but only 2 GPUs are visible: start 2 ranks" in gang.output


def test_on_the_cpu_no_gpu_is_touched(tmp_path: Path, data_root: Path) -> None:
    """A context takes some hundred megabytes of a GPU that may be somebody else's."""
    words = ["run", "smoke", "--run-dir", str(tmp_path / "run"), *settings(data_root, device="cpu")]
    gang = rehearsed(tmp_path, words)
    assert _contexts(gang) == [[], []] and [rank.log for rank in gang.ranks] == [[], []]
