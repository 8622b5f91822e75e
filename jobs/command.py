"""The command that a node runs, the same on every backend: `python -m lockstep.training launch …`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.training.contract import UserError
from lockstep.wire.payload import SessionOptions

from .spec.model import CODE_PARTS, JobSpec

IN_A_CONTAINER = "/tmp"  # noqa: S108 - the container's own, and the only place that is always writable
GRACE_MARGIN = 30
"""Seconds between the end of the ranks' grace and the cluster's SIGKILL: time to fsync and to unwind."""


def launch(
    spec: JobSpec, run_dir: str, python: str = "python", exit_codes: str = "plain", linger: int = 0, code: str = "",
    here: str = IN_A_CONTAINER,
) -> list[str]:  # fmt: skip
    """The launcher of one node with what it shall run. Number of nodes and ranks come from the environment.

    Args:
        linger: seconds that the other nodes stay after rank 0's, or after the one that has failed.
        code: where the job's code lies unpacked; "": in pieces, at `CODE_PARTS`.
        here: the folder that the job starts in.
    """
    command = [python, "-m", "lockstep.training", "launch", "--max-restarts", str(spec.max_restarts)]
    command += ["--grace", str(spec.grace_seconds), *(["--live"] if spec.live else [])]
    if spec.nodes > 1:
        command += ["--join-timeout", str(spec.join_seconds)]
        command += ["--linger", str(linger)] if linger else []
    if exit_codes != "plain":
        # There the cluster replaces a failed node without counting, so the launcher counts, on the shared volume.
        command += ["--exit-codes", exit_codes, "--restarts-dir", f"{run_dir}/restarts"]
    if spec.code is not None:
        command += ["--code", identity(spec), *(["--code-folder", code] if code else ["--code-parts", CODE_PARTS])]
    if spec.command is not None:
        command += ["--session", session_options(spec, run_dir)]
    return command + rank(spec, run_dir, here)


def identity(spec: JobSpec) -> str:
    """Of the spec's code, which has been looked at by now."""
    assert spec.code is not None
    if spec.code.hash is None:
        raise UserError(f"{spec.name}: its code has not been read yet (lockstep.jobs.snapshots.resolve)")
    return spec.code.hash


def rank(spec: JobSpec, run_dir: str, here: str = IN_A_CONTAINER) -> list[str]:
    """The part after `launch`'s own flags. With code of one's own data stay where they would be without: the ranks are elsewhere."""
    if spec.command is not None:
        return ["--", *spec.command]
    assert spec.recipe is not None
    config = spec.config if spec.gpus or spec.code is not None else None
    settings = _settings(spec)
    if spec.shards is not None and not set(spec.overrides) & {"data.shards", "shards"}:
        settings.append(f"data.shards={spec.shard_folder}")
    settings += _device(spec) if config is None or config.device == "auto" else []
    if spec.code is not None and config is not None and not Path(config.data.root).is_absolute():
        settings.append(f"data.root={Path(here) / config.data.root}")
    fresh = ["--fresh-once", spec.fresh] if spec.fresh is not None else []
    return ["run", spec.recipe, "--run-dir", run_dir, *fresh, "--log-format", "json", "--set", *settings]


def session_options(spec: JobSpec, run_dir: str) -> str:
    """What the `Session` of a program of one's own takes from the job: the same that a recipe's words say."""
    asked = bool(spec.overrides) or spec.fresh is not None
    return SessionOptions(
        run_dir, ("log.format=json", *_settings(spec), *_device(spec)), spec.fresh or "", asked
    ).text()


def _settings(spec: JobSpec) -> list[str]:
    graced = set(spec.overrides) & {"preempt.grace_seconds", "grace_seconds"}
    return spec.assignments() + ([] if graced else [f"preempt.grace_seconds={spec.grace_seconds}"])


def _device(spec: JobSpec) -> list[str]:
    """Left to itself, a run that sees no GPU trains on the CPU, and says so in one line."""
    return ["device=cuda"] if spec.gpus and "device" not in spec.overrides else []


def execute(python: str, rank: int, command: list[str], run_dir: str, *more: str) -> list[str]:
    """Returns the command that runs another command on a rank's node. `more`: further flags of `lockstep.wire.exec`."""
    words = [python, "-m", "lockstep.wire.exec", "--rank", str(rank), *more]
    return [*words, *(["--run-dir", run_dir] if run_dir else []), "--", *command]


def signal(python: str, token: str, number: int) -> list[str]:
    """What sends a signal to the command that was started with `--token`, on the same node."""
    return [python, "-m", "lockstep.wire.exec", "--token", token, "--signal", str(number)]


def shard(spec: JobSpec, python: str = "python") -> list[str]:
    """The command of `lockstep prepare`: writes the recipe's shards once. `spec.shards` is set."""
    assert spec.recipe is not None and spec.shards is not None
    command = [python, "-m", "lockstep.training", "shard", spec.recipe, "--out", str(spec.shard_folder)]
    own = [text for text in spec.assignments() if text.split("=")[0] not in ("data.shards", "shards")]
    return [*command, "--set", "data.root=/tmp/data", *own]


def preparation(spec: JobSpec, python: str = "python") -> JobSpec:
    """The job of one rank that writes the recipe's shards, once. Raises `UserError` for a spec without shards."""
    if spec.recipe is None or spec.shards is None:
        raise UserError(f"{spec.name} has no shards: set recipe and shards, e.g. shards: /data/digits")
    return spec.on_cpu().model_copy(
        update={
            "name": preparation_name(spec.name), "command": shard(spec, python), "nodes": 1, "ranks_per_node": 1,
            "recipe": None, "shards": None, "code": None, "fresh": None, "overrides": {}, "live": False, "max_restarts": 1,
            "time_limit": f"{max(1, min(spec.deadline_seconds, 6 * 3600) // 60)}m", "join_timeout": None,
            "volumes": [volume.model_copy(update={"read_only": False}) for volume in spec.volumes],
            "run_dir": None if spec.shards_in_a_bucket else spec.shards,
            "k8s": spec.k8s.model_copy(update={"rdma": {}, "topology": None, "hugepages": None, "patch": {}}),
        }
    )  # fmt: skip


def preparation_name(name: str) -> str:
    """Returns the name of the preparation of this job: at most 40 characters and an end, so that pods of every kind can have it. Two
    long names stay two."""
    short = name if len(name) <= 40 else f"{name[:31].rstrip('-')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return f"{short}-prepare"


def prepares(command: object) -> bool:
    """Whether the command of a spec is that of a `preparation`, with any interpreter."""
    return isinstance(command, list) and command[1:4] == ["-m", "lockstep.training", "shard"]


def check_preparation(name: str, plain: Mapping[str, Any]) -> None:
    """Raises `UserError` where the job that has a preparation's name is another one."""
    if not prepares(plain.get("command")):
        raise UserError(
            f"`lockstep prepare` uses the name {name}, and another job has it: remove that job, or rename this one"
        )
