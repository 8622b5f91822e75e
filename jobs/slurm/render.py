"""The sbatch script of a SLURM job, written by submitit: `submit slurm` sends the script that `render slurm` prints.

manifests(spec, Path("/shared/lockstep/slurm/smoke/submitit"))[0]["script"]

A task is a rank; of a `live` job it is a node. srun starts `python -m submitit.core._submit FOLDER` for each, which loads a `TrainingTask`.
The lint rules that read the script are here, too.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from lockstep.training import contract
from lockstep.training.config import settings
from lockstep.training.contract import UserError
from lockstep.wire import submitit_api

from .. import lint, records, snapshots
from ..manifest import get, holds, seconds, size_in_bytes, without_none
from ..spec.model import JobSpec, launch_command, rank_command, session_options
from .task import TrainingTask

MARGIN_SECONDS = 30
"""Seconds by which the signal comes earlier than `grace_seconds` before the end: a requeue on a busy controller needs time."""
SUBMITIT = "submitit"
JOIN_TIMEOUT = "5m"
"""Default `join_timeout`. SLURM starts all nodes together, so a node that does not join within this time is lost."""
PATH = re.compile(r"/[A-Za-z0-9._/+=@-]*")
VALUE = re.compile(r"[A-Za-z0-9_./:,;@%+=\[\]()*~!&| -]*")
"""Pattern of a value in an #SBATCH line: no quotes, no control characters, nothing that a shell or sbatch expands."""

# A signal during the import of Python and torch would kill the task. So it is blocked, which exec and fork inherit, until a
# handler is set. If `env` cannot block signals, USR2 is ignored until then.
SIGNAL_SHIELD = (
    'env --block-signal=USR2,TERM true 2>/dev/null && exec env --block-signal=USR2,TERM "$@"; trap "" USR2; exec "$@"'
)
HOST_VARIABLE = "LOCKSTEP_SLURM_HOST"
"""Variable with the login node, if no flag, job file or profile names one."""
FOLDER_VARIABLE = "LOCKSTEP_SLURM_HERE"
"""Variable with the folder of relative paths, if that is not the current folder. For a job that came over ssh, it is the home folder."""
RESERVED_OPTIONS = {
    "signal", "requeue", "no-requeue", "open-mode", "array", "output", "error", "comment", "job-name", "nodes", "ntasks",
    "ntasks-per-node", "tasks-per-node", "time", "timeout-min", "signal-delay-s", "use-srun", "stderr-to-stdout", "export",
    "kill-on-invalid-dep", "setup", "teardown", "srun-args", "additional-parameters", "cpus-per-task", "cpus-per-gpu", "num-gpus",
    "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "mem", "mem-per-cpu", "mem-per-gpu", "test-only", "help", "parsable",
    "quiet", "usage", "version", "wait", "wrap",
}  # fmt: skip
"""Options that `slurm.patch` may not set: Lockstep sets them from the job's settings, or reads what they change."""
NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # noqa: S108 - places that a job should not use
RUN_SECONDS = 60


def submitit_folder(name: str) -> Path:
    """Returns the folder where submitit stores the script, payload and logs of a job."""
    return records.folder("slurm") / name / SUBMITIT


def base_folder() -> Path:
    """Returns the folder to which relative paths are relative."""
    return Path(os.environ.get(FOLDER_VARIABLE) or Path.cwd())


def parameters(spec: JobSpec, folder: PurePath, after: str | None = None) -> dict[str, Any]:
    """Returns the arguments of submitit's `AutoExecutor.update_parameters`.

    Args:
        folder: where submitit keeps this job's script, payload and logs; the nodes must see it.
        after: id of a job that must have succeeded first.

    Raises:
        UserError: a path or a value of `slurm.patch` that must not stand in a script.
    """
    settings = spec.slurm
    tasks = 1 if spec.live else spec.ranks
    cpus = max(1, int(spec.cpus // tasks))
    more = without_none(
        {
            "requeue": True,
            "output": f"{checked_path(folder)}/%j_batch.out",
            "kill-on-invalid-dep": "yes" if after is not None else None,
            "no-kill": True if spec.live else None,
        }
    )
    # The loss of a node of a live job must not end the others.
    ending = ["--kill-on-bad-exit=0", "--wait=0", "--no-kill"] if spec.live else ["--kill-on-bad-exit=1"]
    gres = f"gpu:{settings.gpu_type}:{spec.gpus}" if spec.gpus and settings.gpu_type else None
    values: dict[str, Any] = {
        "name": spec.name,
        "timeout_min": minutes(spec),
        "nodes": spec.nodes,
        "tasks_per_node": tasks,
        "cpus_per_task": cpus,
        "stderr_to_stdout": True,
        "slurm_mem": f"{max(1, size_in_bytes(spec.memory) >> 20)}M",
        "slurm_comment": f"lockstep:{spec.hash()}",
        "slurm_signal_delay_s": spec.grace_seconds + MARGIN_SECONDS,
        "slurm_partition": settings.partition,
        "slurm_account": settings.account,
        "slurm_qos": settings.qos,
        "slurm_constraint": settings.constraint,
        "slurm_dependency": f"afterok:{after}" if after is not None else None,
        "slurm_array_parallelism": settings.array_parallelism,
        "slurm_setup": _setup(spec, folder),
        "slurm_teardown": _teardown(spec, folder),
        # Since 22.05 srun does not use the value of sbatch; without it all ranks of a node share one core.
        "slurm_srun_args": [f"--cpus-per-task={cpus}", *ending, *container(spec, folder)[0]],
        "slurm_gres": gres,
        "gpus_per_node": spec.gpus if spec.gpus and gres is None else None,
        **_patch(settings.patch, more),
        "slurm_additional_parameters": more,
    }
    # Without `slurm_wckey` submitit sends its own key, which most sites refuse.
    return {"slurm_wckey": None, **without_none(values)}


def training_task(spec: JobSpec, prepared: bool, job: str) -> TrainingTask:
    """Returns the task that each process of the job runs: plain values, importable on the nodes.

    Args:
        prepared: whether another job writes the shards before this job starts.
        job: identity of this submission.
    """
    if spec.shards_missing_here and not prepared:
        spec = spec.model_copy(update={"shards": None})  # not prepared: the job itself creates the data
    run_dir = run_directory(spec)
    env, code = dict(spec.env), snapshots.folder_of(spec)
    if spec.live:
        code = ""  # the launcher gets the code and the session from its words
    elif spec.command is not None:
        env[contract.ENV_SESSION] = session_options(spec, run_dir)
    return TrainingTask(
        words=_words(spec), run_dir=run_dir, ranks_per_node=spec.ranks,
        max_restarts=spec.max_restarts, metrics_port=spec.metrics_port, env=env,
        job=job, code=code,
    )  # fmt: skip


def interpreter(spec: JobSpec) -> str:
    """Returns the Python that runs the tasks: on the node, or in the image."""
    return spec.slurm.python or (sys.executable if spec.slurm.container is None else "python")


def container(spec: JobSpec, folder: PurePath) -> tuple[list[str], list[str]]:
    """Returns the words that run a program in the job's image: options of srun (pyxis), and words before the program (Apptainer)."""
    settings = spec.slurm
    image = str(settings.image or spec.image)
    mounts = ",".join(f"{path}:{path}" if ":" not in path else path for path in _mounts(spec, folder))
    if settings.container == "pyxis":
        return [f"--container-image={image}", f"--container-mounts={mounts}"], []
    if settings.container == "apptainer":
        gpus = ["--nv"] if spec.gpus else []
        return [], ["apptainer", "exec", *gpus, "--bind", mounts, image]
    return [], []


def manifests(spec: JobSpec, folder: PurePath, after: str | None = None, elements: int = 1) -> list[dict[str, Any]]:
    """Returns the sbatch script and its parameters as an object, which lint reads. Needs no SLURM on this machine.

    Args:
        folder: see `parameters`.
        after: see `parameters`.
        elements: above 1, the script is that of an array.

    Raises:
        UserError: as `parameters` does.
    """
    values = parameters(spec, folder, after)
    # The words before `-u -m submitit.core._submit` on a node.
    python = [*container(spec, folder)[1], "sh", "-c", SIGNAL_SHIELD, "held", interpreter(spec)]
    sent = {
        "kind": "Slurm",
        "parameters": values,
        "script": submitit_api.batch_script(folder, shlex.join(python), values, elements),
        "run_dir": run_directory(spec),
        "after": after,
    }
    return [sent]


def minutes(spec: JobSpec) -> int:
    """Returns the time limit in minutes, rounded up: the unit of SLURM."""
    return math.ceil(seconds(spec.time_limit) / 60)


def run_directory(spec: JobSpec) -> str:
    """Returns the run directory, as an absolute path of the cluster."""
    return str(base_folder() / os.path.expanduser(spec.run_dir or f"runs/jobs/{spec.name}"))


def checked_path(path: PurePath) -> str:
    """Returns the path if it may stand in an #SBATCH line. Raises `UserError`."""
    if not PATH.fullmatch(str(path)):
        raise UserError(
            f"{str(path)!r} cannot be used in a batch script: only letters, digits and . _ / + = @ - "
            "(set LOCKSTEP_HOME to another folder)"
        )
    return str(path)


def _setup(spec: JobSpec, folder: PurePath) -> list[str]:
    return [
        f"# each task: {json.dumps(_words(spec))[:2000]}",
        *([f"# its code: {checked_path(PurePosixPath(snapshots.folder_of(spec)))}"] if spec.code is not None else []),
        # The tasks unpickle files of this folder: no other user may have put them there.
        f'[ -O {folder} ] && [[ "$(stat -c %a {folder})" == *00 ]] || {{ echo "{folder} is not mine alone"; exit 2; }}',
        "lockstep_restarts=${SLURM_RESTART_COUNT:-0}",
        "lockstep_job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}",
        # A subshell until the end of srun: the setup lines may contain `set -e`, options and variables. These must not reach
        # the lines that ask for the requeue.
        "(",
        # Variables of an outer launcher do not belong to this job.
        "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID",
        *(f"module load {shlex.quote(name)}" for name in spec.slurm.modules),
        *spec.slurm.setup,
    ]


def _words(spec: JobSpec) -> list[str]:
    """Returns the words that a task starts: its rank, or its node's launcher."""
    run_dir = run_directory(spec)
    if not spec.live:
        return rank_command(spec, run_dir, str(base_folder()))
    known = spec.model_copy(update={"join_timeout": spec.join_timeout or JOIN_TIMEOUT})
    _, _, _, *words = launch_command(known, run_dir, code=snapshots.folder_of(spec), here=str(base_folder()))
    return words


def _teardown(spec: JobSpec, folder: PurePath) -> list[str]:
    note = f"{folder}/${{lockstep_job}}"
    return [
        ")",
        "lockstep_code=$?",
        "lockstep_again=no",
        "# A container has no scontrol: rank 0 leaves a note and ends, and the script asks for the requeue.",
        f'[ -e "{note}_requeue_$lockstep_restarts" ] && lockstep_again=yes',
        f'lockstep_saved=$(ls "{note}"_saved_* 2>/dev/null | wc -l)',
        "# The signal came while a task was being started, before anything could hold it back, or srun has ended such a task as another",
        "# died of the signal. Nothing is lost. TERM is scancel's, too: such a job does not run any more.",
        "lockstep_number=$((lockstep_code - 128))",
        '{ [ $lockstep_number = "$(kill -l USR2)" ] || { [ $lockstep_number = "$(kill -l TERM)" ] && '
        '[ "$(squeue --noheader --jobs "$lockstep_job" --format %T)" = RUNNING ]; }; } && '
        f'[ $((lockstep_restarts - lockstep_saved)) -lt {spec.max_restarts} ] && [ ! -e "{note}_cancelled" ] && lockstep_again=yes',
        'if [ $lockstep_code != 0 ] && [ $lockstep_again = yes ]; then scontrol requeue "$lockstep_job" && sleep 120; fi',
        "exit $lockstep_code",
    ]


def _mounts(spec: JobSpec, folder: PurePath) -> list[str]:
    run = PurePosixPath(run_directory(spec)).parent
    own = [str(folder), str(run), *([spec.shards] if spec.shards and not spec.shards_in_a_bucket else [])]
    own += [f"{code}:{code}:ro"] if (code := snapshots.folder_of(spec)) else []
    return list(dict.fromkeys([*own, *spec.slurm.mounts]))


def _patch(patch: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Returns parameters of submitit under submitit's names. An unknown name becomes an option of sbatch, in `more`."""
    known = submitit_api.parameter_names()
    values: dict[str, Any] = {}
    for name, value in patch.items():
        option = name.replace("_", "-")
        if option in RESERVED_OPTIONS:
            raise UserError(f"slurm.patch may not set {name}, which Lockstep sets itself: use the job's settings")
        if not re.fullmatch(r"[a-z][a-z-]{1,40}", option):
            raise UserError(f"slurm.patch: {name!r} is not an option of sbatch{settings.nearest(name, known)}")
        if not isinstance(value, (str, int)) or not VALUE.fullmatch(str(value)):
            raise UserError(f"slurm.patch: {name} must be plain text, a whole number or true, got {value!r}")
        if name in known:
            values[f"slurm_{name}"] = value
        else:
            more[option] = value
    return values


class Subject(lint.Subject):
    """A batch script and its parameters."""

    taken = re.compile("RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|SLURM_.*|SBATCH_.*")

    @property
    def lacks_image(self) -> bool:
        return self.spec.slurm.container is not None and (self.spec.slurm.image or self.spec.image) is None


RULES = lint.Rules(Subject)
rule = RULES.rule


def _is_node_local(path: str) -> bool:
    return any(holds(place, path) for place in NODE_LOCAL)


@rule("LS102")
def time_to_train(subject: Subject) -> Iterator[str]:
    """The signal comes before the time limit; a limit that is hardly longer leaves no time to train."""
    lead = get(subject.objects[0], "parameters", "slurm_signal_delay_s") or 0
    limit = 60 * int(get(subject.objects[0], "parameters", "timeout_min") or 0)
    # SLURM checks every 30 s, so the signal may come 30 s earlier.
    if limit < lead + 30 + RUN_SECONDS:
        yield (
            f"time_limit {subject.spec.time_limit} leaves {max(0, limit - lead - 30)} s to train: the signal to save comes "
            f"up to {lead + 30} s before the end; raise time_limit, or lower grace_seconds"
        )


@rule("LS103", "warning")
def shared_folders(subject: Subject) -> Iterator[str]:
    """The nodes read the job's payload and write its logs. A run directory on a node's own disk is gone when the job starts elsewhere."""
    path = str(get(subject.objects[0], "run_dir"))
    output = str(get(subject.objects[0], "parameters", "slurm_additional_parameters", "output"))
    if _is_node_local(path) and subject.spec.checkpoints_bucket is None:
        yield f"run_dir {path} is usually local to a node: choose a folder that all nodes see, or set checkpoint.to to a bucket"
    if _is_node_local(output):
        yield f"{PurePosixPath(output).parent} is usually local to a machine: set LOCKSTEP_HOME to a folder that all nodes see"


@rule("LS110")
def container_runtime(subject: Subject) -> Iterator[str]:
    """An image needs a container runtime."""
    if subject.spec.slurm.container is None and subject.spec.slurm.image is not None:
        yield "slurm.image is not used: set slurm.container to pyxis or apptainer"
