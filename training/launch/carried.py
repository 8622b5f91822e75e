"""What a job hands to its ranks: settings for their `Session`, and the user's own code.

Code that comes as an archive is unpacked. Its folder is the ranks' working directory and the first one on their path. The
launcher has imported its own packages by then, and its own path does not change.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from lockstep.training import files
from lockstep.training.contract import ENV_CODE, ENV_SESSION, EXIT_DONE, UserError, tell_beside
from lockstep.training.launch import archive
from lockstep.training.launch.handed import Handed

PART = "part-*"
"""Pieces of the archive, in the order of their names: a cluster may hold none that is as large as the whole."""
_NAME_DIGITS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--session", type=Handed.of, metavar="JSON",
                        help="run directory and settings for the Session that PROGRAM opens")  # fmt: skip
    parser.add_argument("--code", type=archive.check_identity, metavar="IDENTITY",
                        help="the ranks run code of one's own: its sha256, and where it lies")  # fmt: skip
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--code-folder", type=Path, metavar="DIR", help="the code, unpacked")
    where.add_argument(
        "--code-parts", type=Path, metavar="DIR", help=f"its archive in pieces, {PART}: unpacked below $TMPDIR"
    )


def enter(args: argparse.Namespace) -> None:
    """What the ranks inherit: settings; the code, which is their folder and comes first on their path.

    Raises:
        UserError: the code is not there, is another one, or cannot be unpacked.
    """
    if args.session is not None:
        os.environ[ENV_SESSION] = args.session.text()
    if args.code is None:
        if args.code_folder is not None or args.code_parts is not None:
            raise UserError("--code-folder and --code-parts need --code IDENTITY")
        return
    if args.code_parts is not None:
        folder = unpacked(args.code, args.code_parts)
    elif args.code_folder is not None:
        folder = args.code_folder.absolute()
    else:
        raise UserError("--code needs --code-folder or --code-parts: where the code lies")
    # Where `python -m lockstep.training` found the launcher; the ranks start in another folder.
    launcher_path = sys.path[0]
    try:
        os.chdir(folder)
    except OSError as error:
        raise UserError(f"the code is not in {folder}: {error.strerror}") from None
    os.environ.update(environment(folder, args.code, dict(os.environ), launcher_path))


def leave(args: argparse.Namespace, code: int) -> None:
    """Warns where the ranks have ended well without a look at what they were handed."""
    if args.session is not None and code == EXIT_DONE and (warning := args.session.unused()):
        tell_beside(f"launch: warning: {warning}")


def environment(folder: Path, identity: str, env: dict[str, str], launcher_path: str = "") -> dict[str, str]:
    """The variables by which a rank finds the code.

    Args:
        launcher_path: where `training` was found, if not every Python looks there.
    """
    existing = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    missing = bool(launcher_path) and launcher_path not in (*existing, *sys.path[1:])
    ours = [launcher_path] if missing and Path(launcher_path, "training/contract.py").exists() else []
    return {"PYTHONPATH": os.pathsep.join([str(folder), *existing, *ours]), ENV_CODE: identity}


def unpacked(identity: str, parts: Path) -> Path:
    """The folder in which the code of these pieces lies, unpacked. Raises `UserError`."""
    target = Path(tempfile.gettempdir()) / f"lockstep-code-{identity[:_NAME_DIGITS]}"
    left, data = archive.MAX_PACKED, b""
    try:
        for part in sorted(parts.glob(PART)):
            piece = files.read(part, left)
            left -= len(piece)
            data += piece
    except OSError as error:
        raise UserError(f"cannot read the code in {parts}: {error.strerror}") from None
    if not data:
        raise UserError(f"there is no code in {parts}: submit the job again")
    entries = archive.read(data, identity)
    if target.exists() and archive.holds(target, identity):
        return target  # an earlier start of this node
    return archive.unpack(entries, target)
