"""What `jobs/` (outside the job) and `training/` (inside it) agree on: names, ports, exit codes.

Standard library only, so that both sides import it at no cost.
"""

from __future__ import annotations

from pathlib import Path

VERSION = "0.1.0"

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
"""Wrong usage, config or data. Running it again gives the same error, so nobody may retry it."""
EXIT_PREEMPTED = 75
"""The state is saved; run the same command again to go on (sysexits.h: EX_TEMPFAIL)."""
EXIT_TIMED_OUT = 124
"""The job's time limit is over (as timeout(1) says it)."""

ENV_THREADS = "LOCKSTEP_THREADS"
ENV_METRICS_PORT = "LOCKSTEP_METRICS_PORT"
ENV_FILE_SD = "LOCKSTEP_FILE_SD"
"""Folder that Prometheus watches for targets (`file_sd_configs`), shared by the nodes of a cluster without discovery."""
ENV_LAUNCHER = "LOCKSTEP_LAUNCHER"
"""Process id of the launcher, whose death ends its ranks."""
ENV_RESTARTS = "LOCKSTEP_RESTARTS"
"""How often the launcher has started the ranks before, for whatever reason; set by `python -m training launch`."""
ENV_REVISION = "LOCKSTEP_REVISION"
"""The source's revision, where it was installed without its history (container images)."""

METRICS_PORT = 9470
"""Base port of the metrics servers, plus the local rank. 9400 belongs to dcgm-exporter."""
MASTER_PORT = 29500

RUN_FILE = "run.yaml"
STATUS_FILE = "status.json"
EVENTS_FILE = "events.jsonl"
SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"
STOP_FILE = "STOP"
CHECKPOINTS = "checkpoints"
ENDPOINTS = "endpoints"
METRICS = "metrics"

RUN_ENVIRONMENT = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_NNODES",
    "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", ENV_THREADS, ENV_METRICS_PORT, ENV_RESTARTS,
)  # fmt: skip
"""The only environment variables that `run.yaml` records: an allowlist, so that no secret reaches a file."""


class UserError(Exception):
    """Something that the person who started the run can mend. Ends the process with exit code 2.

    The message is one line: what was found, what was expected, what to do. `shared` says that every rank has the same
    one, so that rank 0 alone prints it.
    """

    shared = False


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def endpoint_file(run_dir: Path, rank: int) -> Path:
    """`{host, port, pid}` of a rank's metrics server, for as long as it runs."""
    return run_dir / ENDPOINTS / f"rank-{rank:05d}.json"


def textfile(run_dir: Path, rank: int) -> Path:
    """A rank's metrics in Prometheus' text format: what it served last."""
    return run_dir / METRICS / f"rank-{rank:05d}.prom"
