"""The rows of `doctor`: what SLURM's configuration does to a job without a word. sbatch itself tells about everything else."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial

from lockstep.training.contract import UserError

from ..spec.model import JobSpec
from ..status import Check
from .observe import NO_ACCOUNTING, one_line, output, run_slurm, unreachable


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


def rows(spec: JobSpec | None) -> list[Check]:
    """Returns the checks of the configuration, for `doctor` and for `submit --dry-run`."""
    return [*_guarded("accounting", _accounting), *_guarded("preemption", partial(_preemption, spec))]


def _guarded(name: str, question: Callable[[], Iterator[Check]]) -> list[Check]:
    checks: list[Check] = []
    try:
        checks.extend(question())
    except UserError as error:
        checks.append(Check(name, "cannot tell", one_line(str(error))))
    return checks


def _accounting() -> Iterator[Check]:
    done = run_slurm("sacct", "-X", "-n", "-S", "now")
    if done.returncode == 0:
        yield Check("accounting", "ok", "sacct answers")
    elif not NO_ACCOUNTING.search(done.stderr):
        raise unreachable(done)
    else:
        age = _setting(output("scontrol", "show", "config"), "MinJobAge") or "?"
        detail = f"there is none: jobs that ended are known for {age}, then from their own files only"
        yield Check("accounting", "warning", detail)


def _preemption(spec: JobSpec | None) -> Iterator[Check]:
    config = output("scontrol", "show", "config")
    mode = _setting(config, "PreemptMode")
    if mode == "OFF" or _setting(config, "PreemptType") in ("preempt/none", "(null)"):
        yield Check("preemption", "ok", "off: no job is preempted")
    elif "preempt_send_user_signal" in _setting(config, "SlurmctldParameters"):
        yield Check("preemption", "ok", f"{mode}, the job gets a signal before (preempt_send_user_signal)")
    else:
        detail = f"{mode}, without SlurmctldParameters=preempt_send_user_signal: the job gets SIGTERM only"
        yield Check("preemption", "warning", f"{detail}, and GraceTime must be long enough to save")
    allowed = re.match(r"\d+", _setting(config, "KillWait"))
    if allowed and int(allowed[0]) < 10:
        yield Check(
            "kill wait", "warning", f"KillWait {allowed[0]} s is short: a job that has not saved by then is killed"
        )
    if "CANCEL" in mode and (spec is None or spec.max_restarts):
        yield Check("requeue", "warning", "PreemptMode=CANCEL ends preempted jobs: submit again to resume")


def _setting(config: str, name: str) -> str:
    """Returns a setting of SLURM's configuration; "" if it is missing."""
    match = re.search(rf"^{name}\s*=\s*(.*)$", config, re.M)
    return match[1].strip() if match else ""
