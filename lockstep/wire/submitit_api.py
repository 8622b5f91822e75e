"""All use of submitit's private interface: a new version is tested with this module first.

The upper bound in pyproject.toml is the newest tested version. submitit takes long to import, so each function imports it.
"""

from __future__ import annotations

import pickle
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

from lockstep.training.contract import UserError, first_line, to_stderr
from lockstep.training.limits import REQUEUE_SECONDS

PAYLOAD, SCRIPT = "submitted.pkl", "submission.sh"
"""Endings of the names of a job's files in submitit."""


def batch_script(folder: PurePath, python: str, parameters: dict[str, Any], elements: int = 1) -> str:
    """Returns the sbatch script for `AutoExecutor.update_parameters(**parameters)`. Needs no SLURM on this machine.

    Args:
        folder: submitit's folder of script, payload and logs.
        python: the shell words before `-u -m submitit.core._submit`.
        elements: elements of the job array; 1: no array.

    Raises:
        UserError: submitit does not take a parameter.
    """
    from submitit.slurm.slurm import SlurmExecutor

    class Writer(SlurmExecutor):
        @classmethod
        def affinity(cls) -> int:
            return 2  # to write a script no srun is needed

    writer = Writer(str(folder), python=python)
    generic = {name: value for name, value in parameters.items() if not name.startswith("slurm_")}
    own = {name.removeprefix("slurm_"): value for name, value in parameters.items() if name.startswith("slurm_")}
    stderr = {"stderr_to_stdout": generic.pop("stderr_to_stdout")}
    try:
        writer.update_parameters(**writer._convert_parameters(generic), **stderr, **own)
    except (TypeError, ValueError, NameError) as error:
        raise UserError(f"slurm.patch: {first_line(error)}") from None
    if elements > 1:
        writer.parameters["map_count"] = elements
    return writer._make_submission_file_text(writer._submitit_command_str, "")


def parameter_names() -> set[str]:
    """Returns the parameters of `update_parameters`, without `slurm_`."""
    from submitit.slurm.slurm import SlurmExecutor

    return set(SlurmExecutor._valid_parameters())


def payload(task: Any, minutes: int) -> bytes:
    """Returns the bytes that submitit unpickles on the nodes."""
    from submitit.core import utils

    delayed = utils.DelayedSubmission(task)
    delayed.set_timeout(minutes, 3)
    return pickle.dumps(delayed, protocol=4)


class Resumable:
    """A function that submitit starts again with the same arguments after a preemption or a time limit: its own Session resumes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **values: Any) -> Any:
        return self.function(*args, **values)

    def checkpoint(self, *args: Any, **values: Any) -> Any:
        """Returns the resubmission that submitit asks for."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, *args, **values)


def resumable(function: Callable[..., Any]) -> Resumable:
    """`function` for `executor.submit` of submitit, to be started again where a signal has ended the Session in it.

    Args:
        function: opens a `lockstep.Session` on a run directory that all nodes see. It and its arguments can be pickled.

    Examples:
        >>> executor = submitit.AutoExecutor(folder="submitit")
        >>> job = executor.submit(lockstep.resumable(main), "runs/mine")
    """
    return Resumable(function)


def go_on(handlers: Mapping[int, Any], received: str | None) -> None:
    """Lets submitit requeue the job, after its signal has ended a run and all ranks have saved.

    Rank 0 requeues, and its process ends. The others wait, since the end of a task may end the job before. Returns if submitit
    has not started this process, or another signal came. TERM is the end of the job, or the start of a requeue by SLURM itself.

    Args:
        handlers: those that the Session has replaced, by signal.
        received: the name of the signal that this process got first.
    """
    for number, handler in handlers.items():
        ours = type(getattr(handler, "__self__", None)).__module__ == "submitit.core.job_environment"
        if not ours or handler.__name__ != "checkpoint_and_try_requeue" or received != signal.Signals(number).name:
            continue
        if not hasattr(handler.__self__._delayed.function, "checkpoint"):
            to_stderr(
                "warning: submitit does not start a plain function again after its time limit: "
                "executor.submit(lockstep.resumable(main))"
            )
        handler(number, None)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(REQUEUE_SECONDS)
