"""Who a rank is, from the variables of each launcher, and contradictions among them."""

from __future__ import annotations

import os

import pytest
import torch

from lockstep.training.parallel.world import (
    World,
    choose_device,
    detect,
    first_host,
    joined,
    set_threads,
    tasks_per_node,
)
from tests.product import UserError

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1",
}  # fmt: skip
SLURM = {
    "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "node[07-08]", "SLURM_JOB_ID": "41",
}  # fmt: skip
MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
LAST_OF_FOUR, LAST_OF_TWO, ALONE = (3, 4, 1, 2, 1, 2), (1, 2, 1, 2, 0, 1), (0, 1, 0, 1, 0, 1)
NODE07 = ("node07", 12000 + 41 * 7)


@pytest.mark.promise("launchers")
@pytest.mark.parametrize(
    ("env", "place", "master"),
    [
        ({}, ALONE, None),
        (TORCHRUN, LAST_OF_FOUR, ("a", 1)),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, LAST_OF_TWO, ("127.0.0.1", 29500)),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0"}, (1, 2, 0, 1, 1, 2), ("job-master-0", 29500)),
        (SLURM, LAST_OF_FOUR, NODE07),
        ({**SLURM, "MASTER_ADDR": "x", "MASTER_PORT": "9"}, LAST_OF_FOUR, ("x", 9)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, LAST_OF_TWO, None),
        (MPI, LAST_OF_TWO, None),
        # mpirun in an allocation of one task, and srun that speaks PMI itself
        ({**SLURM, **MPI, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, LAST_OF_TWO, None),
        ({**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4"}, LAST_OF_FOUR, NODE07),
        # exported by a batch script before srun, or before mpiexec
        ({**SLURM, "WORLD_SIZE": "4", "MASTER_ADDR": "x", "MASTER_PORT": "9"}, LAST_OF_FOUR, ("x", 9)),
        ({**MPI, "WORLD_SIZE": "2"}, LAST_OF_TWO, None),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, ALONE, None),  # a batch script without srun
    ],
)
def test_each_launcher(env: dict[str, str], place: tuple[int, ...], master: tuple[str, int] | None) -> None:
    world = detect(env)
    assert (world.rank, world.size, world.local_rank, world.local_size, world.node, world.nodes) == place
    if master or world.size == 1:
        assert world.master == master
    else:
        assert world.master is not None and world.master[0] == "127.0.0.1" and 12000 <= world.master[1] < 32768


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"WORLD_SIZE": "2"}, "RANK"), ({**SLURM, "WORLD_SIZE": "8"}, "WORLD_SIZE=8, but slurm has started 4"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x'"), ({**TORCHRUN, "LOCAL_RANK": "5"}, "local rank 5 of 2"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "MASTER_PORT=99999"), ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR"),
        ({**MPI, "OMPI_COMM_WORLD_SIZE": "4"}, "MASTER_ADDR"), ({"PET_NPROC_PER_NODE": "2"}, "PET_NPROC_PER_NODE=2"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "two"}, "two"), ({**SLURM, "SLURM_STEP_NODELIST": "node[a-b]"}, r"node\[a-b\]"),
    ],
)  # fmt: skip
def test_a_contradiction_names_the_variables(env: dict[str, str], named: str) -> None:
    with pytest.raises(UserError, match=named):
        detect(env)


def test_slurm_notations() -> None:
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    lists = {
        "gpu[01-03,7],login,a[1-2]b": "gpu01",
        "rack[1-2]node[01-02]": "rack1node01",
        "a[1]b2[3,5],c": "a1b23",
        "n-1": "n-1",
    }
    assert {text: first_host(text) for text in lists} == lists
    for text in ("gpu[]", "gpu[1", "gpu1]", "a,,b", "a[1]-[x]"):
        with pytest.raises(UserError, match="node list"):
            first_host(text)


def test_threads_come_from_the_most_deliberate_source() -> None:
    before = torch.get_num_threads()
    try:
        torchrun = World(local_size=2, size=2, launcher="torchrun")
        assert set_threads(torchrun, 3, {"OMP_NUM_THREADS": "5"}) == "3 threads a rank (threads)"
        assert set_threads(torchrun, 0, {"LOCKSTEP_THREADS": "4"}) == "4 threads a rank (LOCKSTEP_THREADS)"
        assert set_threads(torchrun, 0, {"OMP_NUM_THREADS": "5"}) == "5 threads a rank (OMP_NUM_THREADS)"
        assert "cores / 2 ranks" in set_threads(torchrun, 0, {"OMP_NUM_THREADS": "1"})  # torchrun wrote that itself
    finally:
        torch.set_num_threads(before)


def test_a_rank_gets_its_own_gpu_or_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device(World(), "auto") == torch.device("cpu")
    with pytest.raises(UserError, match="no GPU is visible"):
        choose_device(World(), "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UserError, match=r"its visible GPUs \(1\)"):
        choose_device(World(local_rank=1, local_size=2, size=2), "auto")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert choose_device(World(local_rank=1, local_size=2, size=2), "auto") == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device(World(local_rank=1, local_size=2, size=2), "auto") == torch.device("cuda", 1)
    with pytest.raises(UserError, match=r"3 ranks on this node are more than its visible GPUs \(2\)"):
        choose_device(World(local_rank=2, local_size=3, size=3), "auto")
    assert choose_device(World(local_rank=2, local_size=3, size=3), "cpu") == torch.device("cpu")


def test_a_second_group_of_one_process_gets_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN | SLURM | MPI:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    before = dict(os.environ)
    for _ in range(2):
        with joined() as world:
            assert (world.launcher, world.local_rank) == ("Open MPI", 0)
            with pytest.raises(UserError, match="has joined a process group already"), joined():
                pass
        changed_names = {name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name)}
        assert changed_names <= {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
