"""How the commands read their words: usage errors are one line, like every other error that a person can mend."""

from __future__ import annotations

import argparse
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
