"""SLURM's reasons as sentences that say what to do, and which of them end only when somebody changes something."""

from __future__ import annotations

import re

from lockstep.jobs.status import State

_REASONS: dict[str, tuple[State, str]] = {
    "Priority": ("queued", "waits behind jobs of higher priority in partition {partition}"),
    "Resources": ("pending", "waits for nodes to be free in partition {partition}"),
    "BeginTime": ("pending", "waits for its start time"),
    "Dependency": ("pending", "waits for the job that it depends on"),
    "DependencyNeverSatisfied": ("unschedulable", "the job that it depends on has failed: see its logs, then submit again"),
    "JobHeldUser": ("pending", "is held: scontrol release {job}"),
    "JobHeldAdmin": ("pending", "is held by an administrator: ask why"),
    "JobHoldMaxRequeue": ("unschedulable", "was requeued more often than the cluster allows, and is held"),
    "Reservation": ("pending", "waits for its reservation"),
    "Licenses": ("pending", "waits for a licence"),
    "ReqNodeNotAvail": ("pending", "nodes that it needs are down, drained or reserved"),
    "PartitionDown": ("pending", "partition {partition} is down"),
    "PartitionInactive": ("pending", "partition {partition} is inactive"),
    "PartitionNodeLimit": ("unschedulable", "asks for more nodes than partition {partition} has or allows: lower nodes"),
    "PartitionTimeLimit": ("unschedulable", "time_limit is above the limit of partition {partition}: lower it"),
    "PartitionConfig": ("unschedulable", "partition {partition} does not allow such a job"),
    "BadConstraints": ("unschedulable", "no node has what constraint asks for"),
    "AccountNotAllowed": ("unschedulable", "the account may not use partition {partition}: set slurm.account"),
    "QOSNotAllowed": ("unschedulable", "the QOS may not use partition {partition}: set slurm.qos"),
    "InvalidAccount": ("unschedulable", "the account does not exist, or you are not in it: set slurm.account"),
    "InvalidQOS": ("unschedulable", "the QOS does not exist, or you may not use it: set slurm.qos"),
    "NodeDown": ("restarting", "a node that it ran on is down"),
    "Cleaning": ("restarting", "its last start is still being cleaned up"),
    "Prolog": ("pending", "the nodes run their prolog"),
}  # fmt: skip
_LIMIT = re.compile(r"(Assoc|QOS)(Grp|Max)?(\w*?)(Limit)?")


def pending(reason: str, partition: str, job: str, restarts: int) -> tuple[State, str]:
    """State and sentence for a job that waits. `restarts` above 0: it has run before."""
    state, text = _find(reason)
    text = text.format(partition=partition or "?", job=job)
    if restarts and state in ("pending", "queued"):
        return "restarting", f"restart {restarts}: {text}"
    return state, text


def _find(reason: str) -> tuple[State, str]:
    name = re.split(r"[(,]", reason)[0]
    if name in _REASONS:
        return _REASONS[name]
    match = _LIMIT.fullmatch(name)
    if match:
        holder = "your account's association" if match[1] == "Assoc" else "the QOS"
        what = match[3] or "usage"
        alone = match[2] == "Max" and what.endswith(("PerJob", "PerNode", "WallDurationPerJob"))
        if alone:
            return "unschedulable", f"is above a limit of {holder} ({name}): ask for less"
        return "queued", f"waits: a limit of {holder} is reached ({name})"
    if name.startswith("Nodes_required_for_job_are_DOWN"):
        return _REASONS["ReqNodeNotAvail"]
    if "launch_failed" in name:
        return (
            "unschedulable",
            "its start failed on a node and it is held: scontrol release {job}, or see the node's log",
        )
    return "pending", name.replace("_", " ") if name else "waits for the scheduler"
