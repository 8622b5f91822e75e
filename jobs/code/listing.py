"""Which files of a folder travel: those that git would keep, and without git all, less `.lockstepignore`.

A repository's own settings can start programs: core.fsmonitor, hooks, and, where an object is missing, a fetch by
core.sshCommand. So git is asked in an empty repository of ours that borrows the other one's index and objects. Of the
settings only those count that say what is kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from lockstep.training import files
from lockstep.training.contract import EVENTS_FILE, RUN_FILE, STATUS_FILE, UserError
from lockstep.wire import archive
from lockstep.wire.archive import DERIVED, MAX_FILES

from .. import records
from . import tree

IGNORE_FILE = ".lockstepignore"
NEVER = (".git", ".venv", DERIVED)
"""Names of files and folders that never travel. (`.git` is a file in a worktree and in a submodule.)"""
_MAX_IGNORE_BYTES = 1 << 20
_MAX_REPOSITORIES = 500
_GIT_SECONDS = 90
_SUBMODULE = "160000"
_PATTERN_SECONDS = 10
"""Of CPU time, which a busy machine does not take away."""
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
_TAKEN = ("core.ignorecase", "core.precomposeunicode")
"""Settings that are taken over. None of them starts a program, or names a file."""
_EXCLUDES = "core.excludesfile"
_FORMAT = "extensions.objectformat"
_COMMAND_SECONDS = 60
"""By the clock of the wall, because git that reads a pipe takes no CPU time. A busy machine must not reach them."""
_MAX_CONFIG = 1 << 20
_MAX_LINE = 1 << 12
_MAX_EXCLUDE = 1 << 20


def files_of(folder: Path) -> list[str]:
    """Paths of what travels, sorted, relative to the folder and with `/`. Links are among them.

    Raises:
        UserError: no folder, a git that fails, a submodule that was not fetched, more than `MAX_FILES`, or nothing left.
    """
    if not folder.is_dir():
        raise UserError(f"code: {folder} is not a folder")
    top = _top_of(folder)
    found = set(_walked(folder) if top is None else _git(folder.absolute(), top))
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
        with _opened(top) as ask:
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
    with ten stars takes for ever, which no thread can end. So another process matches them, with a limit of its CPU time.

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
    done = subprocess.run(
        [sys.executable, "-I", "-c", _MATCH, place, str(_PATTERN_SECONDS)], input=json.dumps([lines, sorted(paths)]),
        capture_output=True, text=True, check=False, cwd=place,
    )  # fmt: skip
    if done.returncode < 0:  # by its limit, or for its memory
        raise UserError(f"code: {name} has patterns that take too much CPU time or memory: simplify them")
    if done.returncode != 0:
        raise ValueError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no patterns")
    return set(json.loads(done.stdout))


class _Ask(Protocol):
    """Runs a command of git's in a folder of the working tree; gives what it prints."""

    def __call__(self, folder: Path, *words: str) -> str: ...


def _top_of(folder: Path) -> Path | None:
    """The working tree that a folder is in, None where it is in none. Raises `UserError` in a repository's own folder."""
    folder = folder.resolve()
    above = next((parent for parent in (folder, *folder.parents) if (parent / ".git").exists()), None)
    if above is not None and folder.is_relative_to(_folders(above)[0].resolve()):
        raise UserError(f"code: {folder} is in the git repository {above}, but not in a working tree of it")
    return above


@contextlib.contextmanager
def _opened(top: Path) -> Iterator[_Ask]:
    """Questions to git about the working tree `top`. Raises `UserError`, as they do."""
    own, common = _folders(top)
    with tempfile.TemporaryDirectory(prefix="lockstep-git-", ignore_cleanup_errors=True) as made:
        ours = Path(made)
        (ours / "refs").mkdir()
        (ours / "info").mkdir()
        (ours / "HEAD").write_text("ref: refs/heads/none\n")
        (ours / "info/exclude").write_bytes(tree.lines_of(common, "info/exclude", _MAX_EXCLUDE))
        for part in own.glob("sharedindex.*"):
            (ours / part.name).symlink_to(part.absolute())
        env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        env |= {
            "LC_ALL": "C", "GIT_DIR": made, "GIT_WORK_TREE": str(top), "GIT_INDEX_FILE": str((own / "index").absolute()),
            "GIT_OBJECT_DIRECTORY": str((common / "objects").absolute()), "GIT_ALLOW_PROTOCOL": "none",
        }  # fmt: skip
        settings = {"core.fsmonitor": "false"}

        def ask(folder: Path, *words: str) -> str:
            given = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
            return _run(folder, ["-C", str(folder), *given], words, env, made)

        usual = str(_usual_excludes())
        named = ask(ours, "config", "--type=path", "--default", usual, "--get", _EXCLUDES).removesuffix("\n")
        (ours / "excludes").write_bytes(_excluded(Path(named or os.devnull)))
        settings[_EXCLUDES] = str(ours / "excludes")
        with contextlib.suppress(FileNotFoundError):
            (ours / "theirs").write_bytes(_read(common / "config", _MAX_CONFIG))
            listed = ask(ours, "config", "--file", str(ours / "theirs"), "--no-includes", "--list", "-z")
            known = dict(entry.partition("\n")[::2] for entry in listed.split("\0"))
            if _EXCLUDES in known:
                raise UserError(
                    f"code: the git repository {top} names its own file of what is ignored ({_EXCLUDES}), which may be anybody's: "
                    f"put its lines into .git/info/exclude, and git config --unset {_EXCLUDES}"
                )
            settings |= {name: known[name] for name in _TAKEN if name in known}
            if known.get(_FORMAT) == "sha256":  # git takes it from a file only
                (ours / "config").write_text(
                    "[core]\nrepositoryformatversion = 1\n[extensions]\nobjectformat = sha256\n"
                )
        yield ask


def _usual_excludes() -> Path:
    """Where git looks for what this user ignores everywhere, if no setting names another file."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "git/ignore"


def _excluded(path: Path) -> bytes:
    return _read(path, _MAX_EXCLUDE) if str(path) != os.devnull and path.exists() else b""


def _folders(top: Path) -> tuple[Path, Path]:
    """The repository's folders: that of this working tree, and the one that all its working trees share."""
    own = top / ".git"
    try:
        if own.is_file():
            own = top / _line(own).removeprefix("gitdir:").strip()
        common = own / _line(own / "commondir") if (own / "commondir").exists() else own
        whole = (own / "HEAD").exists() and (common / "objects").is_dir()
    except (OSError, ValueError) as error:
        # Not the text of the error: it may quote a path, which is whatever stands in a file that a link leads to.
        reason = getattr(error, "strerror", None) or "a path in it is not valid"
        raise UserError(f"code: cannot read the git repository {top / '.git'}: {reason}") from None
    if not whole:
        raise UserError(f"code: {top / '.git'} is not a git repository: remove it, or git init {top}")
    return own, common


def _line(path: Path) -> str:
    return files.read(path, _MAX_LINE).decode().strip()


def _read(path: Path, limit: int) -> bytes:
    try:
        return files.read(path, limit)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"code: cannot read {path}: {error.strerror}") from None


def _run(folder: Path, options: list[str], words: tuple[str, ...], env: dict[str, str], here: str) -> str:
    try:
        libc = ctypes.CDLL(None)  # not in the child: another thread may hold the loader's lock

        def end_with_us() -> None:
            if sys.platform == "linux":  # PR_SET_PDEATHSIG: git that waits for a pipe would never end
                libc.prctl(1, int(signal.SIGKILL), 0, 0, 0)

        done = subprocess.run(
            ["git", *options, *words], cwd=here, env=env, capture_output=True, timeout=_COMMAND_SECONDS, check=False,
            stdin=subprocess.DEVNULL, preexec_fn=end_with_us,
        )  # fmt: skip
    except FileNotFoundError:
        raise UserError(f"code: {folder} is in a git repository, and git is not installed: install git") from None
    except subprocess.TimeoutExpired:
        raise UserError(
            f"code: git did not answer within {_COMMAND_SECONDS} s in {folder}: is a .gitignore or a file in .git there a pipe, or has it "
            "too many files? Then name a smaller folder"
        ) from None
    if done.returncode != 0:
        told = done.stderr.decode(errors="replace").strip().splitlines()
        raise UserError(f"code: git {words[0]} fails in {folder}: {told[0] if told else done.returncode}")
    try:
        return done.stdout.decode()
    except UnicodeDecodeError:
        raise UserError(f"code: {folder} has a file whose name is not UTF-8: give it another name") from None
