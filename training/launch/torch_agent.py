"""torch's elastic agent as it is from torch 2.12 on, also with an earlier torch.

To be replaced by `LocalElasticAgent` itself when torch 2.12 is the lowest version that Lockstep takes.
"""

from __future__ import annotations

import inspect
import signal
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

    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:  # noqa: ARG002
        self._shutdown(timeout=30)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None, **_: Any) -> None:
        if self._pcontext:
            self._pcontext.close(death_sig, self._shutdown_timeout if timeout is None else timeout)
        super()._shutdown(death_sig, **_OPEN)


if TYPE_CHECKING or "shutdown_timeout" in inspect.signature(LocalElasticAgent.__init__).parameters:
    TorchAgent = LocalElasticAgent
else:
    TorchAgent = _Earlier
