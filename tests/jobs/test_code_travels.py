"""The folder of `code:`: which files travel, what is refused, one identity for the same bytes. tests/unit tests unpacking."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import product
from tests.jobs.helpers import lockstep
from tests.product import UserError, code_of, travels

pytestmark = pytest.mark.promise("code-travels")
Write = Callable[..., Path]
JOB = "name: own\ncommand: [python, train.py]\ncode: .\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that `code:` names. It is the current folder, because paths of sockets are short."""
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path / "home"))
    (tmp_path / "own").mkdir()
    monkeypatch.chdir(tmp_path / "own")
    return tmp_path / "own"


@pytest.fixture
def write(folder: Path) -> Write:
    def put(*paths: str, content: str | bytes = "x") -> Path:
        for path in paths:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content.encode() if isinstance(content, str) else content)
        return folder / paths[-1]

    return put


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        travels(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What travels.


def test_all_files_travel_but_products(folder: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_HOME", str(folder / ".lockstep"))
    names = [".env.example", ".hidden", "a/b.txt", "data.csv", "jobs/queue.py", "tests/json/__init__.py", "train.py"]
    write(*names, ".venv/lib/x.py", "a/__pycache__/b.pyc", "other/pyvenv.cfg", "other/lib/y.py", "shards/manifest.json")
    write("shards/train-0.safetensors", "runs/one/run.yaml", "runs/one/events.jsonl", "runs/one/checkpoints/step-1/a")
    write(".lockstep/code/x", ".git/config", "third/.git")
    assert sorted(travels(folder)) == names
    write(".lockstepignore", content="# not needed\n/a/*\n!/a/keep.md\n*.csv\n.lockstepignore\n")
    write("a/keep.md")
    assert sorted(travels(folder)) == [".env.example", ".hidden", "a/keep.md", *names[4:]]
    write(".lockstepignore", content="*\n")
    assert "empty" in refusal(folder)
    assert "is not a folder" in refusal(folder / "train.py")


def test_what_git_ignores_stays_unless_lockstepignore_says_otherwise(folder: Path, write: Write) -> None:
    """Each .gitignore of the repository counts, also above the folder. git is not called."""
    write(
        ".git/HEAD",
        "own/train.py",
        "own/a.log",
        "own/sub/b.log",
        "own/sub/c.tmp",
        "own/build/x.py",
        "own/deep/build/y.py",
    )
    write(".gitignore", content="*.log\n/own/build/\n")
    write("own/.gitignore", content="*.tmp\n/deep/build\n")
    write("own/sub/.gitignore", content="!b.log\n")
    names = {".gitignore", "train.py", "sub/.gitignore", "sub/b.log"}
    assert set(travels(folder / "own")) == names
    assert set(travels(Path("own"))) == names, "as `--set code=own` names it"
    write("own/.lockstepignore", content="!a.log\nsub\n.*ignore\n")
    assert set(travels(folder / "own")) == {"a.log", "train.py"}


WHITELIST = "*\n!*/\n!*.py\n"


@pytest.mark.parametrize(
    ("ignore_files", "kept"),
    [
        ({".gitignore": "*.key\n", "pkg/.gitignore": "!in/\n"}, {"a.py", "b.txt", "pkg/in/c.py"}),
        ({".gitignore": WHITELIST}, {"a.py", "pkg/in/c.py"}),
        ({".gitignore": "pkg/**\n!pkg/**/\n!pkg/**/*.py\n"}, {"a.py", "b.txt", "pkg/in/c.py"}),
        ({".lockstepignore": f"\ufeff{WHITELIST}"}, {"a.py", "pkg/in/c.py"}),
    ],
)
def test_a_pattern_that_matches_a_folder_says_nothing_of_its_files(
    folder: Path, write: Write, ignore_files: dict[str, str], kept: set[str]
) -> None:
    write("a.py", "b.txt", "pkg/in/c.py", "pkg/in/s.key")
    for path, content in ignore_files.items():
        write(path, content=content)
    assert {path for path in travels(folder) if not path.endswith("ignore")} == kept


def test_a_folder_that_git_ignores_travels_by_lockstepignore_alone(folder: Path, write: Write) -> None:
    write(".git/HEAD", "own/train.py", "own/.gitignore")
    write(".gitignore", content="own/\n")
    assert "all are ignored" in refusal(folder / "own")
    write("own/.lockstepignore", content="!*.py\n")
    assert set(travels(folder / "own")) == {"train.py"}


NAMES = ("a", "b", "ab", "a.py", "b.log")
PATTERNS = (
    "*", "*/", "*.py", "a", "a/", "/a", "b/", "a/b", "a/*", "a/**", "**/b", "a/**/b", "a/**/", "**/", "?", "[ab]", "*a*",
    "b.*", "/*/a/",
)  # fmt: skip


def test_what_git_lists_in_random_trees_travels(folder: Path, write: Write) -> None:
    """The expected paths come from `git ls-files`, for the repository and for each of its folders."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    draw = random.Random(5)
    for number in range(24):
        root = f"t{number}"
        for _ in range(25):
            path = "/".join([root, *(draw.choice(NAMES[:3]) for _ in range(draw.randint(0, 3)))])
            with contextlib.suppress(OSError):  # a file and a folder of one name
                write(f"{path}/{draw.choice(NAMES)}")
            if draw.random() < 0.3:
                lines = [draw.choice(("", "", "!")) + draw.choice(PATTERNS) for _ in range(draw.randint(1, 4))]
                with contextlib.suppress(OSError):
                    write(f"{path}/.gitignore", content="\n".join(lines))
        subprocess.run(["git", "init", "-q", "--template=", root], check=True)
        for code in (
            folder / root,
            *(path for path in (folder / root).iterdir() if path.is_dir() and path.name != ".git"),
        ):
            git_paths = subprocess.run(
                ["git", "ls-files", "-o", "-z", "--exclude-standard"],
                cwd=code,
                capture_output=True,
                text=True,
                check=True,
            ).stdout.split("\0")[:-1]
            try:
                paths = sorted(travels(code))
            except UserError as error:
                assert "no file of" in str(error)
                paths = []
            rules = {str(path): path.read_text() for path in (folder / root).rglob(".gitignore")}
            assert paths == sorted(git_paths), (code, rules)


def test_a_link_to_a_file_that_travels_is_followed(folder: Path, write: Write) -> None:
    write("sub/deep/b.py", content="one")
    (folder / "ways").symlink_to("sub/deep")
    write(".lockstepignore", content="/ways\n")
    links = {"1": "sub/deep/b.py", "2": str(folder / "sub/deep/b.py"), "3": "ways/../deep/b.py"}
    for name, target in links.items():
        (folder / name).symlink_to(target)
    files = travels(folder)
    assert [files[path] for path in links] == [b"one"] * 3


def test_names_of_secrets_are_named(folder: Path, write: Write) -> None:
    write("train.py")
    write("job.yaml", content=JOB)
    secrets = [".env", ".env.local", "sub/.env", "SERVER.PEM", "id_ed25519", "id_rsa.pub", ".netrc", ".npmrc",
               "kubeconfig-team.yaml", "team.kubeconfig", ".kube/config", "credentials.json", ".aws/credentials"]  # fmt: skip
    for path in secrets:
        write(path, content="the-value")
        done = lockstep(folder, "render", "slurm", "job.yaml")
        assert (
            done.returncode == 0 and f"warning: code: {path} travel" in done.stderr and "the-value" not in done.stderr
        )
        (folder / path).rename(folder / f"{path}.example")
    assert "look like secrets" not in lockstep(folder, "render", "slurm", "job.yaml").stderr


# What is refused.


@pytest.mark.parametrize(
    "target", ["/etc/passwd", "..", "nothing", "c", ".", "local.yaml", ".git/config", "notes/big.txt"]
)
def test_a_link_brings_nothing_along_that_does_not_travel_by_itself(folder: Path, write: Write, target: str) -> None:
    write("a.py", "local.yaml", "notes/big.txt", ".git/config")
    write(".gitignore", content="local.yaml\n")
    write(".lockstepignore", content="notes\n")
    (folder / "c").symlink_to(target)
    assert f"code: c is a link to {target}, which does not travel" in refusal(folder)


def _socket() -> None:
    with socket.socket(socket.AF_UNIX) as unix_socket:
        unix_socket.bind("s")


def _deep() -> None:
    for _ in range(300):
        os.mkdir("aaa")
        os.chdir("aaa")


def _huge() -> None:
    with Path("huge").open("wb") as file:
        file.truncate(1 << 40)


def _writer(name: str, content: str) -> Callable[[], object]:
    return lambda: Path(name).write_text(content)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_deep, "is not a path inside the code"), (lambda: [Path(f"n{n}").touch() for n in range(31)], "has more than 30 files"),
        (_socket, "s is not a regular file"), (lambda: os.mkfifo("p"), "p is not a regular file"), (_huge, "at most 64 MiB can be sent"),
        (_writer(".gitignore", "a\n*a*a*a*a*b\n"), ".gitignore, line 2 has 5 wildcards, expected at most 4"),
        (_writer(".lockstepignore", "[[:digit:]]x"), ".lockstepignore, line 1 has a class such as [[:digit:]]"),
        (lambda: os.mkfifo(".gitignore"), ".gitignore: it is not a regular file"), (_writer(".lockstepignore", "!"), ".lockstepignore"),
        (lambda: Path(os.fsdecode(b"\xed\xb2\x80")).touch(), "is not UTF-8"),
        (lambda: os.mkfifo("p\n\x1b[2Jx"), r"p\x0a\x1b[2Jx is not"),
    ],
)  # fmt: skip
def test_what_cannot_travel_is_refused_in_one_line(
    folder: Path,
    write: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], object],
    message: str,
) -> None:
    product.lower_limits_of_code(monkeypatch)
    write("train.py")
    write("job.yaml", content=JOB)
    make()
    try:
        for words in (
            ["lint", "job.yaml", "--backend", "slurm"],
            ["render", "slurm", "job.yaml"],
            ["submit", "local", "job.yaml"],
        ):
            done = lockstep(folder, *words)
            assert (
                (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1 and message in done.stderr
            ), done
        assert not (tmp_path / "home/code").exists() and not (tmp_path / "home/local").exists()
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True, cwd="/")  # Python's own recursion is not deep enough


def test_what_is_too_large_is_refused_with_the_largest_files(folder: Path, write: Write) -> None:
    write("small.py")
    with write("big.bin").open("wb") as file:
        file.truncate(65 << 20)
    assert "at most 64 MiB" in (message := refusal(folder)) and "big.bin (" in message
    write("big.bin", content=os.urandom(9 << 20))
    assert "in an archive, at most 8 MiB" in (message := refusal(folder)) and "big.bin (" in message


def test_the_identity_is_that_of_paths_executable_bits_and_bytes(folder: Path, write: Write, tmp_path: Path) -> None:
    write("b.py", content="two")
    write("a/x.sh", content="one").chmod(0o755)
    code, elsewhere = code_of(folder), tmp_path / "elsewhere"
    shutil.copytree(folder, elsewhere)
    for path in elsewhere.rglob("*"):
        os.utime(path, (0, 0))
    (elsewhere / "b.py").chmod(0o600)
    assert code_of(elsewhere) == code, "neither place, times, owner nor other bits"
    changes: list[Callable[[], object]] = [
        lambda: write("b.py", content="twp"), lambda: (folder / "b.py").chmod(0o755),
        lambda: (folder / "b.py").rename(folder / "c.py"), lambda: write("d.py", content=""),
        lambda: (folder / "d.py").rename(folder / "a/x.shd.py"),
    ]  # fmt: skip
    identities = {code[0]}
    for change in changes:
        change()
        identities.add(code_of(folder)[0])
    assert len(identities) == len(changes) + 1
