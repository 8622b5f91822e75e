"""Snapshots of the code that jobs run from: $LOCKSTEP_HOME/code/IDENTITY.tar.gz, and IDENTITY/, unpacked and read-only.

A folder is read once: the files that travel, their identity and their archive are of the same bytes. The files are those that
`.gitignore` and `.lockstepignore` leave, without git. A file that cannot travel is refused by name. A snapshot gets its name when it
is complete, and never changes: the submitted code is the code that runs.
"""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import os
import posixpath
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lockstep.training import files
from lockstep.training.config.settings import nearest
from lockstep.training.contract import EVENTS_FILE, RUN_FILE, STATUS_FILE, UserError
from lockstep.wire import archive
from lockstep.wire.archive import DERIVED, MAX_BYTES, MAX_FILES, MAX_PACKED, File

from . import records
from .manifest import get
from .spec.model import JobSpec, code_identity
from .spec.types import Code
from .status import warn

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

FOLDER = "code"
"""Folder in $LOCKSTEP_HOME; for SLURM, the nodes must share its storage."""
KEPT_SECONDS = 7 * 86400
"""Seconds for which a copy is kept that no job of this machine names."""
IGNORE_FILE = ".lockstepignore"
GIT_IGNORE_FILE = ".gitignore"
NEVER = (".git", ".venv", DERIVED)
"""Names of files and folders that never travel. (`.git` is a file in a worktree and in a submodule.)"""
NAMED = 10
"""Files that an error or a warning names at most."""
_MAX_IGNORE_BYTES = 1 << 20
_MAX_WILDCARDS = 4
"""Largest number of wildcards in a part of a pattern, and of `**` in all parts. The time to match grows exponentially with it; this
number takes a second at most."""
_SECRETS = (
    ".env*", "*.pem", "id_*", ".netrc", "_netrc", ".npmrc", "kubeconfig*", "*.kubeconfig", "credentials*",
    "*/.kube/config", "*/.docker/config.json",
)  # fmt: skip
"""Patterns of a file's name in small letters, or of its path."""
_HARMLESS = ".example"
"""End of the name of a file with sample values, not real ones."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Code that can travel."""

    files: list[File]
    """Sorted by path."""
    identity: str
    packed: bytes
    """Bytes of the archive."""


def collect(folder: Path) -> Bundle:
    """Returns the code of a folder, with all checks done before any byte is sent.

    Raises:
        UserError: the folder contains a file that cannot travel, or is too large; the text has the path and the reason.
    """
    paths = _paths(folder)
    _warn_of_secrets(paths)
    known = set(paths)
    try:
        places = {path: _place(folder.resolve(), path, known) for path in paths}
        status = {path: place.stat() for path, place in places.items()}
        sizes = {path: one.st_size for path, one in status.items()}
        if sum(sizes.values()) > MAX_BYTES:
            raise _too_large(sizes, f"{sum(sizes.values())} bytes", f"{MAX_BYTES >> 20} MiB")
        contents = [
            File(path, bool(status[path].st_mode & 0o100), files.read(place, MAX_BYTES))
            for path, place in places.items()
        ]
    except OSError as error:
        raise UserError(f"code: {error.filename} cannot be read: {error.strerror}") from None
    packed = archive.pack(contents)
    if len(packed) > MAX_PACKED:
        raise _too_large(sizes, f"{len(packed)} bytes in an archive", f"{MAX_PACKED >> 20} MiB")
    return Bundle(contents, archive.identity(contents), packed)


class _Rule(NamedTuple):
    """The patterns of one file, and the offset from which they match a path of the repository."""

    spec: GitIgnoreSpec
    inside: int
    """Characters of the path of the file's folder, with a `/` at its end."""


def _paths(folder: Path) -> list[str]:
    """Returns the paths of the files that travel, sorted, relative to the folder and with `/`. Includes links. Raises `UserError`."""
    if not folder.is_dir():
        raise UserError(f"code: {folder} is not a folder")
    base, above, outside = _above(folder.resolve())
    own = [_Rule(spec, len(base)) for spec in _patterns(folder / IGNORE_FILE)]
    home, paths, left = records.home().absolute(), list[str](), [("", above)]
    while left:
        prefix, rules = left.pop()
        try:
            with os.scandir(folder / prefix) as entries:
                is_folder = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
        except OSError as error:
            raise UserError(f"code: cannot read {error.filename}: {error.strerror}") from None
        if prefix and _is_product({name for name, inner in is_folder.items() if not inner}):
            continue
        inside = len(base + prefix)
        rules = [*rules, *(_Rule(spec, inside) for spec in _patterns(folder / prefix / GIT_IGNORE_FILE))]
        for name, inner in is_folder.items():
            path = f"{prefix}{name}"
            seen = f"{base}{path}/" if inner else base + path
            ignored = _is_ignored(seen, own)
            if name in NEVER or (ignored is None and (outside or _is_ignored(seen, rules))) or ignored:
                continue
            try:
                archive.check_path(path)
            except UserError as error:
                raise UserError(f"code: {error}") from None
            if inner and (folder / path).absolute() != home:
                left.append((f"{path}/", rules))
            elif not inner:
                paths.append(path)
        if len(paths) > MAX_FILES:
            raise UserError(f"code: {folder} has more than {MAX_FILES} files: name some in {IGNORE_FILE}")
    if not paths:
        raise UserError(f"code: no file of {folder} would be sent: all are ignored, or it is empty")
    return sorted(paths)


def _patterns(file: Path) -> Iterator[GitIgnoreSpec]:
    """Yields the patterns of the file, if it exists. Raises `UserError`."""
    if os.path.lexists(file):
        from pathspec import GitIgnoreSpec  # most commands read no code

        with files.reading(file):
            lines = files.read(file, _MAX_IGNORE_BYTES).decode("utf-8-sig").splitlines()
            _check_patterns(file, lines)
            # pathspec reads `a/**/` as `a/`; git reads it as the folders inside.
            yield GitIgnoreSpec.from_lines([re.sub(r"/\*\*/$", "/**/*/", line) for line in lines])


def _check_patterns(file: Path, lines: list[str]) -> None:
    """Raises `UserError` for a pattern that pathspec does not know, or that may take minutes to match one path."""
    for number, line in enumerate(lines, 1):
        most = max(line.split("/").count("**"), *(len(re.findall(r"\*+", part)) for part in line.split("/")))
        if most > _MAX_WILDCARDS and not line.startswith("#"):
            raise UserError(
                f"code: {file}, line {number} has {most} wildcards, expected at most {_MAX_WILDCARDS}: shorten it"
            )
        if "[[:" in line and not line.startswith("#"):
            raise UserError(
                f"code: {file}, line {number} has a class such as [[:digit:]], which is not known here: write [0-9]"
            )


def _above(folder: Path) -> tuple[str, list[_Rule], bool]:
    """Returns the folder's path in its repository, the rules of the repository, and whether they ignore the folder itself."""
    top = next((place for place in (folder, *folder.parents) if (place / ".git").exists()), folder)
    base, rules, ignored = "", list[_Rule](), False
    for part in folder.relative_to(top).parts:
        rules += [_Rule(spec, len(base)) for spec in _patterns(top / base / GIT_IGNORE_FILE)]
        base += f"{part}/"
        ignored = ignored or bool(_is_ignored(base, rules))
    return base, rules, ignored


def _is_ignored(path: str, rules: list[_Rule]) -> bool | None:
    """Returns whether the last pattern that matches the path ignores it; None if no pattern matches. A folder's path ends with `/`."""
    for rule in reversed(rules):
        for pattern in reversed(list(rule.spec.patterns)):
            if pattern.regex is not None and _matches(pattern.regex, path[rule.inside :]):
                return pattern.include
    return None


def _matches(pattern: re.Pattern[str], path: str) -> bool:
    """Returns whether the pattern matches the path itself. A match of a parent folder decides about that folder alone.

    pathspec marks the `/` after a folder with a group. A pattern without this group, such as `a/**`, matches the files in a folder.
    """
    if "ps_d" in pattern.groupindex:
        return any(match.end("ps_d") in (-1, len(path)) for match in pattern.finditer(path))
    return pattern.search(path.removesuffix("/")) is not None


def _is_product(names: set[str]) -> bool:
    """Returns whether a folder with these names is a run directory, a folder of shards, or a virtual environment."""
    run = RUN_FILE in names and bool(names & {STATUS_FILE, EVENTS_FILE})
    shards = "manifest.json" in names and any(name.endswith(".safetensors") for name in names)
    return run or shards or "pyvenv.cfg" in names


def _place(root: Path, path: str, paths: set[str]) -> Path:
    """Returns the regular file that a path names. A link may not lead to a file that does not travel by itself. Raises `UserError`."""
    place = root / path
    target = Path(os.path.realpath(place))
    if place.is_symlink() and (target.is_symlink() or os.path.relpath(target, root) not in paths):
        raise UserError(
            f"code: {path} is a link to {os.readlink(place)}, which does not travel: name it in {IGNORE_FILE}"
        )
    if not stat.S_ISREG(target.lstat().st_mode):
        raise UserError(f"code: {path} is not a regular file (a device, a pipe or a socket): name it in {IGNORE_FILE}")
    return target


def _warn_of_secrets(paths: list[str]) -> None:
    suspects = []
    for path in paths:
        lower = path.lower()
        names = (lower.rpartition("/")[2], f"/{lower}")
        if not lower.endswith(_HARMLESS) and any(
            fnmatch.fnmatchcase(name, rule) for name in names for rule in _SECRETS
        ):
            suspects.append(path)
    if suspects:
        more = f" and {len(suspects) - NAMED} more" if len(suspects) > NAMED else ""
        warn(
            f"code: {', '.join(suspects[:NAMED])}{more} travel, and look like secrets: name them in {IGNORE_FILE} if they are"
        )


def _too_large(sizes: dict[str, int], size: str, limit: str) -> UserError:
    largest = sorted(sizes, key=lambda path: (-sizes[path], path))[:NAMED]
    named = ", ".join(f"{path} ({sizes[path]})" for path in largest)
    return UserError(
        f"code: {size}, at most {limit} can be sent; the largest files: {named}; name what is not needed in {IGNORE_FILE}"
    )


def store(identity: str, packed: bytes) -> None:
    """Saves the archive. Raises `UserError`."""
    place = records.make(records.folder(FOLDER)) / f"{archive.check_identity(identity)}.tar.gz"
    with records.keeping(place.parent, "cannot keep the code in"):
        files.replace(place, packed)
    _remove_unused()


def packed(identity: str) -> bytes:
    """Returns the archive of a copy. Raises `UserError` if the archive is missing or damaged."""
    place = records.folder(FOLDER) / f"{archive.check_identity(identity)}.tar.gz"
    try:
        records.check(place.parent)
        data = files.read(place, archive.MAX_PACKED)
    except OSError as error:
        raise UserError(
            f"the code {identity[:12]} is not stored in {place.parent} ({error.strerror}): submit it from its folder"
        ) from None
    archive.read(data, identity)  # a faulty disk or a person may have changed the archive
    return data


def folder_of(spec: JobSpec) -> str:
    """Returns the folder of the job's unpacked code; "" without code. Raises `UserError` if the code has not been read yet."""
    return str(records.folder(FOLDER) / code_identity(spec)) if spec.code is not None else ""


def unpacked(identity: str) -> Path:
    """Returns the unpacked copy, and creates it if it is missing. Renames a copy that was changed: a job may run in it. Raises
    `UserError`."""
    target = records.folder(FOLDER) / identity
    data = packed(identity)
    if os.path.lexists(target) and not archive.holds(target, identity):
        aside = target.with_name(f".{identity}.changed.{os.getpid()}")
        warn(f"{target} was changed since it was written: it is moved to {aside.name}")
        try:
            target.rename(aside)
        except OSError as error:
            raise UserError(f"{target} was changed, and cannot be moved away: {error.strerror}") from None
    return target if target.exists() else archive.unpack(data, identity, target)


def _remove_unused() -> None:
    """Removes copies that no job names, and leftovers of killed commands, after a week."""
    old = time.time() - KEPT_SECONDS
    jobs = (files.read_json(path) for path in records.home().glob("*/*/job.json"))
    named = {str(get(job, "spec", "code", "hash")) for job in jobs}
    for place in records.folder(FOLDER).iterdir():
        identity = place.name.removesuffix(".tar.gz")
        with contextlib.suppress(OSError):
            if identity in named or place.lstat().st_mtime > old:
                continue
            if place.is_dir():
                archive.remove(place)
            else:
                place.unlink()


def resolve(spec: JobSpec) -> tuple[JobSpec, Bundle | None]:
    """Returns the spec with the identity of its code, and the code. Saves nothing.

    Returns:
        None in place of the code if there is none, or the spec names a stored copy.

    Raises:
        UserError: the code contains a file that must not travel, or lacks the recipe, or the script of `command`.
    """
    if spec.code is None or (spec.code.hash is not None and spec.code.packed):
        return spec, None
    if spec.code.hash is not None:
        return _with_code(spec, spec.code.hash, packed(spec.code.hash)), None
    bundle = collect(Path(spec.code.path))
    recipe = spec.recipe or ""
    own = recipe.endswith((".yaml", ".yml")) and not Path(recipe).is_absolute()
    needed = [("recipe", recipe)] * own + [("command", word) for word in _scripts(spec)]
    paths = {file.path for file in bundle.files}
    for setting, path in needed:
        if posixpath.normpath(path) not in paths:
            raise UserError(
                f"{setting} {path} is not part of the code{nearest(path, paths)}: name a file inside the code's folder, by its "
                "path from there"
            )
    return _with_code(spec, bundle.identity, bundle.packed), bundle


def _scripts(spec: JobSpec) -> Iterator[str]:
    """Yields the script that `command` starts, if a word names one in the code's folder."""
    for before, word in itertools.pairwise(["", *(spec.command or [])]):
        if word in ("-c", "-m"):
            return
        if re.fullmatch(r"[^-\s]\S*\.(py|sh)", word) and not before.startswith("--"):
            if not word.startswith("/"):
                yield word
            return


def snapshot_all(specs: list[JobSpec]) -> list[JobSpec]:
    """Returns the resolved specs of a job, or of the runs of a sweep, and saves their code. Reads each folder once, so that all runs have
    the same code. Raises `UserError`, also if a spec names a copy that is not stored."""
    known: dict[Code | None, Code | None] = {}
    for spec in specs:
        if spec.code not in known:
            resolved, bundle = resolve(spec)
            if bundle is not None:
                store(bundle.identity, bundle.packed)
            elif resolved.code is not None and resolved.code.hash is not None:
                resolved = _with_code(resolved, resolved.code.hash, packed(resolved.code.hash))
            known[spec.code] = resolved.code
    return [spec.model_copy(update={"code": known[spec.code]}) for spec in specs]


def _with_code(spec: JobSpec, identity: str, archived: bytes) -> JobSpec:
    # The place of the code is no part of the job, and the cluster does not need it.
    return spec.model_copy(update={"code": Code(hash=identity, packed=len(archived))})
