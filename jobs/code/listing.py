"""Which files of a folder travel: those that git would keep, and without git all, less `.lockstepignore`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from jobs import private
from jobs.code import repository, tree
from training import files
from training.contract import EVENTS_FILE, RUN_FILE, STATUS_FILE, UserError
from training.launch import archive
from training.launch.archive import DERIVED, MAX_FILES

IGNORE_FILE = ".lockstepignore"
NEVER = (".git", ".venv", DERIVED)
"""Names of files and folders that never travel. (`.git` is a file in a worktree and in a submodule.)"""
_MAX_IGNORE_BYTES = 1 << 20
_SUBMODULE = "160000"


def files_of(folder: Path) -> list[str]:
    """Paths of what travels, sorted, relative to the folder and with `/`. Links are among them.

    Raises:
        UserError: no folder, a git that fails, a submodule that was not fetched, more than `MAX_FILES`, or nothing left.
    """
    if not folder.is_dir():
        raise UserError(f"code: {folder} is not a folder")
    top = repository.top_of(folder)
    found = set(_walked(folder) if top is None else _git(folder, top))
    found = {path for path in found if not set(path.split("/")) & set(NEVER)}
    found = {path for path in found if not (folder / path).absolute().is_relative_to(private.home().absolute())}
    found = _without_products(found)
    found -= _ignored(folder, found)
    if len(found) > MAX_FILES:
        raise UserError(f"code: {folder} has {len(found)} files, more than {MAX_FILES}: name some in {IGNORE_FILE}")
    if not found:
        raise UserError(f"code: no file of {folder} would be sent: all are ignored, or it is empty")
    return sorted(found)


def _git(folder: Path, top: Path, prefix: str = "") -> Iterator[str]:
    """Tracked and untracked files that are not ignored, those of submodules and of repositories within, too."""
    with repository.opened(top) as ask:
        staged = [entry.partition("\t") for entry in ask(folder, "ls-files", "-z", "--stage").split("\0") if entry]
        others = ask(folder, "ls-files", "-z", "--others", "--exclude-standard").split("\0")
    inner = {path for about, _, path in staged if about.startswith(_SUBMODULE)}
    for path in [*(path for _, _, path in staged), *filter(None, others)]:
        if path in inner or path.endswith("/"):
            name = path.rstrip("/")
            archive.check_path(name)
            place = folder.resolve() / name
            if not (place / ".git").exists() or place.resolve() != place:  # behind a link: it may lead back here
                raise UserError(f"code: the submodule {prefix}{path} was not fetched: git submodule update --init")
            yield from _git(place, place, f"{prefix}{name}/")
        elif os.path.lexists(folder / path):  # a file that was removed, and is tracked still, does not travel
            yield prefix + path


def _walked(folder: Path) -> Iterator[str]:
    count = 0
    for parent, inner, names in os.walk(folder, onerror=_raised):
        links = [name for name in inner if os.path.islink(os.path.join(parent, name))]
        inner[:] = [name for name in inner if name not in NEVER and name not in links]
        if _is_product(set(names)):
            inner[:] = []
            continue
        for name in [*names, *links]:
            count += 1
            if count > 10 * MAX_FILES:
                raise UserError(f"code: {folder} has more than {10 * MAX_FILES} files: name a smaller folder")
            path = Path(parent, name).relative_to(folder).as_posix()
            try:
                path.encode()
            except UnicodeEncodeError:
                raise UserError(f"code: {path!r} is not UTF-8: give it another name") from None
            yield path


def _raised(error: OSError) -> None:
    raise UserError(f"code: cannot read {error.filename}: {error.strerror}")


def _is_product(names: set[str]) -> bool:
    """Whether that is a run directory, a folder of shards, or a virtual environment, by what lies in it."""
    run = RUN_FILE in names and bool(names & {STATUS_FILE, EVENTS_FILE})
    shards = "manifest.json" in names and any(name.endswith(".safetensors") for name in names)
    return run or shards or "pyvenv.cfg" in names


def _without_products(found: set[str]) -> set[str]:
    beside: dict[str, set[str]] = {}
    for path in found:
        parent, _, name = path.rpartition("/")
        beside.setdefault(parent, set()).add(name)
    products = tuple(f"{parent}/" for parent, names in beside.items() if parent and _is_product(names))
    return {path for path in found if not path.startswith(products)} if products else found


def _ignored(folder: Path, found: set[str]) -> set[str]:
    """What `.lockstepignore` takes away. It has gitignore's syntax, and adds nothing."""
    data = tree.lines_of(folder, IGNORE_FILE, _MAX_IGNORE_BYTES)
    if not data:
        return set()
    from pathspec import GitIgnoreSpec

    with files.reading(folder / IGNORE_FILE):
        lines = re.sub(
            r"\*{3,}", "*", data.decode()
        ).splitlines()  # the same to git, and to a regular expression shorter
        return set(GitIgnoreSpec.from_lines(lines).match_files(found))
