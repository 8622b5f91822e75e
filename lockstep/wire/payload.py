"""The payload of a job for its ranks: options for their `Session`, which a recipe's job gets as arguments, and the user's own code.

The launcher unpacks code that comes as an archive. The folder is the ranks' working directory and the first entry of their path. The
launcher has imported its own packages by then, and its own path does not change.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.training import files
from lockstep.training.contract import ENV_CODE, ENV_SESSION, RUN_FILE, UserError
from lockstep.wire import archive

PART = "part-*"
"""Names of the archive's pieces, in their order: a cluster may not hold a piece as large as the whole."""
_NAME_DIGITS = 16


@dataclass(frozen=True, slots=True)
class SessionOptions:
    run_dir: str = ""
    """The run directory, in place of the script's own; "": the script's."""
    settings: tuple[str, ...] = ()
    """Settings NAME=VALUE, which override the script's own."""
    fresh: str = ""
    """The word with which the run starts over (`RunDirectory.open`); "": the run resumes."""
    expected: bool = False
    """Returns whether the job has settings or starts over: a program without a Session ignores both."""

    def text(self) -> str:
        return json.dumps({name: value for name, value in asdict(self).items() if value}, sort_keys=True)

    @classmethod
    def of(cls, text: str) -> SessionOptions:
        """Returns the options of a text. Raises `UserError` for a text that `text()` has not made."""
        try:
            values = json.loads(text)
            options = cls(**{**values, "settings": tuple(values.get("settings", ()))})
            if all(isinstance(part, str) for part in (options.run_dir, options.fresh, *options.settings)):
                return options
        except (ValueError, TypeError, AttributeError):
            pass
        raise UserError(f"{ENV_SESSION} holds {text[:60]!r}: unset it, or give it what `lockstep run` sets")

    @classmethod
    def take(cls, env: MutableMapping[str, str]) -> SessionOptions:
        """Returns the job's options, in the first call only: any further Session has its own folder.

        Raises:
            UserError: the variable holds no options.
        """
        text = env.pop(ENV_SESSION, None)
        return cls.of(text) if text is not None else cls()

    def unused(self) -> str:
        """Returns a warning if the program has ended and opened no Session with these settings, else ""."""
        if not self.expected or not self.run_dir or os.path.exists(Path(self.run_dir, RUN_FILE)):
            return ""
        return (
            f"the program opened no Session in {self.run_dir}: the job's overrides and fresh reach a program by its "
            "lockstep.Session alone (docs/own-training.md)"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the launcher's arguments for the payload."""
    parser.add_argument("--session", type=SessionOptions.of, metavar="JSON",
                        help="run directory and settings for the Session that PROGRAM opens")  # fmt: skip
    parser.add_argument("--code", type=archive.check_identity, metavar="IDENTITY",
                        help="the ranks run code of one's own: its sha256, and where it lies")  # fmt: skip
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--code-folder", type=Path, metavar="DIR", help="the code, unpacked")
    where.add_argument(
        "--code-parts", type=Path, metavar="DIR", help=f"its archive in pieces, {PART}: unpacked below $TMPDIR"
    )


def enter(args: argparse.Namespace) -> None:
    """Sets the environment and the folder that the ranks inherit: the options, and the code, which comes first on their path.

    Raises:
        UserError: the code is missing, has another identity, or cannot be unpacked.
    """
    if args.session is not None:
        os.environ[ENV_SESSION] = args.session.text()
    place = args.code_folder or args.code_parts
    if (args.code is None) != (place is None):
        raise UserError(
            "--code needs --code-folder or --code-parts, where the code lies, and these need --code IDENTITY"
        )
    if place is None:
        return
    folder = unpacked(args.code, place) if args.code_parts is not None else place.absolute()
    # The folder from which `python -m lockstep.training` imported the launcher; the ranks start in another folder.
    launcher_path = sys.path[0]
    try:
        os.chdir(folder)
    except OSError as error:
        raise UserError(f"the code is not in {folder}: {error.strerror}") from None
    os.environ.update(environment(folder, args.code, os.environ, launcher_path))


def environment(folder: Path, identity: str, env: Mapping[str, str], launcher_path: str) -> dict[str, str]:
    """Returns the variables by which a rank finds the code.

    Args:
        launcher_path: the folder of `lockstep`, if not every Python searches it.
    """
    existing = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    missing = bool(launcher_path) and launcher_path not in (*existing, *sys.path[1:])
    ours = [launcher_path] if missing and Path(launcher_path, "training/contract.py").exists() else []
    return {"PYTHONPATH": os.pathsep.join([str(folder), *existing, *ours]), ENV_CODE: identity}


def unpacked(identity: str, parts: Path) -> Path:
    """Returns the folder with the unpacked code of these pieces. Raises `UserError`."""
    target = Path(tempfile.gettempdir()) / f"lockstep-code-{identity[:_NAME_DIGITS]}"
    data = b""
    try:
        for part in sorted(parts.glob(PART)):
            data += files.read(part, archive.MAX_PACKED - len(data))
    except OSError as error:
        raise UserError(f"cannot read the code in {parts}: {error.strerror}") from None
    if not data:
        raise UserError(f"there is no code in {parts}: submit the job again")
    if archive.holds(target, identity):
        return target  # an earlier start of this node
    return archive.unpack(data, identity, target)
