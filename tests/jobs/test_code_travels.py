"""Code of one's own: what travels, what is refused, one identity for the same bytes. Unpacking has tests in tests/unit."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import product
from tests.jobs.helpers import lockstep
from tests.processes import EXCHANGE, PYTHON, processes, require, started
from tests.product import UserError, code_of, travels

pytestmark = pytest.mark.promise("code-travels")
Write = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `code:` names; this user has no settings of git's."""
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    (tmp_path / "user/.config/git").mkdir(parents=True)
    (tmp_path / "own").mkdir()
    return tmp_path / "own"


@pytest.fixture
def write(folder: Path) -> Write:
    def put(*paths: str, content: str | bytes = "x") -> Path:
        for path in paths:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content.encode() if isinstance(content, str) else content)
        return folder / paths[-1]

    return put


def git(folder: Path, *commands: str) -> None:
    names = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always"]
    for command in commands:
        subprocess.run(["git", *names, *command.split()], cwd=folder, check=True, capture_output=True)


COMMITTED = ("init -q", "add .", "commit -q -m x")


def refused(folder: Path, *allow: str) -> str:
    with pytest.raises(UserError) as caught:
        travels(folder, *allow)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What travels.


def test_without_git_all_files_travel_but_products(folder: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_HOME", str(folder / ".lockstep"))
    kept = [".env.example", ".hidden", "a/b.txt", "data.csv", "jobs/queue.py", "tests/json/__init__.py", "train.py"]
    write(*kept, ".venv/lib/x.py", "a/__pycache__/b.pyc", "other/pyvenv.cfg", "other/lib/y.py", "shards/manifest.json")
    write("shards/train-0.safetensors", "runs/one/run.yaml", "runs/one/events.jsonl", "runs/one/checkpoints/step-1/a")
    write(".lockstep/code/x")
    assert sorted(travels(folder)) == kept
    write(".lockstepignore", content="# not needed\n/a/*\n!/a/keep.md\n*.csv\n.lockstepignore\n")
    write("a/keep.md")
    assert sorted(travels(folder)) == [".env.example", ".hidden", "a/keep.md", *kept[4:]]
    write(".lockstepignore", content="*\n")
    assert "empty" in refused(folder)
    assert "is not a folder" in refused(folder / "train.py")


def test_of_a_repository_what_git_would_keep_travels(
    folder: Path, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the environment says of another one, as in a hook of git's."""
    write("tracked.py", "removed.py", "sub/inner.py", "runs/x/run.yaml", "runs/x/status.json", "forced.log")
    git(folder, *COMMITTED)
    write(".gitignore", content="*.log\n/build/\n")
    write(".lockstepignore", content="!a.log\n")  # which takes away, and never adds
    write("untracked.py", "a.log", "build/x.py")
    (folder / "removed.py").unlink()
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    kept = [".gitignore", ".lockstepignore", "forced.log", "sub/inner.py", "tracked.py", "untracked.py"]
    assert sorted(travels(folder)) == kept
    assert sorted(travels(folder / "sub")) == ["inner.py"], "a folder of a repository is code, too"
    assert "not in a working tree" in refused(folder / ".git/info")
    (folder / "sub/.git").mkdir()
    assert "sub/.git is not a git repository" in refused(folder / "sub")


def test_a_folder_of_a_repository_may_be_named_from_where_one_is(
    folder: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `--set code=own` names it. git, which is asked elsewhere, did not find it."""
    write("train.py")
    git(folder, *COMMITTED)
    monkeypatch.chdir(folder.parent)
    assert set(travels(Path(folder.name))) == {"train.py"}


def test_a_submodule_travels_where_it_was_fetched(folder: Path, write: Write, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "lib.py").write_text("x")
    git(other, *COMMITTED)
    write("a.py")
    git(folder, "init -q", f"submodule add -q {other} third/other")
    assert sorted(travels(folder)) == [".gitmodules", "a.py", "third/other/lib.py"]
    git(folder, "commit -q -m x", "submodule deinit -q -f third/other")
    assert "third/other was not fetched" in refused(folder)


def test_settings_that_say_what_is_kept_count(folder: Path, write: Write, tmp_path: Path) -> None:
    (tmp_path / "user/.config/git/ignore").write_text("*.csv\n")
    write("a.py", "b.csv", "c.log", "D.TXT", "sub/e.py")
    git(folder, "init -q --object-format=sha256", "add a.py sub", "commit -q -m x", "config core.ignoreCase true")
    write(".git/info/exclude", content="*.log\n*.txt\n")
    assert sorted(travels(folder)) == ["a.py", "sub/e.py"]
    (tmp_path / "user/.gitconfig").write_text("[core]\n\texcludesFile = ~/kept-out\n")
    (tmp_path / "user/kept-out").write_text("a.*\n")
    assert sorted(travels(folder)) == ["a.py", "b.csv", "sub/e.py"], "what is tracked is kept"
    (tmp_path / "user/.gitconfig").unlink()
    git(folder, f"worktree add -q {tmp_path / 'beside'}")
    for name in ("g.log", "h.py"):
        (tmp_path / "beside" / name).write_text("x")
    assert sorted(travels(tmp_path / "beside")) == ["a.py", "h.py", "sub/e.py"], "another working tree of it"


def test_no_setting_of_a_repository_starts_a_program(folder: Path, write: Write, tmp_path: Path) -> None:
    """Not by a fetch of what is missing either: it is a partial clone, whose sparse index names a tree that it lacks."""
    went_off, program = tmp_path / "went-off", tmp_path / "program"
    program.write_text(f'#!/bin/sh\necho "$0 $@" >> {went_off}\nexit 1\n')
    program.chmod(0o755)
    write("deep/er/lib.py", "src/train.py")
    write("job.yaml", content="name: own\ncommand: [python, train.py]\ncode: .\n")
    write(".gitattributes", content="* filter=evil diff=evil merge=evil\n")
    git(folder, *COMMITTED)
    tree = subprocess.run(["git", "rev-parse", "HEAD:deep"], cwd=folder, check=True, capture_output=True, text=True)
    git(folder, "sparse-checkout init --cone --sparse-index", "sparse-checkout set src")
    write("nested/a.py")
    git(folder / "nested", "init -q")
    starts = [
        "core.gitProxy", "core.sshCommand", "core.fsmonitor", "core.pager", "core.askPass", "core.alternateRefsCommand",
        "diff.external", "filter.evil.clean", "filter.evil.smudge", "filter.evil.process", "remote.origin.uploadpack",
    ]  # fmt: skip
    settings = {
        **dict.fromkeys(starts, str(program)), "core.repositoryFormatVersion": "1", "extensions.partialClone": "origin",
        "remote.origin.promisor": "true", "remote.origin.url": "ssh://host.example/x", "pager.ls-files": "true",
        "protocol.allow": "always", "filter.evil.required": "true", "alias.ls-files": f"!{program}",
    }  # fmt: skip
    for place in (folder, folder / "nested"):
        for name, value in settings.items():
            subprocess.run(["git", "config", "--file", place / ".git/config", name, value], check=True)
    lost = tree.stdout.strip()
    (folder / f".git/objects/{lost[:2]}/{lost[2:]}").unlink()
    command = ["git", "-c", "core.fsmonitor=false", "ls-files", "--stage"]
    subprocess.run(command, cwd=folder, capture_output=True, check=False)
    assert str(program) in went_off.read_text(), "git itself starts it"
    went_off.unlink()
    done = lockstep(folder, "render", "slurm", "job.yaml")
    for path in (".gitattributes", "job.yaml", "nested/a.py", "src/train.py"):
        assert f"  {path}\n" in done.stderr, done.stderr
    assert done.returncode == 0 and not went_off.exists(), done


def test_a_pipe_where_git_looks_for_what_is_ignored_is_an_error_at_once(
    folder: Path, write: Write, tmp_path: Path
) -> None:
    """A pipe that is opened would be waited for without end."""
    pipe = tmp_path / "user/pipe"
    os.mkfifo(pipe)
    write("a.py")
    git(folder, "init -q")
    for path in (".git/info/exclude", ".lockstepignore"):
        (folder / path).unlink(missing_ok=True)
        os.mkfifo(folder / path)
        assert f"{path} is not a regular file" in refused(folder)
        (folder / path).unlink()
    git(folder, f"config core.excludesFile {pipe}")
    assert "core.excludesfile" in refused(folder)


def test_git_that_waits_for_a_pipe_is_ended(folder: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """git itself opens each .gitignore."""
    write("a.py")
    git(folder, "init -q")
    os.mkfifo(folder / ".gitignore")

    def waiting() -> list[int]:
        found = []
        for pid, *_ in processes():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
                found += [pid] if str(folder).encode() in words and b"ls-files" in words else []
        return found

    product.lower_limits_of_code(monkeypatch, seconds=1)
    assert "git did not answer within 1 s" in refused(folder)
    assert not waiting()


# What is refused.


def test_names_of_secrets_are_refused(folder: Path, write: Write) -> None:
    write("train.py")
    for path in (".env", ".env.local", "sub/.env", "SERVER.PEM", "id_ed25519", "id_rsa.pub", ".netrc", ".npmrc",
                 "kubeconfig-team.yaml", "team.kubeconfig", ".kube/config", "credentials.json", ".aws/credentials"):  # fmt: skip
        write(path, content="the-value")
        told = refused(folder)
        assert f"code: {path} looks like" in told and "the-value" not in told
        assert path in travels(folder, path), "what code.allow names"
        (folder / path).rename(folder / f"{path}.example")
    assert len(travels(folder)) == 14


@pytest.mark.parametrize(
    ("paths", "told"),
    [
        (["lockstep/__init__.py"], "would hide the package lockstep"), (["json/__init__.py"], "the standard module json"),
        (["sitecustomize.py"], "the standard module sitecustomize"), (["math.cpython-311-x86_64-linux-gnu.so"], "the standard module math"),
        (["A.py", "a.py"], "differ only in case"), (["Lib/a.py", "lib/b.py"], "differ only in case"),
        (["caf\u00e9", "cafe\u0301"], "differ only in case or spelling"),
    ],
)  # fmt: skip
def test_names_that_python_or_another_disk_would_confuse_are_refused(
    folder: Path, write: Write, paths: list[str], told: str
) -> None:
    write("train.py", *paths)
    assert told in refused(folder) and told in refused(folder, *paths), "code.allow is for secrets"


def test_what_is_no_file_of_ones_own_is_refused(folder: Path, write: Write, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("x")
    write("d/a.py")
    for target, told in {
        str(tmp_path / "outside"): "a link that leads out of the folder", "../outside": "a link that leads out of the folder",
        str(tmp_path): "a link that leads out of the folder", "nothing": "a link to nothing", "c": "a link to nothing",
        ".": "a link to a folder",
    }.items():  # fmt: skip
        (folder / "c").symlink_to(target)
        assert f"code: c is {told}" in refused(folder), target
        (folder / "c").unlink()
    write("c", content="version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    assert "code: c is a pointer of git-lfs" in refused(folder)


def test_a_link_to_a_file_of_the_folder_is_followed(folder: Path, write: Write) -> None:
    write("sub/deep/b.py", content="one")
    (folder / "ways").symlink_to("sub/deep")
    write(".lockstepignore", content="/ways\n")
    links = {"1": "sub/deep/b.py", "2": str(folder / "sub/deep/b.py"), "3": "ways/../deep/b.py"}
    for name, target in links.items():
        (folder / name).symlink_to(target)
    found = travels(folder)
    assert [found[path] for path in links] == [b"one"] * 3
    (folder / "0").symlink_to("ways/../b.py")
    assert "code: 0 is a link to nothing" in refused(folder), "above `ways` lies sub"


@pytest.mark.parametrize("target", ["local.yaml", ".git/config", "notes/big.txt"])
def test_a_link_brings_nothing_along_that_does_not_travel_by_itself(folder: Path, write: Write, target: str) -> None:
    """A repository of somebody else's may hold a link to what git ignores, where its users keep what is theirs."""
    write(".gitignore", content="local.yaml\n")
    write(".lockstepignore", content="notes\n")
    git(folder, "init -q")
    write("local.yaml", "notes/big.txt", "a/b.py")
    (folder / "a/harmless.txt").symlink_to(f"../{target}")
    assert f"code: a/harmless.txt is a link to {target}" in refused(folder)


def test_a_folder_that_became_a_link_brings_nothing_along(folder: Path, write: Write, tmp_path: Path) -> None:
    """git still lists the files that were in the folder, and ignores the link."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/shadow").write_text("the owner's")
    write("train.py", "d/shadow", "sub/shadow")
    git(folder, "init -q", "add -A")
    write(".gitignore", content="/d\n")
    shutil.rmtree(folder / "d")
    for target in (tmp_path / "outside", "sub"):
        (folder / "d").symlink_to(target)
        assert "code: d/shadow lies behind a link" in refused(folder)
        (folder / "d").unlink()


def test_a_folder_and_a_link_that_are_exchanged_all_the_time_bring_nothing_along(
    folder: Path, write: Write, tmp_path: Path
) -> None:
    require(hasattr(ctypes.CDLL(None), "renameat2"), "needs renameat2, of Linux")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/a").write_text("the owner's")
    write("d/a", content="code's own")
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    with started([PYTHON, "-c", EXCHANGE, str(folder / "d"), str(tmp_path / "link")]) as other:
        assert other.stdout is not None and other.stdout.readline() == "ready\n"
        for _ in range(1000):
            with contextlib.suppress(UserError):
                assert set(travels(folder).values()) == {b"code's own"}


def test_what_is_too_large_is_refused_with_the_largest_files(folder: Path, write: Write) -> None:
    write("small.py")
    with write("big.bin").open("wb") as file:
        file.truncate(65 << 20)
    assert "at most 64 MiB" in (told := refused(folder)) and "big.bin (" in told
    write("big.bin", content=os.urandom(9 << 20))
    assert "in an archive, at most 8 MiB" in (told := refused(folder)) and "big.bin (" in told


def test_files_that_change_while_they_are_read_are_an_error(
    folder: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two files of different moments are nobody's code."""
    first, _, real = write("a.py", content="one"), write("b.py", content="two"), os.open

    def opened(path: object, *words: object, **more: object) -> int:
        if str(path).endswith("b.py"):
            first.write_text("three")
        return real(path, *words, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", opened)
    assert "code: a.py was changed while it was read" in refused(folder)


def test_the_identity_is_that_of_paths_executable_bits_and_bytes(folder: Path, write: Write, tmp_path: Path) -> None:
    write("b.py", content="two")
    write("a/x.sh", content="one").chmod(0o755)
    one, elsewhere = code_of(folder), tmp_path / "elsewhere"
    shutil.copytree(folder, elsewhere)
    for path in elsewhere.rglob("*"):
        os.utime(path, (0, 0))
    (elsewhere / "b.py").chmod(0o600)
    assert code_of(elsewhere) == one, "neither place, times, owner nor other bits"
    changes: list[Callable[[], object]] = [
        lambda: write("b.py", content="twp"), lambda: (folder / "b.py").chmod(0o755),
        lambda: (folder / "b.py").rename(folder / "c.py"), lambda: write("d.py", content=""),
        lambda: (folder / "d.py").rename(folder / "a/x.shd.py"),
    ]  # fmt: skip
    seen = {one[0]}
    for change in changes:
        change()
        seen.add(code_of(folder)[0])
    assert len(seen) == len(changes) + 1
