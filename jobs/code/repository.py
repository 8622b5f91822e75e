"""What git lists in a working tree that somebody else may have set up.

A repository's own settings can start programs: core.fsmonitor, hooks, and, where an object is missing, a fetch by
core.sshCommand. So git is asked in an empty repository of ours that borrows the other one's index and objects. Of the
settings only those count that say what is kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from lockstep.jobs.code import tree
from lockstep.training import files
from lockstep.training.contract import UserError

_TAKEN = ("core.ignorecase", "core.precomposeunicode")
"""Settings that are taken over. None of them starts a program, or names a file."""
_EXCLUDES = "core.excludesfile"
_FORMAT = "extensions.objectformat"
_SECONDS = 10
_MAX_CONFIG = 1 << 20
_MAX_LINE = 1 << 12
_MAX_EXCLUDE = 1 << 20


class Ask(Protocol):
    """Runs a command of git's in a folder of the working tree; gives what it prints."""

    def __call__(self, folder: Path, *words: str) -> str: ...


def top_of(folder: Path) -> Path | None:
    """The working tree that a folder is in, None where it is in none. Raises `UserError` in a repository's own folder."""
    folder = folder.resolve()
    above = next((parent for parent in (folder, *folder.parents) if (parent / ".git").exists()), None)
    if above is not None and folder.is_relative_to(_folders(above)[0].resolve()):
        raise UserError(f"code: {folder} is in the git repository {above}, but not in a working tree of it")
    return above


@contextlib.contextmanager
def opened(top: Path) -> Iterator[Ask]:
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
            ["git", *options, *words], cwd=here, env=env, capture_output=True, timeout=_SECONDS, check=False,
            stdin=subprocess.DEVNULL, preexec_fn=end_with_us,
        )  # fmt: skip
    except FileNotFoundError:
        raise UserError(f"code: {folder} is in a git repository, and git is not installed: install git") from None
    except subprocess.TimeoutExpired:
        raise UserError(
            f"code: git did not answer within {_SECONDS} s in {folder}: is a .gitignore or a file in .git there a pipe, or has it "
            "too many files? Then name a smaller folder"
        ) from None
    if done.returncode != 0:
        told = done.stderr.decode(errors="replace").strip().splitlines()
        raise UserError(f"code: git {words[0]} fails in {folder}: {told[0] if told else done.returncode}")
    try:
        return done.stdout.decode()
    except UnicodeDecodeError:
        raise UserError(f"code: {folder} has a file whose name is not UTF-8: give it another name") from None
