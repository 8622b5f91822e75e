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

pytestmark = pytest.mark.promise("named-rank")
ENDS = ("sleep 600", "exit 0", "exit 75", "exit 2", "exit 7", "kill -9 $$")


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


def _told(processes: SubprocessContext, port: int) -> None:
    """Tells of the ranks 10 to 15 of 16, on one of two nodes."""
    workers = [SimpleNamespace(global_rank=10 + local) for local in range(len(ENDS))]
    spec = SimpleNamespace(rdzv_handler=SimpleNamespace(use_agent_store=False))
    group: Any = SimpleNamespace(
        workers=workers, spec=spec, master_addr="127.0.0.1", master_port=port, group_world_size=2
    )
    failures.tell(group, failures.failed(group, processes))


def test_a_rank_that_failed_is_told_and_one_that_ended_for_good_is_not(processes: SubprocessContext) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before = store.num_keys()
    _told(processes, store.port)
    assert store.num_keys() - before == 2, "those of the exit codes 7 and -9"


@pytest.mark.parametrize("answers", ["nothing listens", "never answers"])
def test_a_store_that_does_not_answer_is_not_waited_for(
    processes: SubprocessContext, monkeypatch: pytest.MonkeyPatch, answers: str
) -> None:
    """Where rank 0 was stopped, the kernel takes connections for it."""
    monkeypatch.setattr(failures, "SECONDS", 0.3)
    with socket.socket() as silent, concurrent.futures.ThreadPoolExecutor(1) as pool:
        silent.bind(("127.0.0.1", 0))
        if answers == "never answers":
            silent.listen()
        pool.submit(_told, processes, silent.getsockname()[1]).result(timeout=30)
