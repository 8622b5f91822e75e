"""What a launcher says of its ranks that have ended, to those that still run."""

from __future__ import annotations

import concurrent.futures
import socket
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from lockstep.training.launch import failures
from lockstep.training.parallel import stores

ENDS = ("sleep 600", "exit 0", "exit 75", "exit 2", "exit 7", "kill -9 $$")
TOLD = {4: "ended with exit code 7", 5: "ended by SIGKILL, by hand or because the memory was used up"}


@pytest.fixture
def processes() -> Iterator[SubprocessContext]:
    """A real process for each of `ENDS`."""
    started = [subprocess.Popen(["sh", "-c", end]) for end in ENDS]
    for process in started[1:]:
        process.wait(30)
    context = SubprocessContext.__new__(SubprocessContext)
    context.subprocess_handlers = {local: SimpleNamespace(proc=process) for local, process in enumerate(started)}  # type: ignore[misc]
    yield context
    started[0].kill()
    started[0].wait(30)


def group(port: int, agents: bool = False) -> Any:
    """The ranks 10 to 15 of 16, on one of two nodes."""
    workers = [SimpleNamespace(global_rank=10 + local) for local in range(len(ENDS))]
    spec = SimpleNamespace(rdzv_handler=SimpleNamespace(use_agent_store=agents))
    return SimpleNamespace(
        workers=workers, spec=spec, master_addr="127.0.0.1", master_port=port, group_world_size=2
    )  # fmt: skip


@pytest.mark.parametrize("agents", [False, True])
def test_a_rank_that_failed_is_told_and_one_that_ended_for_good_is_not(
    processes: SubprocessContext, agents: bool
) -> None:
    store = stores.tcp_store("127.0.0.1", 0, serves=True, seconds=10)
    those = group(store.port, agents)
    failures.tell(those, failures.failed(those, processes))
    seen = dist.PrefixStore("group", dist.PrefixStore("default_pg/0", store))  # as a rank has it
    base = stores.without_prefix(seen)
    told = {
        local: base.get(stores.ended(10 + local)).decode()
        for local in range(6)
        if base.check([stores.ended(10 + local)])
    }
    assert told == ({} if agents else TOLD)


def test_where_nobody_serves_the_store_nothing_is_waited_for(
    processes: SubprocessContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "tcp_store", lambda *_, **__: pytest.fail("torch's store waits until its time is over"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        those = group(free.getsockname()[1])
        failures.tell(those, failures.failed(those, processes))


def test_a_store_that_accepts_and_never_answers_is_not_waited_for(
    processes: SubprocessContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 was stopped: the kernel takes connections for it."""
    monkeypatch.setattr(failures, "SECONDS", 0.3)
    with socket.socket() as silent, concurrent.futures.ThreadPoolExecutor(1) as pool:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        those = group(silent.getsockname()[1])
        pool.submit(failures.tell, those, failures.failed(those, processes)).result(timeout=30)
