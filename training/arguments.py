"""How the commands read their words: usage errors are one line, like every other error that a person can mend."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import NoReturn

from training.contract import UserError


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def positive(text: str) -> int:
    """A whole number from 1, for `type=`."""
    if not text.isdecimal() or not 1 <= int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, got {text!r}")
    return int(text)


def several(text: str) -> list[int]:
    """`1,2,4` → [1, 2, 4], for `type=`."""
    return [positive(part) for part in text.split(",")]


def make_folder(path: Path) -> None:
    """Makes the folder of `--out`, and sees that files can be written there: before what goes in takes its time.

    Raises:
        UserError: it cannot be made, or nothing can be written in it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UserError(f"--out {path}: {error.strerror or error}; name a folder that can be written") from None
