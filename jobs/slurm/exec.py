"""A command beside a rank of a SLURM job: a step of the same job, on the rank's node, with no resources of its own.

In a container the step has one of its own, from the job's image and with its folders: SLURM lets nobody into another's.
"""

from __future__ import annotations

import re
import uuid
from pathlib import PurePosixPath
from typing import Any

from lockstep.jobs import command as commands
from lockstep.jobs.foreground import Streams
from lockstep.jobs.slurm import query, render
from lockstep.jobs.slurm.query import ask, one_line
from lockstep.jobs.slurm.section import slurm
from lockstep.jobs.slurm.transport.base import Transport
from lockstep.jobs.spec.model import JobSpec
from lockstep.training.contract import ENV_JOB, ENV_LAUNCHER, UserError


def execute(
    transport: Transport, record: dict[str, Any], spec: JobSpec, rank: int, command: list[str], streams: Streams
) -> int:
    """The command's exit code.

    Raises:
        UserError: the job runs no more, or SLURM does not say where.
        Unreachable: the controller does not answer, or did not when the command had ended; or the connection was lost.
    """
    job_id, hosts = _place(transport, str(record["job_id"]))
    python = render.interpreter(spec, transport.place())
    if rank // spec.ranks >= len(hosts):
        raise UserError(f"{spec.name} has {len(hosts)} nodes, too few for rank {rank}")
    token = uuid.uuid4().hex
    options, words = render.container(spec, PurePosixPath(record["submitit"]), transport.place())
    on_node = step(options, job_id, hosts[rank // spec.ranks])
    inside = [*words, "env", "-u", ENV_LAUNCHER, f"{ENV_JOB}={record['job']}"]  # whose ranks it looks for
    terminal = ["--pty"] if streams.terminal else []
    own = commands.execute(python, rank, command, str(record["run_dir"]), "--token", token, *_flags(spec, rank))

    def interrupt(number: int) -> None:
        answer = ask(transport, *on_node, *inside, *commands.signal(python, token, number))
        if answer.returncode:
            raise UserError(f"cannot send signal {number} to the command: {one_line(answer.stderr)}")

    note = PurePosixPath(record["submitit"]) / f"exec-{token}"
    code = transport.attach([*on_node, *terminal, *inside, *own], streams, interrupt, note)
    if code:
        query.look(transport, job_id)  # raises `Unreachable`: then the code is the connection's and not the command's
    return code


def step(options: list[str], job_id: str, host: str) -> list[str]:
    """srun's words before a program on one of the job's nodes. `options`: of its container."""
    # Quiet: at Ctrl-C it would tell of its tasks, while the signal goes to the command another way.
    words = ["srun", f"--jobid={job_id}", "--overlap", "--quiet", "--nodes=1", "--ntasks=1", f"--nodelist={host}"]
    return [*words, "--job-name=lockstep-exec", *options]


def _flags(spec: JobSpec, rank: int) -> list[str]:
    """In a container of its own the rank's process may not be looked at: then this is what is known of it."""
    if slurm(spec).container is None:
        return []
    values = {
        "RANK": rank, "WORLD_SIZE": spec.nodes * spec.ranks, "LOCAL_RANK": rank % spec.ranks,
        "LOCAL_WORLD_SIZE": spec.ranks, "GROUP_RANK": rank // spec.ranks, "GROUP_WORLD_SIZE": spec.nodes,
    }  # fmt: skip
    return [word for name, value in values.items() for word in ("--env", f"{name}={value}")]


def _place(transport: Transport, job_id: str) -> tuple[str, list[str]]:
    """The id that srun takes (a part of an array has one of its own), and the job's nodes in the order of their ranks."""
    placed = query.answer(transport, "squeue", "-h", "-j", job_id, "-o", "%A|%N")
    own, _, nodes = next(iter(placed.splitlines()), "").partition("|")
    if not re.fullmatch(r"\d+", own) or not nodes:
        raise UserError(f"the SLURM job {job_id} runs on no node: it has ended, or has not started")
    return own, query.answer(transport, "scontrol", "show", "hostnames", nodes).split()
