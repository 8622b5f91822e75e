"""torch's elastic agent as it is from torch 2.12 on, also with an earlier torch.

To be replaced by `LocalElasticAgent` itself when torch 2.12 is the lowest version that Lockstep takes.
"""

from __future__ import annotations

import contextlib
import inspect
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

_KNOWN = inspect.signature(LocalElasticAgent._shutdown).parameters
_OPEN: dict[str, Any] = {"is_restart": True} if "is_restart" in _KNOWN else {}
"""Of a restart, torch 2.6 leaves the rendezvous open. Later versions always do."""


class _Earlier(LocalElasticAgent):
    """Before, ranks always had 30 s to end, and the agent closed the rendezvous before `Ending` has told the other nodes."""

    def __init__(self, *args: Any, shutdown_timeout: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self._shutdown_timeout = shutdown_timeout

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with _ignored_stays_ignored():
            return super()._start_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:  # noqa: ARG002
        self._shutdown(timeout=30)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None, **_: Any) -> None:
        if self._pcontext:
            self._pcontext.close(death_sig, self._shutdown_timeout if timeout is None else timeout)
        super()._shutdown(death_sig, **_OPEN)


@contextlib.contextmanager
def _ignored_stays_ignored() -> Iterator[None]:
    """Inside the block, a signal that nohup has us ignore gets no handler: else the ranks would not ignore it, either.

    torch 2.9 and before gives one to each of four signals, right before it starts the ranks.
    """
    install, ignored = signal.signal, {n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN}
    vars(signal)["signal"] = lambda number, handler: None if number in ignored else install(number, handler)
    try:
        yield
    finally:
        vars(signal)["signal"] = install


if TYPE_CHECKING or "shutdown_timeout" in inspect.signature(LocalElasticAgent.__init__).parameters:
    TorchAgent = LocalElasticAgent
else:
    TorchAgent = _Earlier
