"""Hands a job, or the elements of an array, to sbatch: submitit writes the script and the payloads.

All that a job needs is sent first, beside its place. One script, on the cluster's side, then puts it there, calls sbatch and
notes the answer: a connection that breaks leaves nothing of the job, or all of it.
"""

from __future__ import annotations

import os
import pickle
import secrets
from pathlib import PurePath
from typing import Any

from lockstep.jobs.slurm import query, render
from lockstep.jobs.slurm.folder import JOB, SUBMITIT, text
from lockstep.jobs.slurm.task import TrainingTask
from lockstep.jobs.slurm.transport.base import Place, Transport
from lockstep.jobs.spec.model import JobSpec
from lockstep.jobs.status import Disconnected, Unreachable
from lockstep.training.contract import OF_A_JOB, UserError

SECONDS = 300.0
"""For all of it. sbatch itself tries for minutes where the controller is busy."""
REFUSED, NO_SBATCH, NO_NUMBER, UNANSWERED = 3, 4, 5, 6
IN_DOUBT = "timed out|zero bytes|receive failure"
"""What sbatch says where it has sent the job, and heard no answer."""
NEW = "new"
"""Stands in the names of the files for the job's number until sbatch has given one."""

ADOPT = f"""
adopt() {{
  for file in {NEW}_*; do
    if [ -e "$file" ] && [ ! -L "$file" ]; then mv -f -- "$file" "$1${{file#{NEW}}}" || return 1; fi
  done
  ln -sf -- "$1_submission.sh" {NEW}_submission.sh
}}
"""
"""submitit looks for files with the job's number in their names. A link keeps the name that SLURM was given."""

COMMIT = f"""
trap '' HUP PIPE
umask 077
root=$1 whole=$2 token=$3 comment=$4; shift 4
command -v sbatch > /dev/null || exit {NO_SBATCH}
cd -- "$root" || exit 1
rm -rf -- ".$whole".??????
stage=$(mktemp -d -- ".$whole.XXXXXX") || exit 1
trap 'rm -rf -- "$root/$stage"' EXIT
for name; do mkdir -- "$stage/$name" || exit 1; done
mkdir -- "$stage/$whole/{SUBMITIT}" || exit 1
came=no
while read -r size name; do
  if [ "$size" = end ]; then came=yes; break; fi
  head -c "$size" > "$stage/$name" || exit 1
done
if [ $came = no ]; then echo "it came in part only" >&2; exit 1; fi

trap '' INT TERM
put=
back() {{
  for name in $put; do
    rm -rf -- "$name"
    if [ -e ".$name.replaced" ]; then mv -T -- ".$name.replaced" "$name"; fi
  done
}}
for name; do
  rm -rf -- ".$name.replaced"
  if [ -e "$name" ]; then mv -T -- "$name" ".$name.replaced" || {{ back; exit 1; }}; fi
  put="$put $name"
  mv -T -- "$stage/$name" "$name" || {{ back; exit 1; }}
done
for name in $(env | sed -n 's/^\\([A-Za-z_][A-Za-z0-9_]*\\)=.*/\\1/p'); do
  case $name in
    SLURM_CONF | SLURM_CLUSTERS | SBATCH_ACCOUNT) ;;
    SBATCH_* | SLURM_* | {" | ".join(sorted(OF_A_JOB))}) unset "$name" ;;
  esac
done
said=$(sbatch --comment="$comment" "$root/$whole/{SUBMITIT}/{NEW}_submission.sh" 2> "$stage/errors" < /dev/null)
code=$?
cat "$stage/errors" >&2
if [ $code -ne 0 ]; then
  # The controller may have taken it before it fell silent: the record stays, without a number.
  grep -qiE "{IN_DOUBT}" "$stage/errors" && exit {UNANSWERED}
  back; exit {REFUSED}
fi
id=$(printf '%s' "$said" | sed -n 's/.*job \\([0-9][0-9]*\\).*/\\1/p' | tail -n 1)
if [ -z "$id" ]; then printf '%s' "$said"; exit {NO_NUMBER}; fi
{ADOPT}
(cd -- "$whole/{SUBMITIT}" && adopt "$id")
for name; do
  if [ -e "$name/.{JOB}" ]; then
    sed "s/$token/$id/" "$name/.{JOB}" > "$name/.{JOB}.$id" && sync -- "$name/.{JOB}.$id" &&
      mv -f -- "$name/.{JOB}.$id" "$name/{JOB}" && rm -f -- "$name/.{JOB}"
  fi
  rm -rf -- ".$name.replaced"
done
printf '%s' "$id"
"""
"""$1: the folder of all jobs. $2: the job whose folder has the script. $3: what stands for its number. $4: the comment. Then
all folders."""


def send(
    spec: JobSpec, place: Place, jobs: PurePath, records: dict[str, dict[str, Any]], comment: str,
    tasks: list[TrainingTask], after: str | None, transport: Transport,
) -> list[str]:  # fmt: skip
    """Submits, keeps the records, and returns the job's ids, one a task. What had their folders before is gone then.

    Args:
        jobs: the folder of all jobs.
        records: by name, one a task.
        comment: what SLURM shall know this submission by, in place of the script's, which is the spec's.

    Raises:
        UserError: with what sbatch says; all is as it was.
        Unreachable: it is submitted, or not. The next submission finds out. Or the controller was not reached: all is as it was.
    """
    folder = jobs / spec.name / SUBMITIT
    script = render.script(spec, folder, after, len(tasks), place)
    token = f"number-{secrets.token_hex(8)}"
    files = {f"{spec.name}/{SUBMITIT}/{NEW}_submission.sh": script.encode()}
    ends = [""] if len(tasks) == 1 else [f"_{element}" for element in range(len(tasks))]
    for (name, record), task, end in zip(records.items(), tasks, ends, strict=True):
        files[f"{spec.name}/{SUBMITIT}/{NEW}{end}_submitted.pkl"] = _payload(task, render.minutes(spec))
        files[f"{name}/{JOB}"] = text({**record, "job_id": None})
        files[f"{name}/.{JOB}"] = text({**record, "job_id": f"{token}{end}"})
    data = b"".join(b"%d %s\n%s" % (len(content), name.encode(), content) for name, content in files.items()) + b"end\n"
    names = dict.fromkeys([spec.name, *records])
    try:
        told = transport.shell(
            COMMIT, jobs, spec.name, token, comment, *names, data=data, seconds=SECONDS, whole=True,
            env={name: os.environ[name] for name in spec.secrets},
        )  # fmt: skip
    except Disconnected as error:
        raise Disconnected(f"{error}: submit again, what is there already is not submitted twice") from None
    said = told.stderr.decode(errors="replace")
    if told.returncode == 0:
        return [f"{told.stdout.decode()}{end}" for end in ends]
    if told.returncode == NO_SBATCH:
        raise UserError(
            f"sbatch is not installed {transport.where}: submit from a node of a SLURM cluster, see `lockstep doctor slurm`"
        )
    if told.returncode == UNANSWERED:
        raise Unreachable(f"{_silent(said)}: submit again, what is there already is not submitted twice")
    if told.returncode == REFUSED and query.NO_CONTACT.search(said):
        raise Unreachable(_silent(said))
    if told.returncode == REFUSED:
        raise UserError(f"SLURM refuses {spec.name}: {_reason(said)}")
    if told.returncode == NO_NUMBER:
        raise UserError(f"sbatch gave no number for {spec.name}, but said: {query.one_line(told.stdout.decode())}")
    raise UserError(f"cannot keep the job in {jobs} {transport.where}: {query.one_line(said)}; set LOCKSTEP_HOME")


def _silent(said: str) -> str:
    return f"the SLURM controller does not answer: {_reason(said)}"


def _reason(said: str) -> str:
    """What sbatch complains of, without what it is called."""
    lines = [line for line in said.splitlines() if "error:" in line] or [said]
    return query.one_line("; ".join(line.split("error:", 1)[-1].strip() for line in lines))


def adopt(record: dict[str, Any], number: str, transport: Transport) -> None:
    """Gives the job's number to files of a submission that was interrupted after sbatch."""
    transport.shell(f'cd -- "$1" || exit 1\n{ADOPT}\nadopt "$2"', record["submitit"], number)


def _payload(task: TrainingTask, minutes: int) -> bytes:
    """What submitit unpickles on the nodes."""
    from submitit.core.utils import DelayedSubmission

    delayed = DelayedSubmission(task)
    delayed.set_timeout(minutes, 3)
    return pickle.dumps(delayed, protocol=4)
