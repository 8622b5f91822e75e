"""lockstep fetch URL DIR: downloads a run from a bucket into a new directory. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.training.bucket import as_user_error
from lockstep.training.checkpoint.object_store import ObjectStore
from lockstep.training.contract import EXIT_DONE, EXIT_UNREACHABLE, UserError, printable, to_stderr
from lockstep.training.files import replacing

from . import parser


def main(argv: list[str]) -> int:
    """Downloads the last commit. Raises `UserError` for wrong arguments, and if the bucket does not answer."""
    parsed = parser("fetch")
    parsed.add_argument("url", metavar="URL", help="what the run's checkpoint.to says (s3://…)")
    parsed.add_argument(
        "out", type=Path, metavar="DIR", help="a new directory, for the commands that take a run directory"
    )
    args = parsed.parse_args(argv)
    if os.path.lexists(args.out):
        raise UserError(f"{args.out} exists already: choose another directory")
    with as_user_error(f"{args.url} cannot be read", EXIT_UNREACHABLE), replacing(args.out) as staging:
        staging.mkdir(parents=True)
        ObjectStore(args.url).download(staging, to_stderr)
    print(printable(str(args.out)))
    return EXIT_DONE
