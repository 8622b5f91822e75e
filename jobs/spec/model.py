"""The specification of a job, and the command that each of its nodes runs. It is checked once, before anything is submitted.

    spec = JobSpec.load("job.yaml")                              # a mistake raises UserError with the line.
    spec = JobSpec(name="smoke", recipe="smoke", nodes=2)        # the same object, from Python.

YAML, command-line flags and Python make the same object. The same object has the same `hash()`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator
from typing_extensions import Self

from lockstep.training import config as configuration
from lockstep.training.config import settings
from lockstep.training.contract import ENV_METRICS_PORT, METRICS_PORT, UserError
from lockstep.wire.payload import SessionOptions

from ..manifest import seconds
from ..records import MAX_GPUS, Gpus, GraceSeconds, MaxRestarts, Nodes, RanksPerNode
from .types import (
    PLACES,
    AbsolutePathOrBucket,
    AnyPath,
    CodeOrNone,
    Compose,
    Duration,
    Image,
    Kubernetes,
    Label,
    SecretKey,
    Section,
    Size,
    Slurm,
    Text,
    Values,
    Variable,
    Volume,
    Word,
)

CPUS_A_GPU, MEMORY_A_GPU = 4, 16
"""Cores and GiB of memory for each GPU."""
IN_A_PROFILE = ("slurm", "env", "cpus", "memory", "time_limit", "max_restarts", "grace_seconds", "shards", "gpus")
"""Settings that a cluster profile may hold: they describe a cluster, not a job."""
IN_A_CONTAINER = "/tmp"  # noqa: S108 - the container's own, and the only place that is always writable
GRACE_MARGIN = 30
"""Seconds between the end of the ranks' grace and the cluster's SIGKILL: time to fsync and to unwind."""
CODE_PARTS = "/lockstep/code"
"""Folder of a container with the archive of the job's code, in pieces."""
RESERVED = ("/", "/dev", "/dev/shm", "/proc", "/sys", "/tmp", CODE_PARTS)  # noqa: S108 - paths of the container
"""Paths with a container's own files."""


def _amounts_of(gpus: int) -> dict[str, Any]:
    """Returns the default amounts of a node with this many GPUs."""
    return {"cpus": float(CPUS_A_GPU * gpus), "memory": f"{MEMORY_A_GPU * gpus}Gi"}


class JobSpec(Section):
    """One job, for every backend."""

    name: Label
    """Name of the job: the identity under which it is submitted, found, and cancelled."""
    recipe: str | None = Field(default=None, max_length=1024)
    """A recipe of `training`. Give this or `command`."""
    overrides: Values = Field(default_factory=dict)
    """Settings of the recipe to change, e.g. `{epochs: 4, optim.lr: 0.1}`; of a command: those of its Session, and
    `config.NAME` for the script's own."""
    command: list[Text] | None = Field(default=None, min_length=1, max_length=1000)
    """A program of your own and its arguments, started once per rank, with torchrun's environment variables. A lockstep.Session
    in it takes run_dir, grace_seconds, overrides and fresh from the job."""
    code: CodeOrNone = None
    """A folder of your own that is sent with the job: `.`. The ranks start in a copy of it."""
    image: Image | None = None
    """Container image, preferably by digest (Kubernetes, Compose)."""
    nodes: Nodes = 1
    """Machines (pods)."""
    gpus: Gpus = 0
    """GPUs per node; 0: train on the CPU."""
    ranks_per_node: RanksPerNode | None = None
    """Processes per node; null: one per GPU, or one without a GPU."""
    cpus: float = Field(default=2, gt=0, le=1024)
    """CPU cores per node. Default with GPUs: 4 per GPU."""
    memory: Size = "4Gi"
    """Memory per node, including shared memory. Default with GPUs: 16Gi per GPU."""
    shm: Size = "1Gi"
    """Shared memory (/dev/shm) per node. NCCL and data loaders need it."""
    time_limit: Duration = "24h"
    """Longest time for the job, with all its restarts. SLURM: longest time for one start; a job that reaches it saves and is requeued."""
    max_restarts: MaxRestarts = 3
    """Restarts of the job after failures. Preemptions do not count; on SLURM they count if nothing new was saved."""
    live: bool = False
    """Where a rank or a node is lost, the others go on without it, with sync.name=exact. Unproven on GPUs."""
    join_timeout: Duration | None = None
    """How long a node waits for the others, for example while a pod pulls its image. Waiting is not a failure. Null:
    time_limit less grace_seconds."""
    grace_seconds: GraceSeconds = 60
    """Seconds that a rank has to save after a signal. The cluster waits 30 s longer before it kills the rank."""
    run_dir: AnyPath | None = None
    """Run directory; null: /runs/NAME in a container, runs/jobs/NAME on this machine."""
    fresh: Word | None = None
    """Start over: the first start with this word renames an earlier run in run_dir, later starts resume. `submit --fresh`
    sets a new word."""
    shards: AbsolutePathOrBucket | None = None
    """Folder of prepared shards, or a place in a bucket (`s3://BUCKET/PREFIX`), with one folder in it for each data source.
    `lockstep prepare` writes it."""
    volumes: list[Volume] = Field(default_factory=list, max_length=50)
    """Storage that is mounted on every node (Kubernetes, Compose). If run_dir is on none of them, Kubernetes deletes the run
    with its pod, and Compose makes a volume for it."""
    env: dict[Variable, Text] = Field(default_factory=dict)
    """Environment variables. Secrets go into `secrets`."""
    secrets: dict[Variable, SecretKey] = Field(default_factory=dict)
    """Environment variables whose values stay in the cluster's Secrets: references only."""
    metrics_port: int = Field(default=METRICS_PORT, ge=1024, le=65000)
    """Local rank i serves /metrics on this port + i."""
    # The defaults are valid: a second validator of each section would cost every command time.
    k8s: Kubernetes = Field(default_factory=Kubernetes.model_construct)
    slurm: Slurm = Field(default_factory=Slurm.model_construct)
    compose: Compose = Field(default_factory=Compose.model_construct)

    @model_validator(mode="before")
    @classmethod
    def _amounts(cls, values: Any) -> Any:
        """Adds default amounts for GPUs. A GPU waits for its data loader, so a node's share of cores and memory grows with its GPUs."""
        gpus = values.get("gpus") if isinstance(values, dict) else None
        if type(gpus) is not int or not 1 <= gpus <= MAX_GPUS:
            return values
        return {**_amounts_of(gpus), **values}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.recipe is None) == (self.command is None):
            raise ValueError("give exactly one of recipe and command")
        if self.shards is not None and self.recipe is None:
            raise ValueError("shards belong to a recipe: a command takes the folder as its own argument")
        if self.gpus and self.ranks_per_node is not None and self.ranks_per_node > self.gpus:
            raise ValueError(f"ranks_per_node {self.ranks_per_node} is above gpus {self.gpus}: one rank a GPU at most")
        if {"preempt.grace_seconds", "grace_seconds"} & set(self.overrides):
            raise ValueError("the backend kills after the job's grace_seconds: set it in place of the override")
        both = sorted(set(self.env) & set(self.secrets))
        if both:
            raise ValueError(f"{both[0]} is in env and in secrets: keep one")
        paths = [volume.path.rstrip("/") or "/" for volume in self.volumes]
        run_dir = self.run_dir.rstrip("/") or "/" if self.run_dir else None
        taken = [path for path in (*paths, run_dir) if path in RESERVED]
        if taken:
            raise ValueError(f"{taken[0]} is mounted already: choose another path for volumes and run_dir")
        if len(set(paths)) < len(paths):
            raise ValueError(f"two volumes are mounted at {next(p for p in paths if paths.count(p) > 1)}")
        return self

    @property
    def ranks(self) -> int:
        """Number of ranks on each node."""
        return self.ranks_per_node or self.gpus or 1

    @property
    def run_directory(self) -> str:
        """The run directory in a container."""
        return self.run_dir or f"/runs/{self.name}"

    @property
    def run_directory_here(self) -> str:
        """The run directory if the job sees this machine's files. No other run uses the default."""
        return str(Path(self.run_dir or f"runs/jobs/{self.name}").absolute())

    @property
    def shard_folder(self) -> str | None:
        """Folder of the shards of the recipe's data source. Another recipe must not read another source's shards."""
        config = self.config
        if self.shards is None or config is None:
            return None
        return f"{self.shards.rstrip('/')}/{config.data.shards_name}"

    @property
    def shards_in_a_bucket(self) -> bool:
        return self.shards is not None and "://" in self.shards

    @property
    def checkpoints_bucket(self) -> str | None:
        """The bucket in which the run also saves its checkpoints."""
        given = self.overrides.get("checkpoint.to") if self.config is None else self.config.checkpoint.to
        return None if given is None else str(given)

    @property
    def buckets(self) -> list[str]:
        """The places in buckets that the job reads and writes."""
        places = [self.checkpoints_bucket, self.shards if self.shards_in_a_bucket else None]
        return [place for place in places if place is not None]

    @property
    def shards_missing_here(self) -> bool:
        """Whether this machine lacks the folder of shards. A bucket is not queried."""
        folder = self.shard_folder
        return folder is not None and not self.shards_in_a_bucket and not Path(folder).exists()

    def on_cpu(self) -> Self:
        """Returns the spec without GPUs, for a job that needs none. Amounts that followed the GPUs get their defaults."""
        derived = _amounts_of(self.gpus)
        followed = [name for name in ("cpus", "memory") if getattr(self, name) == derived.get(name)]
        fields = type(self).model_fields
        return self.model_copy(update={"gpus": 0, **{name: fields[name].default for name in followed}})

    def assignments(self) -> list[str]:
        """Returns `overrides` as the `name=value` texts that `training run --set` takes."""
        return [
            f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in self.overrides.items()
        ]

    @functools.cached_property
    def config(self) -> configuration.Config | None:
        """The training config of the job; None for a command, or a recipe that only the image has.

        Raises:
            UserError: there is no such recipe, or the recipe does not accept the overrides.
        """
        if self.recipe is None or (self.image and self.recipe.startswith("/") and not Path(self.recipe).exists()):
            return None
        return configuration.load(self.recipe, self.assignments())

    def plain(self, without: dict[str, set[str]] | None = None) -> dict[str, Any]:
        """Returns the settings that were set, as plain values for YAML and JSON. Leaves out defaults, except for amounts that follow the
        GPUs. `without`: settings of sections that are also left out."""
        amounts = {"cpus": self.cpus, "memory": self.memory} if self.gpus else {}
        return {**self.model_dump(mode="json", exclude_defaults=True, exclude=without), **amounts}

    def record(self) -> dict[str, Any]:
        """Returns every setting as plain values, without the job's place: the record of a submitted job. `recorded` reads it."""
        return self.model_dump(mode="json", exclude=PLACES)

    def comparable(self) -> dict[str, Any]:
        """Returns `record` with the hash in place of the code. The folder and the packing of the code are no part of a job's identity."""
        return self._by_hash(self.record())

    def _by_hash(self, values: dict[str, Any]) -> dict[str, Any]:
        return values if self.code is None else {**values, "code": self.code.hash or self.code.path}

    def hash(self) -> str:
        """Returns 16 hex digits that tell two specs apart. A new setting with a default does not change old hashes.

        `fresh` is not part of the hash: a job that was started over resumes when it is submitted again without `fresh`. Namespace,
        context and host are not part of it either.
        """
        return self._hash

    @functools.cached_property
    def _hash(self) -> str:
        # A section with nothing but the place is empty.
        given = self._by_hash(self.plain(PLACES)).items()
        plain = {name: value for name, value in given if name != "fresh" and value != {}}
        text = json.dumps(plain, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Returns a copy without the values that were computed from settings in `update`."""
        copied = super().model_copy(update=update, deep=deep)
        copied.__dict__.pop("_hash", None)
        if {"recipe", "overrides", "image"} & set(update or ()):
            copied.__dict__.pop("config", None)
        return copied

    def same_job(self, other: JobSpec, backend: str) -> bool:
        """Returns whether both are the same job on this backend. Ignores settings of other backends, and `fresh`, as in `hash`."""
        apart = {"fresh", "k8s", "slurm", "compose"} - {backend}
        mine, others = self.comparable(), other.comparable()
        return all(mine.get(name) == others.get(name) for name in {*mine, *others} - apart)

    @classmethod
    def load(
        cls, path: str | Path, assignments: dict[str, Any] | None = None, below: dict[str, Any] | None = None
    ) -> Self:  # fmt: skip
        """Returns the spec in a YAML file.

        Args:
            assignments: settings that replace those of the file, by their dotted names.
            below: settings for which the file has no value, such as those of a profile.

        Raises:
            UserError: with the name of the setting, and the nearest name that exists.

        Examples:
            >>> spec = JobSpec.load("job.yaml", {"nodes": 2, "overrides.epochs": 4})
            >>> spec.nodes
            2
        """
        values = settings.read_yaml(Path(path))
        values = _over(below, values) if below else values
        for name, value in (assignments or {}).items():
            place(values, name, value)
        spec = settings.build(cls, values, f"{path} with its profile" if below else str(path))
        spec.check_training(str(path))
        if spec.code is not None and spec.code.hash is None:
            at = spec.code.model_copy(update={"path": str(Path(path).absolute().parent / spec.code.path)})
            spec = spec.model_copy(update={"code": at})
        return spec

    @classmethod
    def of(cls, values: dict[str, Any], where: str = "job") -> Self:
        """Returns the spec of plain values. Raises `UserError` naming `where`.

        Examples:
            >>> spec = JobSpec.of({"name": "sleep", "command": ["sleep", "300"], "ranks_per_node": 2})
        """
        spec = settings.build(cls, values, where)
        spec.check_training(where)
        return spec

    @classmethod
    def recorded(cls, name: str, values: dict[str, Any]) -> Self:
        """Returns the spec with which a job was submitted. Raises `UserError` for a record that is damaged, or has a setting that this
        version of Lockstep does not know."""
        where = f"the record of {name} is damaged, or of another version of Lockstep"
        return settings.build(cls, values, where)  # not `of`: the recipe may have changed since

    def check_training(self, where: str) -> None:
        """Checks recipe and overrides against `lockstep.training.config`, before anything is submitted.

        Raises:
            UserError: naming `where`.
        """
        try:
            if self.command is not None:
                configuration.check_overrides(self.assignments())
            elif self.config is None and self.shards is not None:
                raise UserError(
                    f"shards: {self.recipe} is not on this machine, so its data source is not known: leave out shards"
                )
        except UserError as error:
            text = str(error).replace("--set", "overrides")
            if re.search(r"'metrics\.(port|address)'", text):
                text += "; set metrics_port of the job, or LOCKSTEP_METRICS_ADDRESS in its env"
            raise UserError(f"{where}: {text}") from None


def _over(below: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Returns `values` over `below`. null removes a value of `below`; without such a value null stays, because a patch removes with
    null."""
    result = dict(below)
    for name, value in values.items():
        if isinstance(value, dict) and isinstance(below.get(name), dict):
            result[name] = _over(below[name], value)
        elif value is None and below.get(name) is not None:
            del result[name]
        else:
            result[name] = value
    return result


def place(values: dict[str, Any], name: str, value: Any) -> None:
    """Sets a dotted name in nested plain values. Raises `UserError` if a part of the name is not a mapping."""
    group, _, override = name.partition(".")
    is_override = group == "overrides" and override  # an override has its own dotted name
    settings.put(values, [group, override] if is_override else name.split("."), value)


def profile_folders() -> list[Path]:
    """Returns the folders that are searched for NAME.yaml, the nearest first. The last folder has the profiles that come with Lockstep."""
    own = os.environ.get("LOCKSTEP_PROFILES")
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return [*([Path(own)] if own else []), config / "lockstep/profiles", Path(__file__).parent / "cluster_profiles"]


def load_profile(name: str) -> dict[str, Any]:
    """Returns the settings of a cluster profile: a name, or the path of a YAML file. The job's settings and the flags take precedence.

    Raises:
        UserError: there is no such profile, or it has a mistake.
    """
    known = {path.stem: path for folder in reversed(profile_folders()) for path in folder.glob("*.yaml")}
    path = Path(name) if name.endswith((".yaml", ".yml")) else known.get(name)
    if path is None:
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
            raise UserError(f"--profile takes a name or the path of a .yaml file, got {name!r}")
        where = ", ".join(str(folder) for folder in profile_folders())
        raise UserError(f"there is no profile {name!r} in {where}{settings.nearest(name, known)}")
    values = settings.read_yaml(path)
    unknown = [key for key in values if key not in IN_A_PROFILE]
    if unknown:
        raise UserError(f"{path}: a profile holds {', '.join(IN_A_PROFILE)}; {unknown[0]!r} belongs in the job")
    return values


def container_environment(spec: JobSpec) -> dict[str, str]:
    """Returns the variables of a container, with the job's own."""
    values = {"HOME": IN_A_CONTAINER, "PYTHONUNBUFFERED": "1"}  # the root is read-only
    if spec.metrics_port != METRICS_PORT:
        values[ENV_METRICS_PORT] = str(spec.metrics_port)
    if spec.gpus:
        values |= {"NCCL_DEBUG": "WARN", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    else:  # the image shows all GPUs, for a start by hand. If nvidia's runtime is the default, this job would see them, too.
        values["NVIDIA_VISIBLE_DEVICES"] = "void"
    return values | spec.env


def literal(text: str) -> str:
    """Escapes `$` as `$$`: the kubelet expands `$(NAME)` in commands and values, and Compose expands `$NAME` and `${NAME}` everywhere."""
    return text.replace("$", "$$")


def launch_command(
    spec: JobSpec, run_dir: str, python: str = "python", exit_codes: str = "plain", linger: int = 0, code: str = "",
    here: str = IN_A_CONTAINER,
) -> list[str]:  # fmt: skip
    """Returns the command of one node's launcher and its ranks. Numbers of nodes and ranks come from the environment.

    Args:
        linger: seconds that the other nodes stay after rank 0's node, or after a node that has failed.
        code: folder of the job's unpacked code; "": the code is in pieces, at `CODE_PARTS`.
        here: folder in which the job starts.
    """
    command = [python, "-m", "lockstep.training", "launch", "--max-restarts", str(spec.max_restarts)]
    command += ["--grace", str(spec.grace_seconds), *(["--live"] if spec.live else [])]
    if spec.nodes > 1:
        longest = max(60, seconds(spec.time_limit) - spec.grace_seconds)
        command += ["--join-timeout", str(seconds(spec.join_timeout) if spec.join_timeout else longest)]
        command += ["--linger", str(linger)] if linger else []
    if exit_codes != "plain":
        # This cluster replaces a failed node without counting, so the launcher counts, on the shared volume.
        command += ["--exit-codes", exit_codes, "--restarts-dir", f"{run_dir}/restarts"]
    if spec.code is not None:
        command += ["--code", code_identity(spec), *(["--code-folder", code] if code else ["--code-parts", CODE_PARTS])]
    if spec.command is not None:
        command += ["--session", session_options(spec, run_dir)]
    return command + rank_command(spec, run_dir, here)


def code_identity(spec: JobSpec) -> str:
    """Returns the digest of the spec's code. Raises `UserError` if the code has not been read yet."""
    assert spec.code is not None
    if spec.code.hash is None:
        raise UserError(f"{spec.name}: its code has not been read yet (lockstep.jobs.snapshots.resolve)")
    return spec.code.hash


def rank_command(spec: JobSpec, run_dir: str, here: str = IN_A_CONTAINER) -> list[str]:
    """Returns the words after `launch`'s own flags."""
    if spec.command is not None:
        return ["--", *spec.command]
    assert spec.recipe is not None
    fresh = ["--fresh-once", spec.fresh] if spec.fresh is not None else []
    return ["run", spec.recipe, "--run-dir", run_dir, *fresh, "--set", *_settings(spec, here)]


def session_options(spec: JobSpec, run_dir: str) -> str:
    """Returns the options that the `Session` of the user's own program takes from the job: the same as a recipe's words."""
    asked = bool(spec.overrides) or spec.fresh is not None
    return SessionOptions(run_dir, tuple(_settings(spec)), spec.fresh or "", asked).text()


def _settings(spec: JobSpec, here: str = IN_A_CONTAINER) -> list[str]:
    """Returns the settings that the job gives its run, as `name=value`. With the job's own code the ranks start elsewhere, so a
    relative data folder becomes absolute."""
    config = spec.config if spec.gpus or spec.code is not None else None
    values = ["log.format=json", *spec.assignments(), f"preempt.grace_seconds={spec.grace_seconds}"]
    if spec.shards is not None and not set(spec.overrides) & {"data.shards", "shards"}:
        values.append(f"data.shards={spec.shard_folder}")
    if spec.gpus and "device" not in spec.overrides and (config is None or config.device == "auto"):
        values.append("device=cuda")  # without it, a run that sees no GPU would train on the CPU
    if spec.code is not None and config is not None and not Path(config.data.root).is_absolute():
        values.append(f"data.root={Path(here) / config.data.root}")
    return values


def preparation(spec: JobSpec, python: str = "python") -> JobSpec:
    """Returns the job of one rank that writes the recipe's shards, once. Raises `UserError` for a spec without shards."""
    if spec.recipe is None or spec.shards is None:
        raise UserError(f"{spec.name} has no shards: set recipe and shards, e.g. shards: /data/digits")
    own = [text for text in spec.assignments() if text.split("=")[0] not in ("data.shards", "shards")]
    command = [python, "-m", "lockstep.training", "shard", spec.recipe, "--out", str(spec.shard_folder)]
    command += ["--set", "data.root=/tmp/data", *own]
    return spec.on_cpu().model_copy(
        update={
            "name": preparation_name(spec.name), "command": command, "nodes": 1, "ranks_per_node": 1,
            "recipe": None, "shards": None, "code": None, "fresh": None, "overrides": {}, "live": False, "max_restarts": 1,
            "time_limit": f"{max(1, min(seconds(spec.time_limit), 6 * 3600) // 60)}m", "join_timeout": None,
            "volumes": [volume.model_copy(update={"read_only": False}) for volume in spec.volumes],
            "run_dir": None if spec.shards_in_a_bucket else spec.shards,
            "k8s": spec.k8s.model_copy(update={"rdma": {}, "hugepages": None, "patch": {}}),
            "compose": spec.compose.model_copy(update={"patch": {}}),
        }
    )  # fmt: skip


def preparation_name(name: str) -> str:
    """Returns the name of this job's preparation: at most 40 characters and an end, so that pods of every kind can have it. Two long
    names stay different."""
    short = name if len(name) <= 40 else f"{name[:31].rstrip('-')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return f"{short}-prepare"


def prepares(command: object) -> bool:
    """Returns whether the command of a spec is that of a `preparation`, with any interpreter."""
    return isinstance(command, list) and command[1:4] == ["-m", "lockstep.training", "shard"]
