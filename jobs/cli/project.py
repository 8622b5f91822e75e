"""`lockstep init`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that is new or empty.")],
    recipe: Annotated[
        bool, typer.Option("--recipe", help="A recipe with a network and data of your own, in place of a script.")
    ] = False,
    name: Annotated[str | None, typer.Option(help="Name of its job; by default the folder's.")] = None,
) -> None:
    """Begin a project: a training, its test, and a job for every backend."""
    from lockstep.jobs.project.create import create
    from lockstep.jobs.terminal import say

    files = create(folder, "recipe" if recipe else "loop", name)
    say(f"{folder}: {', '.join(files)}")
    say(f"Now: cd {shlex.quote(str(folder))} && make train && make test")
