"""What belongs inside a job, and loads torch: `python -m lockstep.training` takes this process's place."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from lockstep.training.contract import ENV_PROGRAM


def become(words: Sequence[str]) -> NoReturn:
    """`python -m lockstep.training WORDS`, under the name that was typed. Its signals and its exit code are this one's."""
    command = [sys.executable, "-m", "lockstep.training", *words]
    os.execve(command[0], command, {**os.environ, ENV_PROGRAM: "lockstep"})  # noqa: S606
