"""The rows of `doctor` about the cluster. sbatch itself says why a job would not start."""

from __future__ import annotations

import re

from lockstep.training.contract import UserError

from ..status import Check
from .observe import one_line, output, run_slurm


def cluster() -> Check:
    """Returns a row for the controller. If it is `missing`, no further check can answer."""
    try:
        version = run_slurm("sinfo", "--version").stdout.strip()
        run_slurm("sbatch", "--version")
        ping = run_slurm("scontrol", "ping")
    except UserError as error:
        return Check("cluster", "missing", str(error))
    answer = one_line(ping.stdout + ping.stderr)
    if ping.returncode != 0 or " UP" not in ping.stdout:
        return Check("cluster", "missing", f"the controller does not answer: {answer}")
    return Check("cluster", "ok", f"{version}, {answer}")


def preemption() -> Check:
    """Returns a row that says how a preempted job ends."""
    try:
        config = output("scontrol", "show", "config")
    except UserError as error:
        return Check("preemption", "cannot tell", one_line(str(error)))
    match = re.search(r"^PreemptMode\s*=\s*(\S+)", config, re.M)
    mode = match[1] if match else "OFF"
    if "CANCEL" in mode:
        return Check("preemption", "warning", f"{mode}: a preempted job ends, submit it again to resume")
    return Check("preemption", "ok", mode)
