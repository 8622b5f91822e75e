"""The commands of `python -m lockstep.training`, which `lockstep` has too, and their parser. Imports no torch.

Usage errors are one line, like every other error that a person can mend.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from .contract import ENV_PROGRAM, UserError

PROGRAM = os.environ.get(ENV_PROGRAM, "python -m lockstep.training")
COMMANDS = {
    "run": "train a recipe, or resume it",
    "shard": "preprocess a data set once into shard files",
    "evaluate": "score a run on the test split",
    "launch": "start the ranks of a node and wait for their end",
}
"""Each with a line of help."""
INSIDE = ("run", "launch")
"""Those that `lockstep` has in another form (`lockstep run`)."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def add_set(parser: argparse.ArgumentParser, help_text: str) -> None:
    """The option `--set NAME=VALUE …`, which may be given again; its help is `help_text`."""
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        type=_assignment,
        metavar="NAME=VALUE",
        dest="assignments",
        help=help_text,
    )


def _assignment(text: str) -> str:
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"takes NAME=VALUE, got {text!r}: what is no setting comes before --set")
    return text


def count(text: str, least: int = 0) -> int:
    """Returns a whole number from `least`, for `type=`."""
    if not text.isdecimal() or not least <= int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"must be a whole number from {least}, got {text!r}")
    return int(text)


def positive(text: str) -> int:
    """Returns a whole number from 1, for `type=`."""
    return count(text, 1)


def run_dir(text: str) -> Path:
    """Returns the path of a run directory, for `type=`. Raises `UserError` for a run in a bucket."""
    if text.startswith(("s3://", "gs://", "az://")):
        raise UserError(f"{text} is in a bucket, fetch it first: lockstep fetch {text} DIR")
    return Path(text)


def search_path(env: Mapping[str, str]) -> str:
    """PATH of a job's `command:`, in which `python` is this very interpreter: the one that has torch and Lockstep."""
    return os.pathsep.join([os.path.dirname(sys.executable), env.get("PATH", os.defpath)])
