"""Which files of a folder travel: those that git would keep, and without git all, less `.lockstepignore`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from jobs import private
from training import files
from training.contract import EVENTS_FILE, RUN_FILE, STATUS_FILE, UserError
from training.launch.archive import DERIVED, MAX_FILES

IGNORE_FILE = ".lockstepignore"
NEVER = (".git", ".venv", DERIVED)
"""Names of files and folders that never travel. (`.git` is a file in a worktree and in a submodule.)"""
_MAX_IGNORE_BYTES = 1 << 20
_GIT_SECONDS = 60
_SUBMODULE = "160000"


def files_of(folder: Path) -> list[str]:
    """Paths of what travels, sorted, relative to the folder and with `/`. Links are among them.

    Raises:
        UserError: no folder, a git that fails, a submodule that was not fetched, more than `MAX_FILES`, or nothing left.
    """
    if not folder.is_dir():
        raise UserError(f"code: {folder} is not a folder")
    found = set(_git(folder) if _in_repository(folder) else _walked(folder))
    found = {path for path in found if not set(path.split("/")) & set(NEVER)}
    found = {path for path in found if not (folder / path).absolute().is_relative_to(private.home().absolute())}
    found = _without_products(found)
    found -= _ignored(folder, found)
    if len(found) > MAX_FILES:
        raise UserError(f"code: {folder} has {len(found)} files, more than {MAX_FILES}: name some in {IGNORE_FILE}")
    if not found:
        raise UserError(f"code: no file of {folder} would be sent: all are ignored, or it is empty")
    return sorted(found)


def _in_repository(folder: Path) -> bool:
    """Raises `UserError` where that cannot be told: without git's list, files would travel that it keeps out."""
    above = [parent for parent in (folder.absolute(), *folder.absolute().parents) if (parent / ".git").exists()]
    if not above:
        return False
    said = _ask(folder, "rev-parse", "--is-inside-work-tree")
    if said.strip() != "true":
        raise UserError(f"code: {folder} is in the git repository {above[0]}, but not in a working tree of it")
    return True


def _git(folder: Path, prefix: str = "") -> Iterator[str]:
    """Tracked and untracked files that are not ignored, those of submodules and of repositories within, too."""
    staged = [entry.partition("\t") for entry in _ask(folder, "ls-files", "-z", "--stage").split("\0") if entry]
    inner = {path for about, _, path in staged if about.startswith(_SUBMODULE)}
    others = _ask(folder, "ls-files", "-z", "--others", "--exclude-standard").split("\0")
    for path in [*(path for _, _, path in staged), *filter(None, others)]:
        if path in inner or path.endswith("/"):
            place = folder / path
            if not (place / ".git").exists():
                raise UserError(f"code: the submodule {prefix}{path} was not fetched: git submodule update --init")
            yield from _git(place, f"{prefix}{path.rstrip('/')}/")
        elif os.path.lexists(folder / path):  # a file that was removed, and is tracked still, does not travel
            yield prefix + path


def _ask(folder: Path, *words: str) -> str:
    # Which repository it is, the folder says; nor may its settings start a program.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", *words], cwd=folder, env={**env, "LC_ALL": "C"}, capture_output=True,
            timeout=_GIT_SECONDS, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise UserError(f"code: {folder} is in a git repository, and git is not installed: install git") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"code: git did not answer within {_GIT_SECONDS} s in {folder}") from None
    if done.returncode != 0:
        told = done.stderr.decode(errors="replace").strip().splitlines()
        raise UserError(f"code: git {words[0]} fails in {folder}: {told[0] if told else done.returncode}")
    try:
        return done.stdout.decode()
    except UnicodeDecodeError:
        raise UserError(f"code: {folder} has a file whose name is not UTF-8: give it another name") from None


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
    if not os.path.lexists(folder / IGNORE_FILE):
        return set()
    from pathspec import GitIgnoreSpec

    try:
        lines = files.read(folder / IGNORE_FILE, _MAX_IGNORE_BYTES).decode().splitlines()
        spec = GitIgnoreSpec.from_lines(lines)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UserError(f"code: cannot read {folder / IGNORE_FILE}: {reason}") from None
    return set(spec.match_files(found))
