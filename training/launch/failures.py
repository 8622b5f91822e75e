"""Tells the ranks that still run which rank of this node has ended, and how: they need not wait to miss it.

It is said in the store where the ranks meet (`training.resilience.hang` reads it), so other nodes' ranks hear of it, too.
"""

from __future__ import annotations

import contextlib
import socket
import threading

from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.multiprocessing import PContext
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from training.launch.codes import FINAL, how
from training.parallel import stores

SECONDS = 2.0
"""Bound on it all: rank 0, which serves the store, may be the one that is lost, or stand still."""


def tell(group: WorkerGroup, processes: PContext | None) -> None:
    """Says it of each rank of this node that has failed. torch's agent ends the others as soon as it looks itself."""
    if not isinstance(processes, SubprocessContext) or not group.master_addr or not group.master_port:
        return
    codes = {local: handler.proc.poll() for local, handler in processes.subprocess_handlers.items()}
    # A rank that ends for good has said why, and the others end with it.
    failed = {group.workers[local].global_rank: code for local, code in codes.items() if code and code not in FINAL}
    alone = len(group.workers) == group.group_world_size == 1  # nobody is left to wait for it
    # Rank 0 serves a new store each time the ranks start. One of the agent's outlives them, and what is said in it, too.
    if not failed or alone or group.spec.rdzv_handler.use_agent_store:
        return
    # torch bounds the connection and not the first answer. Signals are heeded meanwhile.
    thread = threading.Thread(target=_tell, args=(group.master_addr, group.master_port, failed), daemon=True)
    thread.start()
    thread.join(SECONDS)


def _tell(host: str, port: int, failed: dict[int, int]) -> None:
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # torch's DistError among them: then they wait for it
        # Asked in Python first: where rank 0 is gone, this knows it at once, and torch's store only when the time is over.
        socket.create_connection((host, port), SECONDS).close()
        store = stores.tcp_store(host, port, serves=False, seconds=SECONDS)
        for rank, code in failed.items():
            store.set(stores.ended(rank), how(code))
