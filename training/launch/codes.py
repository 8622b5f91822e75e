"""How the ranks of a node ended: the exit code, for people and for clusters, and who was killed."""

from __future__ import annotations

import signal
from collections.abc import Container, Mapping

from torch.distributed.elastic.agent.server.api import RunResult

from lockstep.training.contract import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, EXIT_USAGE

FINAL = (EXIT_USAGE, EXIT_PREEMPTED)
"""Codes of a rank after which the gang is not started again."""


_AGENTS = (signal.SIGTERM, signal.SIGKILL)
"""With these torch's agent ends the other ranks."""


def exit_code(result: RunResult) -> int:
    """The gang's ending as one code: wrong usage beats preempted beats failed."""
    if not result.is_failed():
        return EXIT_DONE
    ended = _ended(result)
    return next((code for code in FINAL if code in ended), EXIT_FAILED)


def cluster_code(code: int, scheme: str, attempt: int, max_restarts: int) -> int:
    """What the cluster must see. Kubernetes' `restartPolicy: ExitCode` retries codes of 128 and above only.

    Args:
        attempt: how often this node was restarted so far, within the pod and by replacing it.
    """
    if scheme == "plain" or code in (EXIT_DONE, EXIT_USAGE):
        return code
    if code == EXIT_PREEMPTED:
        return 128 + signal.SIGTERM
    return 138 if attempt < max_restarts else EXIT_FAILED


def forget_ended(result: RunResult, failed: Mapping[int, int]) -> None:
    """Drops the 75 of ranks that the agent has ended because another one had failed: nobody has asked them to save.

    Args:
        failed: rank → exit code, of those that had failed before.
    """
    if failed and set(FINAL).isdisjoint(failed.values()):
        for rank, failure in list(result.failures.items()):
            if rank not in failed and failure.exitcode == EXIT_PREEMPTED:
                del result.failures[rank]


def too_early(result: RunResult, signalled: int | None) -> str:
    """The signal that was handed on to a rank and ended it: it was importing still, so nothing is lost. Else "".

    A rank that has begun catches all of them.
    """
    return signal.Signals(signalled).name if signalled is not None and -signalled in _ended(result) else ""


def deaths(result: RunResult, signalled: int | None, failed: Container[int] = (), ours: bool = True) -> list[str]:
    """A sentence for each rank that failed by itself: not by the signal that was handed on to it, nor by the agent's, which
    ends the others. Nor for a rank with a `FINAL` code: it has said why.

    Args:
        failed: ranks that had failed when the agent was about to end the others. Empty where the first one failed after
            that: then SIGTERM is the agent's, if another rank ended otherwise.
        ours: the ranks are `python -m lockstep.training run`, which say themselves why they end with a code.
    """
    by_itself = any(-failure.exitcode not in _AGENTS for failure in result.failures.values())
    agents = _AGENTS if failed else (signal.SIGTERM,) if by_itself else ()
    sentences = []
    for rank, failure in sorted(result.failures.items()):
        code = failure.exitcode
        by_agent = -code in agents and rank not in failed
        if -code != signalled and not by_agent and (code < 0 or not ours) and code not in FINAL:
            sentences.append(f"rank {rank} {'was ' if code < 0 else ''}{how(code)}")
    return sentences


def how(code: int) -> str:
    """How a process has ended, by its exit code as Python gives it: negative for a signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    hint = ", by hand or because the memory was used up" if -code == signal.SIGKILL else ""
    return f"ended by {_name(-code)}{hint}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _ended(result: RunResult) -> set[int]:
    return {failure.exitcode for failure in result.failures.values()}
