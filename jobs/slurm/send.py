"""Hands a job, or the elements of an array, to sbatch: submitit writes the script and the payloads."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from jobs.slurm import query, render
from jobs.slurm.task import TrainingTask
from jobs.spec.model import JobSpec
from training.contract import OF_A_JOB, UserError


def send(spec: JobSpec, folder: Path, tasks: list[TrainingTask], after: str | None) -> list[str]:
    """Submits and returns the job's ids, one a task. Raises `UserError` with what sbatch says."""
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise UserError(
            "sbatch is not installed here: submit from a node of a SLURM cluster, see `lockstep doctor slurm`"
        )
    import submitit
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    executor = submitit.AutoExecutor(folder=folder, cluster="slurm", slurm_python=render.python(spec, folder))
    try:
        values = render.parameters(spec, folder, after)
        executor.update_parameters(**values)
        # It leaves out what is None, and then sends a key of its own, which most sites refuse.
        executor._executor.parameters["wckey"] = values["slurm_wckey"]
    except (TypeError, ValueError, NameError) as error:
        raise UserError(f"slurm.patch: {str(error).splitlines()[0]}") from None
    with _clean_environment():
        try:
            if len(tasks) == 1:
                return [executor.submit(tasks[0]).job_id]
            return [job.job_id for job in executor.submit_array(tasks)]
        except OSError as error:
            raise UserError(f"cannot write to {folder}: {error.strerror}; set LOCKSTEP_HOME") from None
        except (FailedJobError, FailedSubmissionError) as error:
            told = [line for line in str(error).splitlines() if "error:" in line] or [query.one_line(str(error))]
            text = "; ".join(line.split("error:", 1)[-1].strip() for line in told)
            raise UserError(f"SLURM refuses {spec.name}: {query.one_line(text)}") from None


@contextlib.contextmanager
def _clean_environment() -> Iterator[None]:
    """sbatch reads SBATCH_* above the script, and an outer job's SLURM_* would contradict the new one's; what marks the
    processes of an outer job would mark the new one's."""
    away = {
        name: value for name, value in os.environ.items()
        if name in OF_A_JOB or (name.startswith(("SBATCH_", "SLURM_")) and name not in ("SLURM_CONF", "SLURM_CLUSTERS", "SBATCH_ACCOUNT"))
    }  # fmt: skip
    for name in away:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(away)
