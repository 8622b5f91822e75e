"""A command beside a rank of a SLURM job: a step of the same job, on the rank's node, with no resources of its own.

In a container the step has one of its own, from the job's image and with its folders: SLURM lets nobody into another's.
"""

from __future__ import annotations

import functools
import re
import uuid
from pathlib import Path
from typing import Any

from jobs import command as commands
from jobs.foreground import Streams
from jobs.slurm import query, render
from jobs.slurm.query import ask, one_line
from jobs.slurm.section import slurm
from jobs.spec.model import JobSpec
from jobs.status import Unreachable
from training.contract import ENV_JOB, ENV_LAUNCHER, UserError


def run(record: dict[str, Any], spec: JobSpec, rank: int, command: list[str], streams: Streams) -> int:
    """The command's exit code.

    Raises:
        UserError: the job runs no more, or SLURM does not say where.
        Unreachable: the controller does not answer, or did not when the command had ended.
    """
    job_id, hosts = _place(str(record["job_id"]))
    if rank // spec.ranks >= len(hosts):
        raise UserError(f"{spec.name} has {len(hosts)} nodes, too few for rank {rank}")
    token = uuid.uuid4().hex
    on_node = step(record, spec, job_id, hosts[rank // spec.ranks])
    inside = _inside(record, spec)
    terminal = ["--pty"] if streams.terminal else []
    words = [
        *on_node, *terminal, *inside,
        *commands.beside(render.interpreter(spec), rank, command, str(record["run_dir"]), "--token", token, *_flags(spec, rank)),
    ]  # fmt: skip
    code = query.attach(*words, streams=streams, interrupt=functools.partial(_send, [*on_node, *inside], spec, token))
    if code:
        query.look(job_id)  # raises `Unreachable`: then the code is the connection's and not the command's
    return code


def step(record: dict[str, Any], spec: JobSpec, job_id: str, host: str) -> list[str]:
    """srun's words before a program on one of the job's nodes."""
    options, _ = render.container(spec, Path(record["submitit"]))
    # Quiet: at Ctrl-C it would tell of its tasks, while the signal goes to the command another way.
    words = ["srun", f"--jobid={job_id}", "--overlap", "--quiet", "--nodes=1", "--ntasks=1", f"--nodelist={host}"]
    return [*words, "--job-name=lockstep-exec", *options]


def _inside(record: dict[str, Any], spec: JobSpec) -> list[str]:
    """Words before a program that has it run where the job runs, and know which job's ranks it looks for."""
    _, words = render.container(spec, Path(record["submitit"]))
    return [*words, "env", "-u", ENV_LAUNCHER, f"{ENV_JOB}={record['job']}"]


def _flags(spec: JobSpec, rank: int) -> list[str]:
    """In a container of its own the rank's process may not be looked at: then this is what is known of it."""
    if slurm(spec).container is None:
        return []
    values = {
        "RANK": rank, "WORLD_SIZE": spec.nodes * spec.ranks, "LOCAL_RANK": rank % spec.ranks,
        "LOCAL_WORLD_SIZE": spec.ranks, "GROUP_RANK": rank // spec.ranks, "GROUP_WORLD_SIZE": spec.nodes,
    }  # fmt: skip
    return [word for name, value in values.items() for word in ("--instead", f"{name}={value}")]


def _send(before: list[str], spec: JobSpec, token: str, number: int) -> None:
    told = ask(*before, *commands.to_beside(render.interpreter(spec), token, number))
    if told.returncode:
        raise UserError(f"cannot send signal {number} to the command: {one_line(told.stderr)}")


def _place(job_id: str) -> tuple[str, list[str]]:
    """The id that srun takes (a part of an array has one of its own), and the job's nodes in the order of their ranks."""
    told = ask("squeue", "-h", "-j", job_id, "-o", "%A|%N")
    if told.returncode != 0 and not query.UNKNOWN_JOB.search(told.stderr):
        raise Unreachable(f"the SLURM controller does not answer: {one_line(told.stderr)}")
    own, _, nodes = next(iter(told.stdout.splitlines()), "").partition("|")
    if not re.fullmatch(r"\d+", own) or not nodes:
        raise UserError(f"the SLURM job {job_id} runs on no node: it has ended, or has not started")
    hosts = ask("scontrol", "show", "hostnames", nodes).stdout.split()
    return own, hosts
