"""Which files of a folder travel: those that git would keep, and without git all, less `.lockstepignore`."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from lockstep.jobs import records
from lockstep.jobs.code import repository, tree
from lockstep.training import files
from lockstep.training.contract import EVENTS_FILE, RUN_FILE, STATUS_FILE, UserError
from lockstep.wire import archive
from lockstep.wire.archive import DERIVED, MAX_FILES

IGNORE_FILE = ".lockstepignore"
NEVER = (".git", ".venv", DERIVED)
"""Names of files and folders that never travel. (`.git` is a file in a worktree and in a submodule.)"""
_MAX_IGNORE_BYTES = 1 << 20
_MAX_REPOSITORIES = 500
_GIT_SECONDS = 12
_SUBMODULE = "160000"
_PATTERN_SECONDS = 10
_MATCH = """
import json, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[2]), int(sys.argv[2])))  # it ends also if its parent was killed
except (ImportError, OSError, ValueError):
    pass
sys.path.append(sys.argv[1])
from pathspec import GitIgnoreSpec
lines, paths = json.load(sys.stdin)
try:
    json.dump([*GitIgnoreSpec.from_lines(lines).match_files(paths)], sys.stdout)
except Exception as error:
    sys.exit(f"{error}")
"""


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
    found = _without_jobs(folder.absolute(), found)
    found = _without_products(found)
    found -= _ignored(folder, found)
    if len(found) > MAX_FILES:
        raise UserError(f"code: {folder} has {len(found)} files, more than {MAX_FILES}: name some in {IGNORE_FILE}")
    if not found:
        raise UserError(f"code: no file of {folder} would be sent: all are ignored, or it is empty")
    return sorted(found)


def _git(folder: Path, top: Path) -> Iterator[str]:
    """Tracked and untracked files that are not ignored, those of submodules and of repositories within, too."""
    left, known, last = [(folder, top, "")], 1, time.monotonic() + _GIT_SECONDS
    while left:
        if known > _MAX_REPOSITORIES or time.monotonic() > last:
            raise UserError(
                f"code: {folder} holds more than {_MAX_REPOSITORIES} git repositories, or git needs more than {_GIT_SECONDS} s "
                "for them: name a smaller folder"
            )
        inside, top, prefix = left.pop()
        with repository.opened(top) as ask:
            staged = [entry.partition("\t") for entry in ask(inside, "ls-files", "-z", "--stage").split("\0") if entry]
            others = ask(inside, "ls-files", "-z", "--others", "--exclude-standard").split("\0")
        inner = {path for about, _, path in staged if about.startswith(_SUBMODULE)}
        for path in [*(path for _, _, path in staged), *filter(None, others)]:
            if path in inner or path.endswith("/"):
                name = path.rstrip("/")
                archive.check_path(prefix + name)
                place = inside.resolve() / name
                if not (place / ".git").exists() or place.resolve() != place:  # behind a link: it may lead back here
                    raise UserError(f"code: the submodule {prefix}{path} was not fetched: git submodule update --init")
                left.append((place, place, f"{prefix}{name}/"))
                known += 1
            elif os.path.lexists(inside / path):  # a file that was removed, and is tracked still, does not travel
                yield prefix + path


def _walked(folder: Path) -> Iterator[str]:
    left, count = [""], 0
    while left:
        prefix = left.pop()
        try:
            with os.scandir(folder / prefix) as entries:
                kinds = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
        except OSError as error:
            raise UserError(f"code: cannot read {error.filename}: {error.strerror}") from None
        count += len(kinds)
        if count > 10 * MAX_FILES:
            raise UserError(f"code: {folder} has more than {10 * MAX_FILES} files: name a smaller folder")
        if _is_product({name for name, is_folder in kinds.items() if not is_folder}):
            continue
        for name, is_folder in kinds.items():
            path = prefix + name
            try:
                length = len(path.encode())
            except UnicodeEncodeError:
                raise UserError(f"code: {path!r} is not UTF-8: give it another name") from None
            if not is_folder or length > archive.MAX_PATH:  # such a folder counts as a file, whose path is refused
                yield path
            elif name not in NEVER:
                left.append(f"{path}/")


def _is_product(names: set[str]) -> bool:
    """Whether that is a run directory, a folder of shards, or a virtual environment, by what lies in it."""
    run = RUN_FILE in names and bool(names & {STATUS_FILE, EVENTS_FILE})
    shards = "manifest.json" in names and any(name.endswith(".safetensors") for name in names)
    return run or shards or "pyvenv.cfg" in names


def _without_jobs(folder: Path, found: set[str]) -> set[str]:
    """What does not lie in the folder of jobs."""
    home = records.home().absolute()
    if folder.is_relative_to(home):
        return set()
    if not home.is_relative_to(folder):
        return found
    ours = f"{home.relative_to(folder).as_posix()}/"
    return {path for path in found if not f"{path}/".startswith(ours)}


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
    with files.reading(folder / IGNORE_FILE):
        return _matched(data.decode(), found, IGNORE_FILE)


def _matched(text: str, paths: set[str], name: str) -> set[str]:
    """Those of the paths that gitignore patterns match. They are anybody's: pathspec makes a regular expression of each, and one
    with ten stars takes for ever, which no thread can end. So another process matches them, with a time limit.

    Args:
        name: of the file with the patterns, for people.

    Raises:
        UserError: it takes too long.
        ValueError: no patterns.
    """
    lines = re.sub(r"\*{3,}", "*", text).splitlines()  # the same to git
    found = importlib.util.find_spec("pathspec")  # not imported here: only the other process needs it
    assert found is not None and found.origin is not None
    place = str(Path(found.origin).parents[1])
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _MATCH, place, str(_PATTERN_SECONDS)], input=json.dumps([lines, sorted(paths)]),
            capture_output=True, text=True, timeout=_PATTERN_SECONDS, check=False, cwd=place,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UserError(f"code: {name} has patterns that take more than {_PATTERN_SECONDS} s: simplify them") from None
    if done.returncode < 0:  # by the limit that it has itself, or for its memory
        raise UserError(f"code: {name} has patterns that take too much: simplify them")
    if done.returncode != 0:
        raise ValueError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no patterns")
    return set(json.loads(done.stdout))
