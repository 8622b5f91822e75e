"""python -m lockstep.training bench scaling | inference: measurements that answer a question, as a table, JSON and a chart."""

from __future__ import annotations

import importlib

from lockstep.training.cli import PROGRAM, Parser, about

_PARTS = ("scaling", "inference")


def main(argv: list[str]) -> int:
    """Runs one benchmark and returns its exit code. Raises `UserError` for wrong arguments."""
    parser = Parser(prog=f"{PROGRAM} bench", description=about(__doc__))
    parser.add_argument(
        "what",
        choices=_PARTS,
        help="trainings at 1, 2, 4 … ranks, or inference under DataParallel; each has its own --help",
    )
    what = parser.parse_args(argv[:1]).what
    return int(importlib.import_module(f"lockstep.training.exercises.bench.{what}").main(argv[1:]))
