"""Writes a new project from its templates. Nothing that is there is overwritten."""

from __future__ import annotations

import os
import re
from pathlib import Path

from lockstep.training import files
from lockstep.training.contract import UserError

TEMPLATES = Path(__file__).parent / "templates"
NAMES = {
    "gitignore": ".gitignore", "lockstepignore": ".lockstepignore", "workflow.yml": ".github/workflows/test.yml",
    "test_train.py.template": "test_train.py",
}  # fmt: skip
"""Templates that have another name in the project. A package leaves out files whose names begin with a point, and pytest must
collect no test here."""
NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")


def create(folder: Path, name: str | None = None) -> list[str]:
    """Creates the files of the project in `folder`, which is new or empty. Returns their paths, relative to the folder.

    Args:
        name: name of the job; by default the folder's.

    Raises:
        UserError: the folder is not empty, it cannot be written, or a job cannot have that name.
    """
    folder = Path(os.path.abspath(folder))
    name = name if name is not None else re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-")
    if not NAME.fullmatch(name):
        raise UserError(
            f"{name!r} cannot be the name of a job: expected a letter, then at most 39 letters, digits and - (--name NAME)"
        )
    there = folder.is_dir() and next(folder.iterdir(), None)
    if there or (not folder.is_dir() and os.path.lexists(folder)):
        what = f"holds {there.name} already" if there else "is not a folder"
        raise UserError(f"{folder} {what}: name a folder that is new or empty")
    contents = {
        NAMES.get(path.name, path.name): path.read_text(encoding="utf-8").replace("@name@", name)
        for path in TEMPLATES.iterdir()
        if path.is_file()
    }
    try:
        with files.replacing(folder, durable=False) as temporary:
            for target, text in contents.items():
                path = temporary / target
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}") from None
    return sorted(contents)
