"""Code of one's own: what travels, what is refused, one identity for the same bytes, and unpacking without harm."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.jobs.code import collect as collecting
from lockstep.jobs.code import refusals, repository
from lockstep.jobs.code.collect import collect
from lockstep.jobs.code.listing import files_of
from lockstep.jobs.code.tree import Found, Tree
from lockstep.training.contract import UserError
from lockstep.training.launch import archive
from lockstep.training.launch.archive import File
from tests.jobs.helpers import lockstep
from tests.processes import PYTHON, ROOT, clean_env, poll, processes, require, started

Write = Callable[[str, "str | bytes"], Path]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path / "home"))
    found = tmp_path / "own"
    found.mkdir()
    return found


@pytest.fixture
def write(folder: Path) -> Write:
    def put(path: str, content: str | bytes) -> Path:
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content.encode() if isinstance(content, str) else content)
        return place

    return put


def git(folder: Path, *words: str) -> None:
    names = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    subprocess.run(["git", *names, *words], cwd=folder, check=True, capture_output=True, env=env)


def refused(folder: Path, *allow: str) -> str:
    with pytest.raises(UserError) as caught:
        collect(folder, allow)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What travels.


def test_without_git_all_files_travel_but_products(folder: Path, write: Write) -> None:
    for path in ("train.py", "a/b.txt", "data.csv", ".hidden", ".env.example"):
        write(path, "x")
    for path in (".venv/lib/x.py", "a/__pycache__/b.pyc", "other/pyvenv.cfg", "other/lib/y.py"):
        write(path, "x")
    for path in ("runs/one/run.yaml", "runs/one/events.jsonl", "runs/one/checkpoints/step-1/a.safetensors"):
        write(path, "x")
    for path in ("shards/manifest.json", "shards/train-00000.safetensors"):
        write(path, "x")
    assert files_of(folder) == [".env.example", ".hidden", "a/b.txt", "data.csv", "train.py"]


def test_of_a_repository_what_git_would_keep_travels(folder: Path, write: Write) -> None:
    for path in ("tracked.py", "removed.py", "sub/inner.py", "runs/x/run.yaml", "runs/x/status.json"):
        write(path, "x")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    write(".gitignore", "*.log\n/build/\n")
    write("untracked.py", "x")
    write("a.log", "x")
    write("build/x.py", "x")
    (folder / "removed.py").unlink()
    assert files_of(folder) == [".gitignore", "sub/inner.py", "tracked.py", "untracked.py"]
    assert files_of(folder / "sub") == ["inner.py"], "a folder of a repository is code, too"


def test_the_repository_is_that_of_the_folder_whatever_the_environment_says(
    folder: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a hook of git's, which is told another one."""
    write("a.py", "x")
    git(folder, "init", "-q")
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert files_of(folder) == ["a.py"]


def test_lockstepignore_takes_away_and_never_adds(folder: Path, write: Write) -> None:
    for path in ("train.py", "notes/a.md", "notes/keep.md", "big.bin", "secret.log"):
        write(path, "x")
    write(".gitignore", "*.log\n")
    git(folder, "init", "-q")
    git(folder, "add", "-f", "train.py", "big.bin")
    write(
        ".lockstepignore",
        "# what the job does not need\n/notes/*\n!/notes/keep.md\n*.bin\n!secret.log\n.lockstepignore\n",
    )
    assert files_of(folder) == [".gitignore", "notes/keep.md", "train.py"]
    shutil.rmtree(folder / ".git")
    assert files_of(folder) == [".gitignore", "notes/keep.md", "secret.log", "train.py"]
    write(".lockstepignore", "*\n")
    assert "all are ignored, or it is empty" in refused(folder)
    write(".lockstepignore", b"\xff\xfe")
    assert ".lockstepignore" in refused(folder)


def test_a_submodule_travels_where_it_was_fetched(folder: Path, write: Write, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "lib.py").write_text("x")
    git(other, "init", "-q")
    git(other, "add", ".")
    git(other, "commit", "-q", "-m", "x")
    write("a.py", "x")
    git(folder, "init", "-q")
    git(folder, "submodule", "add", "-q", str(other), "third/other")
    assert files_of(folder) == [".gitmodules", "a.py", "third/other/lib.py"]
    git(folder, "commit", "-q", "-m", "x")
    git(folder, "submodule", "deinit", "-q", "-f", "third/other")
    assert "the submodule third/other was not fetched: git submodule update --init" in refused(folder)


def test_settings_that_say_what_is_kept_count(
    folder: Path, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    (tmp_path / "user/.config/git").mkdir(parents=True)
    (tmp_path / "user/.config/git/ignore").write_text("*.csv\n")
    for path in ("a.py", "b.csv", "c.log", "D.TXT", "sub/e.py"):
        write(path, "x")
    git(folder, "init", "-q", "--object-format=sha256")
    git(folder, "add", "a.py", "sub")
    git(folder, "commit", "-q", "-m", "x")
    git(folder, "config", "core.ignoreCase", "true")
    write(".git/info/exclude", "*.log\n*.txt\n")
    assert files_of(folder) == ["a.py", "sub/e.py"]
    (tmp_path / "user/.gitconfig").write_text("[core]\n\texcludesFile = ~/kept-out\n")
    (tmp_path / "user/kept-out").write_text("a.*\n")
    assert files_of(folder) == ["a.py", "b.csv", "sub/e.py"], "what is tracked is kept"
    (tmp_path / "user/.gitconfig").write_text("[core]\n\texcludesFile = /dev/null\n")
    assert files_of(folder) == ["a.py", "b.csv", "sub/e.py"]
    (tmp_path / "user/.gitconfig").unlink()
    git(folder, "update-index", "--split-index")
    write("f.py", "x")
    git(folder, "add", "f.py")
    assert files_of(folder) == ["a.py", "f.py", "sub/e.py"], "an index in two parts"
    git(folder, "worktree", "add", "-q", str(tmp_path / "beside"))
    (tmp_path / "beside/g.log").write_text("x")
    (tmp_path / "beside/h.py").write_text("x")
    (tmp_path / "linked").symlink_to(tmp_path / "beside/sub")
    assert files_of(tmp_path / "beside") == ["a.py", "h.py", "sub/e.py"], "another working tree of it"
    assert files_of(tmp_path / "linked") == ["e.py"]
    assert "but not in a working tree of it" in refused(folder / ".git/info")
    (folder / "sub/.git").mkdir()
    assert "sub/.git is not a git repository" in refused(folder / "sub")


def test_no_setting_of_a_repository_starts_a_program(folder: Path, write: Write, tmp_path: Path) -> None:
    """Not by a fetch of what is missing either: it is a partial clone, whose sparse index names a tree that it lacks."""
    went_off = tmp_path / "went-off"
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\necho "$0 $@" >> {went_off}\nexit 1\n')
    program.chmod(0o755)
    write("deep/er/lib.py", "x")
    write("src/train.py", "print('hi')\n")
    write("job.yaml", "name: own\ncommand: [python, src/train.py]\ncode: .\nmax_restarts: 0\n")
    write(".gitattributes", "* filter=evil diff=evil merge=evil\n")
    repositories = (folder, folder / "nested")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "x")
    tree = subprocess.run(["git", "rev-parse", "HEAD:deep"], cwd=folder, check=True, capture_output=True, text=True)
    git(folder, "sparse-checkout", "init", "--cone", "--sparse-index")
    git(folder, "sparse-checkout", "set", "src")
    write("nested/a.py", "x")
    git(folder / "nested", "init", "-q")
    hooks = folder / ".git/hooks"
    hooks.mkdir(exist_ok=True)
    for name in ("post-index-change", "post-checkout", "pre-auto-gc", "reference-transaction", "fsmonitor-watchman"):
        (hooks / name).unlink(missing_ok=True)
        (hooks / name).symlink_to(program)
    settings = {
        "core.repositoryFormatVersion": "1", "extensions.partialClone": "origin", "remote.origin.promisor": "true",
        "remote.origin.url": "ssh://host.example/x", "remote.origin.uploadpack": str(program),
        "core.gitProxy": str(program), "core.sshCommand": str(program), "core.fsmonitor": str(program),
        "core.fsmonitorHookVersion": "1", "core.hooksPath": str(hooks), "core.untrackedCache": "true",
        "core.pager": str(program), "pager.ls-files": "true", "core.editor": str(program), "core.askPass": str(program),
        "core.alternateRefsCommand": str(program), "credential.helper": f"!{program}", "gpg.program": str(program),
        "diff.external": str(program), "diff.evil.textconv": str(program), "filter.evil.clean": str(program),
        "filter.evil.smudge": str(program), "filter.evil.process": str(program), "filter.evil.required": "true",
        "alias.ls-files": f"!{program}", "alias.config": f"!{program}", "uploadpack.packObjectsHook": str(program),
        "protocol.allow": "always", "protocol.ext.allow": "always", "include.path": str(folder / "more"),
    }  # fmt: skip
    write("more", f"[core]\n\tfsmonitor = {program}\n")
    for place in repositories:
        with (place / ".git/config").open("a") as file:
            for name, value in settings.items():
                section, *inner, key = name.split(".")
                about = f' "{inner[0]}"' if inner else ""
                file.write(f'[{section}{about}]\n\t{key} = "{value}"\n')
    lost = tree.stdout.strip()
    (folder / f".git/objects/{lost[:2]}/{lost[2:]}").unlink()
    command = ["git", "-c", "core.fsmonitor=false", "ls-files", "--stage"]
    subprocess.run(command, cwd=folder, capture_output=True, check=False)
    assert str(program) in went_off.read_text(), "git itself starts it"
    went_off.unlink()
    kept = [".gitattributes", "job.yaml", "more", "nested/a.py", "src/train.py"]
    for words in (
        ["lint", "job.yaml", "--backend", "local"], ["render", "slurm", "job.yaml"],
        ["submit", "local", "job.yaml", "--json"],
    ):  # fmt: skip
        done = lockstep(folder, *words)
        assert not went_off.exists(), (words, went_off.read_text())
        assert words[0] != "render" or all(f"  {path}\n" in done.stderr for path in kept), done.stderr
    assert done.returncode == 0, done.stderr
    assert lockstep(folder, "wait", "local", "own", "--timeout", "60").returncode == 0
    assert not went_off.exists()


@pytest.mark.parametrize("name", ["commondir", "HEAD", "config"])
def test_no_error_quotes_what_a_link_of_the_repository_leads_to(folder: Path, write: Write, name: str) -> None:
    write("train.py", "x")
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    secret = folder.parent / "secret"
    secret.write_text("the-value" * 200 + "\n")
    (folder / ".git" / name).unlink(missing_ok=True)
    (folder / ".git" / name).symlink_to(secret)
    try:
        assert all(b"the-value" not in file.data for file in collect(folder).files)
    except UserError as error:
        assert "the-value" not in str(error)


def test_a_pipe_where_git_looks_for_what_is_ignored_is_an_error_at_once(
    folder: Path, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opened, it would be waited for without end."""
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    pipe = tmp_path / "user/pipe"
    pipe.parent.mkdir()
    os.mkfifo(pipe)
    write("a.py", "x")
    git(folder, "init", "-q")
    began = time.monotonic()
    (tmp_path / "user/.gitconfig").write_text(f"[core]\n\texcludesFile = {pipe}\n")
    assert f"code: cannot read {pipe}: it is not a regular file" in refused(folder), "this user's own"
    (tmp_path / "user/.gitconfig").unlink()
    (folder / ".git/info/exclude").unlink()
    os.mkfifo(folder / ".git/info/exclude")
    assert "/info/exclude is not a regular file" in refused(folder)
    (folder / ".git/info/exclude").unlink()
    (folder / ".git/info/exclude").symlink_to(tmp_path / "user/.gitconfig")
    assert "/info/exclude is a link that leads out of the folder" in refused(folder)
    (folder / ".git/info/exclude").unlink()
    for named in (pipe, "--help", tmp_path / "user/of-the-owner"):
        git(folder, "config", "core.excludesFile", str(named))
        assert "names its own file of what is ignored (core.excludesfile)" in refused(folder), "the folder's"
    (folder / ".git/config").unlink()
    os.mkfifo(folder / ".git/config")
    assert "/.git/config: it is not a regular file" in refused(folder)
    assert time.monotonic() - began < 8


def test_git_that_waits_for_a_pipe_is_ended_and_nothing_of_a_killed_command_is_left(
    folder: Path, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """git itself opens each .gitignore."""
    write("a.py", "x")
    write("job.yaml", "name: own\ncommand: [python, a.py]\ncode: .\n")
    git(folder, "init", "-q")
    os.mkfifo(folder / ".gitignore")
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    command = [PYTHON, "-c", "from lockstep.jobs.cli.main import main; main()", "render", "slurm", "job.yaml"]

    def waiting() -> list[int]:
        return [pid for pid, *_ in processes() if str(folder).encode() in _words(pid) and b"ls-files" in _words(pid)]

    with started(
        command, clean_env(PYTHONPATH=str(ROOT), TMPDIR=str(tmp), LOCKSTEP_HOME=str(tmp_path)), cwd=folder
    ) as killed:
        poll(waiting, 30, "git, at the pipe")
        killed.kill()
        killed.wait()
    poll(lambda: not waiting(), 10, "the end of git")
    assert len(list(tmp.iterdir())) == 1
    monkeypatch.setattr(tempfile, "tempdir", str(tmp))
    assert repository._SECONDS <= 10
    monkeypatch.setattr(repository, "_SECONDS", 1)
    assert "code: git did not answer within 1 s" in refused(folder)
    assert not waiting() and not list(tmp.iterdir())


def _words(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def test_a_submodule_that_leads_elsewhere_or_back_is_refused(folder: Path, write: Write) -> None:
    """An index may name anything."""
    write("a.py", "x")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "x")
    (folder / "back").symlink_to(".")
    write(".git/info/exclude", "back\n")
    git(folder, "update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},back")
    assert "the submodule back was not fetched" in refused(folder)


def test_the_folder_of_jobs_is_no_code(folder: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_HOME", str(folder / ".lockstep"))
    write("a.py", "x")
    write(".lockstep/code/x", "x")
    assert files_of(folder) == ["a.py"]
    assert "is not a folder" in refused(folder / "a.py")


# What is refused.

KEY = "-----BEGIN OPENSSH PRIVATE " + "KEY-----\nb3BlbnNzaC1rZXk\n"


@pytest.mark.parametrize(
    "path",
    [".env", ".env.local", "sub/.env", "server.pem", "SERVER.PEM", "id_ed25519", "id_rsa.pub", ".netrc", ".npmrc", "kubeconfig",
     "kubeconfig-team.yaml", "team.kubeconfig", ".kube/config", "credentials", "credentials.json", ".aws/credentials"],
)  # fmt: skip
def test_names_of_secrets_are_refused(folder: Path, write: Write, path: str) -> None:
    write("train.py", "x")
    write(path, "the-value")
    told = refused(folder)
    assert f"code: {path} looks like" in told and "the-value" not in told
    assert collect(folder, [path]).files[-1].path in (path, "train.py")
    write(f"{path}.example", "x")
    (folder / path).unlink()
    assert f"{path}.example" in {file.path for file in collect(folder).files}


@pytest.mark.parametrize(
    ("kind", "secret"),
    [
        ("a private key", KEY), ("a private key", "-----BEGIN RSA PRIVATE " + "KEY-----"),
        ("a private key", "-----BEGIN PRIVATE " + "KEY-----"),
        ("a private key", "-----BEGIN PGP PRIVATE " + "KEY BLOCK-----"),
        ("a cluster's login", "users:\n- user:\n    client-key-" + "data: LS0t"),
        ("an AWS access key", "AKIA" + "ABCDEFGH12345678"), ("an Azure storage key", "AccountKey=" + "a" * 86 + "=="),
        ("a Google API key", "AIza" + "a" * 35), ("a GitHub token", "ghp_" + "a" * 36), ("a GitHub token", "github_pat_" + "a" * 70),
        ("a GitLab token", "glpat-" + "a" * 20), ("a Hugging Face token", "hf_" + "a" * 34), ("an npm token", "npm_" + "a" * 36),
        ("a PyPI token", "pypi-AgE" + "a" * 60), ("a Docker token", "dckr_pat_" + "a" * 27), ("a Slack token", "xoxb-" + "1" * 20),
        ("a secret key of an API", "sk-proj-" + "a" * 40), ("a secret key of an API", "sk_live_" + "a" * 24),
    ],
)  # fmt: skip
def test_contents_of_secrets_are_refused_by_path_line_and_rule(
    folder: Path, write: Write, kind: str, secret: str
) -> None:
    write("config/settings.py", f"a = 1\nTOKEN = '''{secret}'''\n")
    told = refused(folder)
    assert "config/settings.py, line " in told and kind in told, told
    assert not any(word in told for word in secret.split() if len(word) > 12)
    assert "code.allow: [config/settings.py]" in told
    assert refused(folder, "settings.py") == told, "only the whole path is allowed"
    assert len(collect(folder, ["config/settings.py"]).files) == 1


def test_what_only_looks_a_little_like_a_secret_travels(folder: Path, write: Write) -> None:
    write("a.py", "sk-learn; hf_hub; 'AKIA'; ghp_short; 'BEGIN PUBLIC KEY'; x = task_live_" + "a" * 10)
    write("environment.yaml", "x")
    assert len(collect(folder).files) == 2


@pytest.mark.parametrize("piece", [b"\n", b" ", b"sk-" + b"a" * 50 + b"_", b"-----BEGIN A", b"AccountKey=aaa"])
def test_no_file_makes_the_search_for_secrets_slow(piece: bytes) -> None:
    began = time.monotonic()
    refusals.check_content("a", piece * ((4 << 20) // len(piece)), ())
    assert time.monotonic() - began < 20, "a pattern that looks back again and again takes hours"


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("lockstep/__init__.py", "the package lockstep of Lockstep"), ("queue.py", "the standard module queue"),
        ("json/__init__.py", "the standard module json"), ("sitecustomize.py", "the standard module sitecustomize"),
        ("math.cpython-311-x86_64-linux-gnu.so", "the standard module math"),
    ],
)  # fmt: skip
def test_modules_that_hide_others_are_refused_by_name(folder: Path, write: Write, path: str, told: str) -> None:
    write("train.py", "x")
    write(path, "x")
    assert f"code: {path} would hide {told}" in refused(folder)
    assert told in refused(folder, path), "code.allow is for secrets"


def test_folders_that_hide_nothing_travel(folder: Path, write: Write) -> None:
    for path in ("jobs/a.yaml", "profile/x.csv", "model/queue.py", "tests/test_a.py", "lib/json/__init__.py"):
        write(path, "x")
    assert len(collect(folder).files) == 5


def test_links_travel_as_what_they_mean_and_leave_no_folder(folder: Path, write: Write, tmp_path: Path) -> None:
    write("a.py", "one")
    (folder / "b.py").symlink_to("a.py")
    assert [(file.path, file.data) for file in collect(folder).files] == [("a.py", b"one"), ("b.py", b"one")]
    (tmp_path / "outside").write_text("x")
    for target, told in {
        str(tmp_path / "outside"): "a link that leads out of the folder", "../outside": "a link that leads out of the folder",
        "nothing": "a link to nothing", "c": "a link to nothing", ".": "a link to a folder",
    }.items():  # fmt: skip
        (folder / "c").symlink_to(target)
        assert f"code: c is {told}" in refused(folder), target
        (folder / "c").unlink()
    (folder / "d").symlink_to(tmp_path, target_is_directory=True)
    assert "code: d is a link that leads out of the folder" in refused(folder)


def test_links_are_followed_within_the_folder_by_each_way(folder: Path, write: Write, tmp_path: Path) -> None:
    write("a.py", "one")
    write("sub/deep/b.py", "two")
    (folder / "ways").symlink_to("sub/deep")
    write(".lockstepignore", "/ways\n")
    (tmp_path / "other").symlink_to(folder)
    for name, target in {
        "1": "../own/a.py", "2": str(folder / "a.py"), "3": "ways/../../a.py", "sub/deep/4": "../../3", "5": "./sub//deep/../../1",
        "6": "../../" + "/".join(folder.parts[-2:]) + "/sub/../a.py",
    }.items():  # fmt: skip
        (folder / name).symlink_to(target)
    (folder / "7").symlink_to(tmp_path / "other/a.py")
    found = {file.path: file.data for file in collect(tmp_path / "other").files}
    assert [found.pop(path) for path in ("1", "2", "3", "sub/deep/4", "5", "6", "7")] == [b"one"] * 7
    assert sorted(found) == [".lockstepignore", "a.py", "sub/deep/b.py"]
    (folder / "0").symlink_to("ways/../a.py")
    assert "code: 0 is a link to nothing" in refused(folder), "above `ways` lies sub"


def test_a_folder_that_became_a_link_brings_nothing_along(folder: Path, write: Write, tmp_path: Path) -> None:
    """git still lists the files that were in the folder, and ignores the link."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "shadow").write_text("the owner's")
    write("train.py", "x")
    write("d/shadow", "x")
    write("job.yaml", "name: own\ncommand: [python, train.py]\ncode: .\n")
    write("sub/shadow", "x")
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    write(".gitignore", "/d\n")
    shutil.rmtree(folder / "d")
    for target in (outside, "sub"):
        (folder / "d").symlink_to(target)
        for words in (
            ["lint", "job.yaml", "--backend", "slurm"],
            ["render", "slurm", "job.yaml"],
            ["submit", "local", "job.yaml"],
        ):
            done = lockstep(folder, *words)
            assert (done.returncode, done.stdout) == (2, ""), done
            assert "error: code: d/shadow lies behind a link, not in a folder of the code" in done.stderr, done
        (folder / "d").unlink()
    assert not (tmp_path / "home/code").exists()


EXCHANGE = """
import ctypes, random, sys, time
libc = ctypes.CDLL(None, use_errno=True)
one, other = (name.encode() for name in sys.argv[1:])
print("ready", flush=True)
while True:
    libc.renameat2(-100, one, -100, other, 2)
    time.sleep(random.uniform(0, 0.001))
"""


def test_a_folder_and_a_link_that_are_exchanged_all_the_time_bring_nothing_along(
    folder: Path, write: Write, tmp_path: Path
) -> None:
    require(hasattr(ctypes.CDLL(None), "renameat2"), "needs renameat2, of Linux")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a").write_text("the owner's")
    write("d/a", "code's own")
    (tmp_path / "link").symlink_to(outside)
    command = [PYTHON, "-c", EXCHANGE, str(folder / "d"), str(tmp_path / "link")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == "ready\n"
            for _ in range(1000):
                with contextlib.suppress(UserError):
                    assert {file.data for file in collect(folder).files} == {b"code's own"}
        finally:
            other.kill()


@pytest.mark.parametrize("target", ["local.yaml", ".git/config", ".lockstep/local/job.json", "notes/big.txt"])
def test_a_link_brings_nothing_along_that_does_not_travel_by_itself(
    folder: Path, write: Write, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """A repository of somebody else's may hold a link to what git ignores, where its users keep what is theirs."""
    monkeypatch.setenv("LOCKSTEP_HOME", str(folder / ".lockstep"))
    write(".gitignore", "local.yaml\n")
    write(".lockstepignore", "notes\n")
    git(folder, "init", "-q")
    for path in ("local.yaml", ".lockstep/local/job.json", "notes/big.txt", "a/b.py"):
        write(path, "x")
    (folder / "a/harmless.txt").symlink_to(f"../{target}")
    assert f"code: a/harmless.txt is a link to {target}, which does not travel" in refused(folder)


def test_the_ignore_file_is_no_link_out_of_the_folder_and_no_pipe(folder: Path, write: Write, tmp_path: Path) -> None:
    write("a.py", "x")
    (tmp_path / "outside").write_text("a.py\n")
    (folder / ".lockstepignore").symlink_to(tmp_path / "outside")
    assert "/.lockstepignore is a link that leads out of the folder" in refused(folder)
    (folder / ".lockstepignore").unlink()
    os.mkfifo(folder / ".lockstepignore")
    assert "/.lockstepignore is not a regular file" in refused(folder)


def test_devices_and_pipes_are_refused(folder: Path, write: Write) -> None:
    write("a.py", "x")
    os.mkfifo(folder / "pipe")
    assert "code: pipe is not a regular file" in refused(folder)


def test_a_pointer_of_lfs_is_refused(folder: Path, write: Write) -> None:
    write("weights.bin", "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    assert "code: weights.bin is a pointer of git-lfs" in refused(folder)


@pytest.mark.parametrize("pair", [("A.py", "a.py"), ("Lib/a.py", "lib/b.py"), ("caf\u00e9", "cafe\u0301")])
def test_names_that_differ_only_in_case_are_refused(folder: Path, write: Write, pair: tuple[str, str]) -> None:
    for path in pair:
        write(path, "x")
    told = refused(folder)
    assert "differ only in case or spelling" in told


def test_a_name_that_is_no_text_is_refused(folder: Path, write: Write) -> None:
    write("a.py", "x")
    (folder / os.fsdecode(b"b\xff")).write_text("x")
    assert "is not UTF-8" in refused(folder)
    git(folder, "init", "-q")
    assert "is not UTF-8" in refused(folder)


def test_above_the_limits_the_largest_are_named(folder: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "MAX_BYTES", 3 << 20)
    monkeypatch.setattr(collecting, "MAX_PACKED", 1 << 20)
    for number in range(12):
        write(f"part{number:02}", b"\0" * ((number + 1) << 10))
    write("weights.bin", b"\0" * (4 << 20))
    told = refused(folder)
    assert "at most 3 MiB can be sent" in told and "weights.bin (4194304), part11 (12288)" in told
    assert "part03" in told and "part02" not in told, "ten"
    write("weights.bin", os.urandom(2 << 20))
    assert "in an archive, at most 1 MiB can be sent; the largest files: weights.bin (2097152)" in refused(folder)
    write("weights.bin", b"\0" * (2 << 20))
    assert len(collect(folder).packed) < 1 << 20


def test_too_many_files_are_refused(folder: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.jobs.code import listing

    monkeypatch.setattr(listing, "MAX_FILES", 3)
    for number in range(4):
        write(str(number), "x")
    assert "has 4 files, more than 3" in refused(folder)


@pytest.mark.parametrize("when", ["while it is read", "after it was read", "gone"])
def test_files_that_change_while_they_are_read_are_an_error(
    folder: Path, write: Write, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Two files of different moments are nobody's code."""
    first, _ = write("a.py", "one"), write("b.py", "two")
    real = collecting._read

    def read(tree: Tree, path: str, found: Found) -> object:
        if path == "b.py" and when == "after it was read":
            first.write_text("three")
        if path == "b.py" and when == "gone":
            (folder / "b.py").unlink()
        return real(tree, path, found)

    def open_(*words: object, **more: object) -> int:
        descriptor = os_open(*words, **more)  # type: ignore[arg-type]
        if str(words[0]).endswith("a.py") and when == "while it is read":
            first.write_text("longer than it was")
        return descriptor

    os_open = os.open
    monkeypatch.setattr(collecting, "_read", read)
    monkeypatch.setattr(os, "open", open_)
    told = refused(folder)
    assert "b.py" in told if when == "gone" else "code: a.py was changed while it was read" in told


# Identity.


def test_the_identity_is_that_of_paths_executable_bits_and_bytes(folder: Path, write: Write, tmp_path: Path) -> None:
    write("b.py", "two")
    write("a/x.sh", "one").chmod(0o755)
    one = collect(folder)
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(folder, elsewhere)
    for path in elsewhere.rglob("*"):
        os.utime(path, (0, 0))
    (elsewhere / "b.py").chmod(0o600)
    again = collect(elsewhere)
    assert (again.identity, again.packed) == (one.identity, one.packed), "neither place, times, owner nor other bits"
    changes = [
        lambda: write("b.py", "twp"), lambda: (folder / "b.py").chmod(0o755), lambda: (folder / "b.py").rename(folder / "c.py"),
        lambda: write("d.py", ""),
    ]  # fmt: skip
    seen = {one.identity}
    for change in changes:
        change()
        seen.add(collect(folder).identity)
    assert len(seen) == len(changes) + 1


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text("ab/\0x-", min_size=1, max_size=4), st.binary(max_size=6), min_size=1, max_size=3),
       st.dictionaries(st.text("ab/\0x-", min_size=1, max_size=4), st.binary(max_size=6), min_size=1, max_size=3))  # fmt: skip
def test_different_files_have_different_identities(one: dict[str, bytes], other: dict[str, bytes]) -> None:
    first, second = (
        [File(path, False, data) for path, data in found.items() if "\0" not in path] for found in (one, other)
    )
    assert (archive.identity(first) == archive.identity(second)) == (
        {file.path: file.data for file in first} == {file.path: file.data for file in second}
    )


# Unpacking.


def packed(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for member, data in members:
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    compressor = zlib.compressobj(wbits=31)
    return compressor.compress(plain.getvalue()) + compressor.flush()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.linkname = kind, link
    return found


@pytest.mark.parametrize(
    ("members", "told"),
    [
        ([(member("a", tarfile.SYMTYPE, "/etc/passwd"), b"")], "which is not a plain file"),
        ([(member("a", tarfile.LNKTYPE, "b"), b"")], "which is not a plain file"),
        ([(member("a", tarfile.FIFOTYPE), b"")], "which is not a plain file"),
        ([(member("a", tarfile.CHRTYPE), b"")], "which is not a plain file"),
        ([(member("a", tarfile.DIRTYPE), b"")], "which is not a plain file"),
        ([(member("../a"), b"x")], "is not a path inside the code"),
        ([(member("a/../../b"), b"x")], "is not a path inside the code"),
        ([(member("/etc/a"), b"x")], "is not a path inside the code"),
        ([(member("a"), b"x"), (member("a"), b"y")], "holds more than is allowed"),
        ([(member("a"), b"x" * 2000)], "holds more than is allowed"),
        ([(member(str(number)), b"") for number in range(5)], "holds more than is allowed"),
        ([(member("a"), b"other")], "the archive holds the code"),
    ],
)
def test_an_archive_that_is_not_ours_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, members: list[tuple[tarfile.TarInfo, bytes]], told: str
) -> None:
    monkeypatch.setattr(archive, "MAX_BYTES", 1000)
    monkeypatch.setattr(archive, "MAX_FILES", 4)
    with pytest.raises(UserError, match=told):
        archive.read(packed(*members), "0" * 64)


def test_a_bomb_a_cut_off_archive_and_no_archive_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "_TAR_LIMIT", 1 << 20)
    bomb = packed((member("a"), b"\0" * (4 << 20)))
    assert len(bomb) < 10_000
    with pytest.raises(UserError, match="holds more than 1 MiB"):
        archive.read(bomb, "0" * 64)
    for data, told in (
        (bomb[:50], "is cut off"),
        (b"no archive", "cannot read the code's archive"),
        (b"", "is cut off"),
    ):
        with pytest.raises(UserError, match=told):
            archive.read(data, "0" * 64)


def test_unpacked_is_what_was_packed_read_only_and_whole(folder: Path, write: Write, tmp_path: Path) -> None:
    write("a/b/run.sh", "#!/bin/sh\necho hi\n").chmod(0o755)
    write("c" * 200 + "/" + "\u00e9" * 100, "x")
    bundle = collect(folder)
    target = archive.unpack(archive.read(bundle.packed, bundle.identity), tmp_path / "copy")
    assert archive.holds(target, bundle.identity)
    assert subprocess.run([target / "a/b/run.sh"], capture_output=True, text=True, check=True).stdout == "hi\n"
    assert all(not path.stat().st_mode & 0o222 for path in [target, *target.rglob("*")])
    assert archive.unpack(bundle.files, target) == target, "somebody else was faster"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "own"]
    with pytest.raises(UserError, match="exists and holds something else"):
        archive.unpack([File("x", False, b"")], target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "own"]
    for change in ("a/b/run.sh", "a/b/new"):
        (target / "a/b").chmod(0o755)
        (target / change).unlink(missing_ok=True)
        (target / change).write_text("changed")
        assert not archive.holds(target, bundle.identity)
    archive.remove(target)
    assert not target.exists()


NODE = """
import os, sys, tempfile
from pathlib import Path
from lockstep.training.launch import archive, carried
identity, parts, mine = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
target = Path(tempfile.gettempdir(), f"lockstep-code-{identity[:16]}")
os.symlink(mine, target.with_name(f".{target.name}.{os.getpid()}"))  # by somebody else, as is what lies at the target
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
if sys.argv[4:]:
    print([archive.holds(target, identity) for _ in range(20000)].count(True))
else:
    print(carried.unpacked(identity, parts))
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """Everybody may enter it, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        yield Path(made)


@pytest.fixture
def node(folder: Path, write: Write, shared: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Unpacks as user 65534, below a folder where everybody writes. What is in `mine` is this user's."""
    require(os.geteuid() == 0, "needs root, to become another user")
    write("a.py", "x")
    bundle = collect(folder)
    for name, mode in (("parts", 0o755), ("tmp", 0o1777), ("mine", 0o755)):
        (shared / name).mkdir()
        (shared / name).chmod(mode)
    (shared / "parts/part-000").write_bytes(bundle.packed)
    archive.unpack(bundle.files, shared / "mine/copy")
    for path in (shared / "mine", *(shared / "mine").rglob("*")):
        os.chown(path, 65534, 65534)

    def run(mine: str, *words: str) -> subprocess.CompletedProcess[str]:
        env = clean_env(PYTHONPATH=str(ROOT), TMPDIR=str(shared / "tmp"))
        command = [PYTHON, "-c", NODE, bundle.identity, str(shared / "parts"), str(shared / mine), *words]
        return subprocess.run(command, env=env, cwd=shared, capture_output=True, text=True, timeout=60, check=False)

    return run


def test_a_link_of_somebody_elses_where_code_is_unpacked_takes_nothing_away(
    node: Callable[..., subprocess.CompletedProcess[str]], shared: Path
) -> None:
    done = node("mine")
    assert (shared / "mine/copy/a.py").read_text() == "x", "the folder that the link leads to"
    assert done.returncode == 0 and done.stdout.startswith(str(shared / "tmp/lockstep-code-")), done


def test_a_link_to_a_copy_is_not_a_copy_however_fast_it_changes(
    folder: Path, node: Callable[..., subprocess.CompletedProcess[str]], shared: Path
) -> None:
    """What is there when it was looked at is not what the ranks are started in."""
    require(hasattr(ctypes.CDLL(None), "renameat2"), "needs renameat2, of Linux")
    target, link = shared / f"tmp/lockstep-code-{collect(folder).identity[:16]}", shared / "tmp/link"
    target.mkdir()
    link.symlink_to(shared / "mine/copy")
    with started([PYTHON, "-c", EXCHANGE, str(target), str(link)]) as other:
        assert other.stdout is not None and other.stdout.readline() == "ready\n"
        done = node("mine", "only look")
    assert (done.returncode, done.stdout) == (0, "0\n"), done
