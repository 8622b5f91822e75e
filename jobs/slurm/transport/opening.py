"""Which way leads to the cluster."""

from __future__ import annotations

import os
from pathlib import PurePosixPath

from lockstep.jobs.slurm.transport.base import Place, Transport
from lockstep.jobs.slurm.transport.local import LOCAL
from lockstep.jobs.slurm.transport.ssh import Ssh

VARIABLE = "LOCKSTEP_SLURM_HOST"
"""The login node where no flag, job file or profile names one."""
_HOME = PurePosixPath("/home/user")
STAND_IN = Place(_HOME / ".local/state/lockstep", _HOME, _HOME, "user", "python3")
"""The folders of a host that is not asked."""


def chosen(host: str | None) -> str | None:
    """The host to go to; None where this machine is one of the cluster."""
    return host or os.environ.get(VARIABLE) or None


def opened(host: str | None) -> Transport:
    """The way to a host, which is asked with the first question. Raises `UserError` for what is no host's name."""
    found = chosen(host)
    return LOCAL if found is None else Ssh(found)
