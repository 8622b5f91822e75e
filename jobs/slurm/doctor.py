"""The rows of `doctor`: reasons why a job on SLURM does not run, does not restart, or is not visible."""

from __future__ import annotations

import getpass
import re
import secrets
import shlex
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from lockstep.training import contract
from lockstep.training.contract import UserError

from .. import records
from ..spec.model import JobSpec
from ..spec.types import Slurm
from ..status import Check, Unreachable
from . import render
from .observe import NO_ACCOUNTING, one_line, output, run_slurm, unreachable

NODE_SECONDS = 60
IMAGE_SECONDS = 600
PROGRAM = (
    "import sys, submitit.core._submit, lockstep.jobs.slurm.task, lockstep.training.contract as c; "
    "print(c.VERSION, *(open(name).read() for name in sys.argv[1:]))"
)
"""Program that imports a task's modules, and prints their version and the content of our files."""


def check(spec: JobSpec | None) -> list[Check]:
    """Returns the checks in order. If the controller does not answer, no further check follows."""
    try:
        version = run_slurm("sinfo", "--version").stdout.strip()
        run_slurm("sbatch", "--version")
        ping = run_slurm("scontrol", "ping")
    except UserError as error:
        return [Check("cluster", "missing", str(error))]
    output = one_line(ping.stdout + ping.stderr)
    if ping.returncode != 0 or " UP" not in ping.stdout:
        return [Check("cluster", "missing", f"the controller does not answer: {output}")]
    node = _guarded("folder", lambda: _folder(spec))
    return [Check("cluster", "ok", f"{version}, {output}"), *rows(spec), *node]


def rows(spec: JobSpec | None) -> list[Check]:
    """Returns the checks that SLURM's commands answer, for `doctor` and for `submit --dry-run`. Starts nothing on a node."""
    questions = {
        "partition": _partition,
        "gpus": _gpus,
        "account": _account,
        "accounting": _accounting,
        "preemption": _preemption,
    }
    return [row for name, question in questions.items() for row in _guarded(name, partial(question, spec))]


def _guarded(name: str, question: Callable[[], Iterator[Check]]) -> list[Check]:
    checks: list[Check] = []
    try:
        checks.extend(question())
    except (UserError, OSError) as error:
        checks.append(Check(name, "cannot tell", one_line(str(error))))
    return checks


def _rows(spec: JobSpec | None, form: str) -> list[list[str]]:
    """Returns sinfo's rows for the job's partition, or for the default partition."""
    partition = spec.slurm.partition if spec is not None else None
    wanted = ["-p", partition] if partition else []
    done = output("sinfo", "-h", "-N", *wanted, "-o", f"%P|{form}")
    rows = [line.split("|") for line in done.splitlines()]
    return rows if wanted else [row for row in rows if row[0].endswith("*")]


def _partition(spec: JobSpec | None) -> Iterator[Check]:
    rows = _rows(spec, "%a|%l|%T|%N")
    name = spec.slurm.partition if spec is not None else None
    if not rows:
        known = sorted({line.strip(" *") for line in output("sinfo", "-h", "-o", "%P").splitlines()})
        wanted = f"no partition {name}" if name else "no default partition: set slurm.partition"
        yield Check("partition", "missing", f"{wanted}; there are {', '.join(known) or 'none'}")
        return
    name = rows[0][0].rstrip("*")
    usable = [
        row for row in rows if not re.match(r"(down|drain|fail|maint|unknown|future)", row[3]) and "*" not in row[3]
    ]
    detail = f"{name}: {len(usable)} of {len(rows)} nodes usable, time limit {rows[0][2]}"
    if rows[0][1] != "up":
        yield Check("partition", "missing", f"{name} is {rows[0][1]}")
    elif spec is not None and len(usable) < spec.nodes:
        yield Check("partition", "missing", f"{detail}, the job takes {spec.nodes}")
    elif spec is not None and 0 < (limit := seconds(rows[0][2])) < spec.deadline_seconds:
        yield Check("partition", "missing", f"{detail}, the job asks for {spec.time_limit} ({limit} s are allowed)")
    else:
        yield Check("partition", "ok", detail)


def seconds(text: str) -> int:
    """Returns the seconds of SLURM's `1-12:30:00`, `12:30:00` or `30:00`; 0 for `infinite`."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if not match:
        return 0
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def _gpus(spec: JobSpec | None) -> Iterator[Check]:
    rows = _rows(spec, "%G|%N")
    wanted = spec.gpus if spec is not None else 0
    kind = spec.slurm.gpu_type if spec is not None else None
    counts = [_gpus_in(row[1], kind) for row in rows]
    named = f"{kind} GPUs" if kind else "GPUs"
    if not wanted:
        yield Check("gpus", "ok", f"{sum(count > 0 for count in counts)} nodes have {named}, the job asks for none")
        return
    assert spec is not None
    fit = sum(count >= wanted for count in counts)
    kinds = sorted({one for row in rows for one in re.findall(r"gpu:([A-Za-z]\w*):\d", row[1])})
    listed = f" (there are {', '.join(kinds)})" if kinds else ""
    detail = f"{fit} of {len(rows)} nodes have {wanted} {named}, the job needs {spec.nodes}{listed}"
    yield Check("gpus", "ok" if fit >= spec.nodes else "missing", detail)


def _gpus_in(gres: str, kind: str | None) -> int:
    """Returns the number of GPUs in a GRES text: `gpu:a100:4(S:0-1),shm:1` → 4."""
    counts = re.findall(r"gpu(?::([A-Za-z]\w*))?:(\d+)", gres)
    return sum(int(count) for name, count in counts if kind is None or name == kind)


def _account(spec: JobSpec | None) -> Iterator[Check]:
    done = run_slurm("sacctmgr", "-n", "-P", "show", "assoc", f"user={getpass.getuser()}", "format=Account,QOS")
    if done.returncode != 0:
        none = re.search(r"not running a supported accounting_storage plugin", done.stdout + done.stderr)
        detail = (
            "the cluster has no accounting (no slurmdbd)"
            if none
            else f"sacctmgr does not answer: {one_line(done.stderr)}"
        )
        yield Check("account", "cannot tell", detail)
        return
    rows = [line.split("|") for line in done.stdout.splitlines() if "|" in line]
    accounts, qos = {row[0] for row in rows}, {name for row in rows for name in row[1].split(",") if name}
    for what, wanted, known in (
        ("account", spec.slurm.account if spec else None, accounts), ("qos", spec.slurm.qos if spec else None, qos),
    ):  # fmt: skip
        listed = ", ".join(sorted(known)) or "none"
        if wanted is None:
            yield Check(what, "ok", f"the default; yours: {listed}")
        else:
            yield Check(what, "ok" if wanted in known else "missing", f"{wanted}; yours: {listed}")


def _accounting(spec: JobSpec | None) -> Iterator[Check]:  # noqa: ARG001 - every row is asked with the job
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


def _folder(spec: JobSpec | None) -> Iterator[Check]:
    """Writes a file here and has a node read it, with the interpreter, and in the image, that the job will use."""
    places = [records.make(records.folder("slurm"))]
    if spec is not None:
        places.append(Path(render.run_directory(spec)).parent)
        places[-1].mkdir(parents=True, exist_ok=True)
    word = secrets.token_hex(8)
    files = [folder / f".doctor-{word}" for folder in places]
    for file in files:
        file.write_text(word)
    own = spec.slurm if spec is not None else Slurm()
    python = render.interpreter(spec) if spec is not None else sys.executable
    options, words = render.container(spec, records.folder("slurm")) if spec is not None else ([], [])
    where = f"{python} in {own.image or spec.image}" if spec is not None and own.container is not None else python
    flags = (("-p", own.partition), ("-A", own.account), ("--qos", own.qos))
    options += [word for flag, value in flags if value for word in (flag, value)]
    command = [*words, python, "-c", PROGRAM]
    if own.container != "pyxis" and (own.modules or own.setup):  # as in the batch script, outside the image
        before = [f"module load {shlex.quote(name)}" for name in own.modules] + list(own.setup)
        command = ["bash", "-lc", "\n".join([*before, f'exec {shlex.join(command)} "$@"']), "doctor"]
    # The node may have to pull the image first.
    bound = NODE_SECONDS if own.container is None else IMAGE_SECONDS
    try:
        done = run_slurm("srun", "-N1", "-n1", "-t", str(bound // 60), f"--immediate={NODE_SECONDS // 2}", "-J", "lockstep-doctor",
            f"--chdir={render.base_folder()}", *options, *command, *map(str, files), seconds=bound,
        )  # fmt: skip
    except Unreachable:
        yield Check("node", "cannot tell", f"no node was free, or answered, within {bound} s")
        return
    finally:
        for file in files:
            file.unlink()
    seen = ", ".join(map(str, places))
    version, *read = done.stdout.split() or [""]
    if done.returncode == 0 and read == [word] * len(files):
        if version == contract.VERSION:
            yield Check("node", "ok", f"sees {seen} and runs {where}")
        else:
            yield Check(
                "node",
                "missing",
                f"{where} has Lockstep {version}, and this machine has {contract.VERSION}: use the same version",
            )
    elif "Unable to allocate" in done.stderr or "immediate" in done.stderr.lower():
        yield Check("node", "cannot tell", f"no node was free: {one_line(done.stderr)}")
    else:
        last = done.stderr.strip().splitlines() or ["it read something else"]
        errors = [line for line in last if "Error" in line] or last
        detail = f"a node cannot use {seen} with {where}: {errors[0][:200]}"
        if own.container is not None and "No module named" in errors[0]:
            detail += "; the image needs Lockstep and submitit, as the images of docker/ do"
        yield Check("node", "missing", detail)
