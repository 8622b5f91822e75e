"""Several ranks' endings become one exit code of the launcher."""

from __future__ import annotations

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from lockstep.training.launch.codes import exit_code


def test_wrong_usage_beats_preempted_beats_failed() -> None:
    """Of ranks that have ended at the same moment; a real launcher seldom sees two."""

    def found(*codes: int) -> int:
        failures = {rank: ProcessFailure(rank, pid=0, exitcode=code, error_file="") for rank, code in enumerate(codes)}
        return exit_code(RunResult(state=WorkerState.FAILED if codes else WorkerState.SUCCEEDED, failures=failures))

    assert [found(), found(1), found(-9, 75), found(75, 2, 1), found(-11)] == [0, 1, 75, 2, 1]
