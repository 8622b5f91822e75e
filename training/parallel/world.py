"""The place of this process among the ranks. Only this module reads RANK, SLURM_*, OMPI_*, PMI_* and SUBMITIT_LOCAL_*.

    world = detect(os.environ)          # pure: World(rank, size, local_rank, local_size, node, nodes, …).
    with joined(world, "auto", 600):    # the process group: gloo for CPU tensors, NCCL for CUDA tensors.
        ...

Nothing set means one rank; a contradiction is an error that names the variables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from ..contract import (
    ENV_LIVE,
    ENV_REPLACEMENT,
    ENV_THREADS,
    EXIT_FAILED,
    MASTER_PORT,
    UserError,
    user_errors,
)
from . import process, stores
from .cores import cores
from .live import World as World  # the module that users import


def detect(env: Mapping[str, str]) -> World:
    """Reads the launcher's variables: torchrun's, SLURM's (inside a step), Open MPI's, PMI's, those of submitit's local tasks.

    Raises:
        UserError: a variable is missing, is not a number, or contradicts another.
    """
    processes = env.get("PET_NPROC_PER_NODE", "")
    if processes.isdigit() and int(processes) > 1 and "TORCHELASTIC_RUN_ID" not in env:
        raise UserError(
            f"PET_NPROC_PER_NODE={processes} asks for a launcher, but this process was started without one: "
            "start `python -m lockstep.training launch run …` (or torchrun) in the container"
        )
    if "RANK" in env:
        return _from_torchrun(env)
    world = _without_rank(env)
    # A batch script may export it for all the ranks that srun starts.
    if "WORLD_SIZE" in env and world.launcher == "none":
        return _from_torchrun(env)  # which names what is missing
    if env.get("WORLD_SIZE", str(world.size)) != str(world.size):
        raise UserError(
            f"WORLD_SIZE={env['WORLD_SIZE']}, but {world.launcher} has started {world.size} ranks: remove WORLD_SIZE"
        )
    return world


def _without_rank(env: Mapping[str, str]) -> World:
    mpi = next(((launcher, names) for launcher, names in _MPI.items() if names[0] in env), None)
    if mpi is None and env.get("SUBMITIT_EXECUTOR") == "local" and "SUBMITIT_LOCAL_GLOBALID" in env:
        return _from_submitit(env)  # also within a step of SLURM, whose variables all its tasks have alike
    if "SLURM_STEP_ID" in env and "SLURM_PROCID" in env:
        # mpirun inside an allocation: its ranks inherit the variables of the SLURM step. If srun itself speaks PMI, both
        # agree, and SLURM's variables say more.
        slurm_rank = (env["SLURM_PROCID"], env.get(_tasks(env)))
        if mpi is None or slurm_rank == (env[mpi[1][0]], env.get(mpi[1][1])):
            return _from_slurm(env)
    return World() if mpi is None else _from_mpi(env, *mpi)


def _from_torchrun(env: Mapping[str, str]) -> World:
    rank, size = _number(env, "RANK", "torchrun sets both RANK and WORLD_SIZE"), _number(env, "WORLD_SIZE")
    master = _master(env)
    if "LOCAL_RANK" in env:
        local_rank = _number(env, "LOCAL_RANK")
        local_size = _number(env, "LOCAL_WORLD_SIZE", default=local_rank + 1)
    elif master is None or master[0] in ("127.0.0.1", "localhost", "::1"):
        local_rank, local_size = rank, size  # a script that spawns its ranks on one machine
    else:
        local_rank, local_size = 0, 1  # one process a container, as PyTorchJob starts it
    if master is None:
        if size > local_size:
            raise UserError(
                f"WORLD_SIZE={size} spans several nodes, but MASTER_ADDR is not set: set it to rank 0's host"
            )
        master = ("127.0.0.1", _port(env, MASTER_PORT))
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "environment"
    world = _checked(rank, size, local_rank, local_size, master, launcher, ("RANK", "WORLD_SIZE"))
    world.node = _number(env, "GROUP_RANK", default=world.node)
    world.nodes = _number(env, "GROUP_WORLD_SIZE", default=world.nodes)
    return world


def _tasks(env: Mapping[str, str]) -> str:
    return "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"


def _from_slurm(env: Mapping[str, str]) -> World:
    rank, tasks = _number(env, "SLURM_PROCID"), _tasks(env)
    size = _number(env, tasks, "srun sets it")
    node = _number(env, "SLURM_NODEID", default=0)
    per_node = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", str(size))))
    local_rank = _number(env, "SLURM_LOCALID", default=rank)
    local_size = per_node[node] if node < len(per_node) else size
    master = _master(env)
    if master is None:
        hosts = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", ""))
        host = first_host(hosts) if len(per_node) > 1 and hosts else "127.0.0.1"
        # Below Linux's ephemeral ports (32768 and up), so that no client socket sits on it already.
        job, step = env.get("SLURM_JOB_ID", "0"), env.get("SLURM_STEP_ID", "0")
        spread = int(job) * 7 + (int(step) if step.isdigit() else 0) if job.isdigit() else 0
        master = (host, _port(env, 12000 + spread % 20000))
    world = _checked(rank, size, local_rank, local_size, master, "slurm", ("SLURM_PROCID", tasks))
    world.node, world.nodes = node, len(per_node)
    return world


def _from_submitit(env: Mapping[str, str]) -> World:
    """Returns the world of a task of `cluster="local"`, whose tasks are all on this machine."""
    names = ("SUBMITIT_LOCAL_GLOBALID", "SUBMITIT_LOCAL_NTASKS")
    rank, size = _number(env, names[0]), _number(env, names[1], "submitit sets it")
    local_rank = _number(env, "SUBMITIT_LOCAL_LOCALID", default=rank)
    port = 12000 + _number(env, "SUBMITIT_LOCAL_JOB_ID") * 7 % 20000
    return _checked(rank, size, local_rank, size, _master(env) or ("127.0.0.1", _port(env, port)), "submitit", names)


_MPI = {
    "Open MPI": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "PMI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


def _from_mpi(env: Mapping[str, str], launcher: str, names: tuple[str, ...]) -> World:
    rank, size = _number(env, names[0]), _number(env, names[1], "mpiexec sets it")
    local_rank, local_size = _number(env, names[2], default=rank), _number(env, names[3], default=size)
    master = _master(env)
    if master is None:
        if local_size < size:
            raise UserError(
                f"{names[1]}={size} and {names[3]}={local_size}: several nodes, but MASTER_ADDR is not set; "
                "pass the host of rank 0, e.g. mpiexec -x MASTER_ADDR=node1 …"
            )
        # Every rank of one mpiexec has the same parent on one node: that tells two runs on a machine apart.
        master = ("127.0.0.1", _port(env, 12000 + os.getppid() % 20000))
    return _checked(rank, size, local_rank, local_size, master, launcher, names[:2])


def _checked(
    rank: int, size: int, local_rank: int, local_size: int, master: tuple[str, int], launcher: str, names: tuple[str, ...],
) -> World:  # fmt: skip
    """Checks a world and completes it. Without other information, all nodes have as many ranks as this node."""
    if not 0 <= rank < size:
        raise UserError(f"{names[0]}={rank} but {names[1]}={size}: ranks count from 0 to {names[1]} − 1")
    if not 0 <= local_rank < local_size <= size:
        raise UserError(
            f"local rank {local_rank} of {local_size} contradicts {names[0]}={rank}, {names[1]}={size}: "
            "check LOCAL_RANK and LOCAL_WORLD_SIZE"
        )
    return World(
        rank=rank, size=size, local_rank=local_rank, local_size=local_size, node=rank // local_size, nodes=size // local_size,
        master=master, launcher=launcher, initial_rank=rank,
    )  # fmt: skip


def _number(env: Mapping[str, str], name: str, hint: str = "", default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        present = ", ".join(f"{key}={env[key]}" for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if key in env)
        raise UserError(f"{name} is not set{f' beside {present}' if present else ''}{f': {hint}' if hint else ''}")
    if not re.fullmatch(r"\d{1,9}", text):
        raise UserError(f"{name}={text!r} is not a whole number")
    return int(text)


def _port(env: Mapping[str, str], default: int) -> int:
    port = _number(env, "MASTER_PORT", default=default)
    if not 0 < port < 65536:
        raise UserError(f"MASTER_PORT={port} is not a port (1 … 65535)")
    return port


def _master(env: Mapping[str, str]) -> tuple[str, int] | None:
    return (env["MASTER_ADDR"], _port(env, MASTER_PORT)) if env.get("MASTER_ADDR") else None


def tasks_per_node(text: str) -> list[int]:
    """Returns the counts of SLURM's compressed form: `2(x3),1` → [2, 2, 2, 1]. Raises `UserError`."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part.strip())
        if not match:
            raise UserError(f"SLURM_TASKS_PER_NODE={text!r} is not of the form 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(text: str) -> str:
    """Returns the first node of SLURM's compressed list: `gpu[01-03,7],login` → gpu01. Raises `UserError`."""
    if not re.fullmatch(rf"{_HOSTS}(,{_HOSTS})*", text):
        raise UserError(f"SLURM's node list {text!r} is not of the form node[01-03,7]")
    first = re.match(_HOSTS, text)
    assert first is not None
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", first[0])


_RANGES = r"\d{1,6}(-\d{1,6})?"
_HOSTS = rf"(?:[^,\[\]]|\[{_RANGES}(?:,{_RANGES})*\])+"
"""Pattern of one name, or of the names of several nodes."""


def set_threads(world: World, wanted: int, env: Mapping[str, str], exact: bool = False) -> str:
    """Sets the rank's threads: its share of the node's cores, or one with `exact`. Returns a sentence about the number.

    `wanted` > 0 wins, then LOCKSTEP_THREADS, then OMP_NUM_THREADS – except the 1 that torchrun writes by itself.

    Args:
        exact: whether the bits must not depend on the number of ranks; they change with the number of threads. OMP_NUM_THREADS does
            not count then, because clusters set it by the cores of a task.
    """
    omp = env.get("OMP_NUM_THREADS", "")
    by_torchrun = world.launcher == "torchrun" and omp == "1" and world.local_size > 1
    if wanted:
        threads, source = wanted, "threads"
    elif env.get(ENV_THREADS, "").isdigit() and int(env[ENV_THREADS]):
        threads, source = int(env[ENV_THREADS]), ENV_THREADS
    elif exact:
        threads, source = 1, "sync.name=exact; threads=N for more, at every number of ranks the same"
    elif omp.isdigit() and int(omp) and not by_torchrun:
        threads, source = int(omp), "OMP_NUM_THREADS"
    else:
        available = cores()
        threads = max(1, available // world.local_size)
        source = f"{available} cores / {world.local_size} ranks" if world.local_size > 1 else f"{available} cores"
    torch.set_num_threads(threads)
    return f"{threads} thread{'s' if threads > 1 else ''} a rank ({source})"


def choose_device(world: World, wanted: str, shares: bool = False) -> torch.device:
    """Returns the rank's device, for `wanted` cpu, cuda or auto. Raises `UserError` without a GPU for cuda, or with too few GPUs.

    Args:
        shares: whether several ranks may use the same GPU.
    """
    count = torch.cuda.device_count() if wanted != "cpu" else 0
    if wanted == "cuda" and count == 0:
        raise UserError("device is cuda, but no GPU is visible: use device=cpu, or check CUDA_VISIBLE_DEVICES")
    if count == 0:
        return torch.device("cpu")
    if shares:
        return torch.device("cuda", world.local_rank % count)
    own = count == 1 and "CUDA_VISIBLE_DEVICES" in os.environ  # by which a launcher may show each rank its own GPU
    if world.local_size > count and not own:  # all ranks of the node say so
        raise UserError(
            f"{world.local_size} ranks on this node are more than its visible GPUs ({count}): start {count}, or set backend=gloo, with "
            "which ranks share a GPU"
        )
    return torch.device("cuda", world.local_rank if count > 1 else 0)


@contextlib.contextmanager
def joined(
    world: World | None = None, device: str = "auto", timeout: float = 600.0, backend: str = "auto",
) -> Iterator[World]:  # fmt: skip
    """Joins the process group (of one rank, without a launcher) and leaves it at the end.

    Without a world, the function detects it from the environment, and sets the rank's share of the node's cores.

    Args:
        backend: `auto`: NCCL for tensors on GPUs. `gloo`: ranks may share a GPU.

    Raises:
        UserError: there is no GPU, or this node has more ranks than GPUs; or this process has joined already.
        torch.distributed.DistError: the ranks did not meet.
    """
    if dist.is_initialized():
        raise UserError(
            "this process has joined a process group already: remove init_process_group(), or leave the group with "
            "torch.distributed.destroy_process_group() before"
        )
    if world is None:
        world = detect(os.environ)
        set_threads(world, 0, os.environ)
    if (replacement := os.environ.get(ENV_REPLACEMENT, "")).isdigit() and int(replacement):
        # Alone until the others admit it, and never rank 0: the run directory is theirs.
        world = dataclasses.replace(world, rank=world.size, size=1, replacement=int(replacement))
    chosen = choose_device(world, device, shares=backend == "gloo")
    nccl = chosen.type == "cuda" and backend == "auto" and not os.environ.get(ENV_LIVE)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if world.nodes == 1:  # gloo and NCCL stay on this machine, unless their variables name an interface
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo" if sys.platform == "linux" else "lo0")
    # Imported later (torch.optim does so), it takes the group as default arguments of its functions and keeps it alive:
    # gloo's threads then outlive `destroy_process_group`, and one that drops a tensor while Python ends aborts the process.
    importlib.import_module("torch.distributed.nn.functional")
    leave = dist.destroy_process_group
    try:
        store = _store(world, timeout)
        # With a device NCCL opens its communicator here, and on that one: else torch guesses `rank modulo GPUs`. A rank that is alone opens
        # one where a strategy asks for it: `ddp` sums gradients on the GPU, and gloo would take them over the host.
        of_store = process.connections()
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if nccl else "gloo", store=store, rank=min(world.rank, world.size - 1),
                world_size=world.size, timeout=timedelta(seconds=timeout),
                device_id=chosen if nccl and world.size > 1 else None,
            )  # fmt: skip
        except dist.DistError:
            raise
        except Exception as error:
            # gloo takes addresses and their lengths from the store, and every host that reaches its port may write there. For an
            # invalid value gloo raises a MemoryError or another plain exception of C++.
            raise dist.DistError(f"the process group cannot be opened: {error}") from error
        opened = process.new_connections(of_store)
        process.keep_from_children(opened)
        yield dataclasses.replace(world, device=chosen, nccl=nccl, peers={} if nccl else opened)
    except BaseException as error:
        done = isinstance(error, SystemExit) and not error.code
        if nccl and not done:
            # Destroyed, NCCL would wait for kernels that wait for a rank which may not come.
            leave = dist.distributed_c10d._abort_process_group
        raise
    finally:
        if world.size > 1:
            gc.collect()  # networks that hold the group, and with it threads that may still drop a tensor
        if dist.is_initialized():  # else this rank has left it, and could not meet the others again
            leave()


_GROUPS = itertools.count()
"""Indices of this process's groups. All ranks join the same number of groups."""
_STORES: dict[tuple[str, int, bool], dist.TCPStore] = {}
"""(host, port, whether this process serves it) → store. Later groups use the same store. With a new store, a rank that joins early
would reach the server of the group before, which is about to end."""


def _store(world: World, timeout: float) -> dist.Store:
    if world.master is None or world.replacement:
        return dist.HashStore()
    # Under torchrun its agent serves the store, unless a variable leaves that to rank 0.
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = world.leader and not of_agent
    key = (*world.master, serves)
    if key not in _STORES:
        _STORES[key] = stores.tcp_store(*world.master, serves=serves, seconds=timeout, size=world.size)
    store = _STORES[key]
    store.set_timeout(timedelta(seconds=timeout))
    if os.environ.get(ENV_LIVE) and store.check([stores.generation(1)]):
        store.set(stores.AGAIN, "1")
        raise UserError(
            "ranks were lost in an earlier Session of this script, and the next one begins with all of them: all ranks have to start again",
            code=EXIT_FAILED,
        )
    # It outlives the ranks' group, the agent's also their restart. With it stay addresses, and the ranks' reports on their run.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if of_agent else "0"
    return dist.PrefixStore(f"default_pg/{attempt}/{next(_GROUPS)}", store)


@contextlib.contextmanager
def script() -> Iterator[World]:
    """Runs `joined` for a user's program: an error that the user can correct is one line, and exit code 2."""
    with user_errors(), joined() as world:
        yield world
