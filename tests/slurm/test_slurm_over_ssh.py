"""A laptop and a login node: odd words, cut-off submissions, another version. Programs stand in for ssh and SLURM."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.processes import PYTHON, poll, processes
from tests.product import PROGRAM
from tests.slurm.stand_ins import QUEUED, RUNNING, Site

pytestmark = pytest.mark.promise("slurm-ssh")

SSH = """#!/bin/sh
while [ $# -gt 1 ]; do shift; done
cd "$(dirname "$0")/.." || exit 1
HOME=$PWD/there LOCKSTEP_HOME=$PWD/home; export HOME LOCKSTEP_HOME; unset KEY
[ ! -e before ] || . ./before
exec ${LOGIN_SHELL:-sh} -c "$1"
"""
AT = f"login.example:{PYTHON}"
ODD = ("plain", "two words", "it's", 'a "quote"', "$HOME `id` !x", "back\\slash", "*", "-rf", "new\nline", "")


shells = pytest.mark.parametrize("shell", ["sh", "tcsh", "fish"])


@pytest.fixture
def laptop(site: Site) -> Site:
    (site.folder / "there").mkdir()
    (site.folder / "bin/ssh").write_text(SSH)
    (site.folder / "bin/ssh").chmod(0o755)
    site.env |= {"LOCKSTEP_HOME": str(site.folder / "laptop"), "LOCKSTEP_SLURM_HOST": AT}
    return site


def lockstep(site: Site, *words: str) -> subprocess.CompletedProcess[str]:
    """Starts a process, because ssh writes to its streams."""
    command, env = [PYTHON, "-c", PROGRAM, *words], {**os.environ, **site.env}
    return subprocess.run(command, env=env, cwd=site.folder, capture_output=True, text=True, timeout=60)


def on_login(site: Site, line: str) -> None:
    """Sets what the login shell runs first."""
    (site.folder / "before").write_text(f"{line}\n")


def job(site: Site, **values: object) -> str:
    spec = {"name": "mine", "command": ["true"], "run_dir": "runs/mine", "slurm": {"host": AT}, **values}
    Path(site.file).write_text(json.dumps(spec, ensure_ascii=False))
    return site.file


def test_the_same_words_and_a_run_below_the_home_folder_there(laptop: Site) -> None:
    laptop.does("sbatch", 'echo "$OLDPWD$LOCKSTEP_SLURM_HERE" > started; echo Submitted batch job 8')
    options = ["--host", AT, "--set", "nodes=2", "--set", "grace_seconds=7", "--json"]
    laptop.env["LOCKSTEP_SLURM_HOST"] = ""
    env = {"FACE": "\U0001f600", "NUMBER": "1e3"}
    done = lockstep(laptop, "submit", "slurm", job(laptop, slurm={}, env=env), *options)
    assert done.returncode == 0 and json.loads(done.stdout)["created"], done
    record = json.loads((laptop.job_folder / "job.json").read_text())
    assert record["run_dir"] == str(laptop.folder / "there/runs/mine") and "host" not in record["spec"]["slurm"]
    assert (record["spec"]["nodes"], record["spec"]["grace_seconds"]) == (2, 7)
    assert record["spec"]["env"] == env
    started = (laptop.folder / "bin/started").read_text()
    assert started == f"{laptop.folder}/there\n", "SLURM starts the ranks where sbatch was started"
    script = (laptop.job_folder / "submitit/8_submission.sh").read_text()
    assert lockstep(laptop, "render", "slurm", laptop.file, *options[:-1]).stdout == script
    laptop.shows(QUEUED)
    assert "mine would attach" in lockstep(laptop, "submit", "slurm", "./job.yaml", *options[:-1], "--dry-run").stdout
    done = lockstep(laptop, "status", "slurm", "other", "--host", AT)
    assert (done.returncode, done.stderr) == (2, "error: there is no slurm job other: see `lockstep list slurm`\n")
    laptop.down("jobs")
    done = lockstep(laptop, "status", "slurm", job(laptop))
    assert done.returncode == 69 and "error: the SLURM controller does not answer" in done.stderr, done


def test_a_recipe_that_does_not_travel_is_refused_on_the_laptop(laptop: Site) -> None:
    (laptop.folder / "mine.yaml").write_text("batch_size: 8\n")
    Path(laptop.file).write_text(f"name: mine\nrecipe: mine.yaml\nslurm: {{host: '{AT}'}}\n")
    done = lockstep(laptop, "submit", "slurm", laptop.file)
    assert done.returncode == 2 and "recipe mine.yaml is a file of this machine" in done.stderr, done
    assert not laptop.calls("sbatch")
    Path(laptop.file).write_text(f"name: mine\nrecipe: mine.yaml\ncode: .\nslurm: {{host: '{AT}'}}\n")
    (laptop.folder / ".lockstepignore").write_text("*\n!mine.yaml\n")
    done = lockstep(laptop, "submit", "slurm", laptop.file)
    assert done.returncode == 0 and (laptop.job_folder / "job.json").exists(), done


def test_a_secret_is_the_laptops_and_lies_nowhere(laptop: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    laptop.does("sbatch", 'printf %s "$KEY" > got; exit 1')
    on_login(laptop, "export KEY='of the login node'")
    (laptop.folder / "own").mkdir()
    (laptop.folder / "own/a.py").touch()
    file = job(laptop, secrets={"KEY": {"secret": "s", "key": "k"}}, code="own")
    secret = b"hunter'2 \xff.\n\n"
    monkeypatch.setenv("KEY", os.fsdecode(secret))
    assert lockstep(laptop, "submit", "slurm", file, "--dry-run").returncode == 2
    secret_file = laptop.folder / "bin/got"
    assert secret_file.read_bytes() == b"-" and not (laptop.folder / "home/code").exists(), "a dry run sends neither"
    monkeypatch.delenv("KEY")
    assert "the job needs the secret KEY" in lockstep(laptop, "submit", "slurm", file).stderr
    monkeypatch.setenv("KEY", os.fsdecode(secret))
    assert "SLURM refuses mine" in lockstep(laptop, "submit", "slurm", file).stderr
    assert secret_file.read_bytes() == secret
    secret_file.unlink()
    assert not any(b"hunter" in path.read_bytes() for path in laptop.folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("part", [0, -1])
def test_a_submission_that_came_in_part_changes_nothing(laptop: Site, part: int) -> None:
    (laptop.folder / "own").mkdir()
    (laptop.folder / "own/train.py").write_text(f"# {os.urandom(2000).hex()}")
    size = "$(wc -c < asked) - 1" if part else "0"
    # The laptop keeps its end open.
    on_login(laptop, f"timeout 3 cat > asked; head -c $(({size})) asked > part; exec < part")
    done = lockstep(laptop, "submit", "slurm", job(laptop, command=["python", "train.py"], code="own"))
    assert done.returncode == 69 and "error: the job came in part: submit again" in done.stderr, done
    assert not laptop.calls("sbatch") and not list((laptop.folder / "home").iterdir())
    on_login(laptop, "")
    assert lockstep(laptop, "submit", "slurm", laptop.file).returncode == 0
    (copy,) = (laptop.folder / "home/code").glob("*/train.py")
    assert copy.read_bytes() == (laptop.folder / "own/train.py").read_bytes()


def test_another_version_no_lockstep_at_all_and_no_connection(laptop: Site) -> None:
    python = laptop.folder / "older"
    python.write_text("#!/bin/sh\necho 0.0.1\n")
    python.chmod(0o755)
    laptop.env["LOCKSTEP_SLURM_HOST"] = f"login.example:{python}"
    for words in (("status", "slurm", "mine"), ("submit", "slurm", "--name", "mine", "--recipe", "smoke")):
        done = lockstep(laptop, *words)
        message = "error: login.example has another version than this machine, which has 0.1.0: use the same on both\n"
        assert (done.returncode, done.stderr) == (2, message), done
        assert not laptop.calls("sbatch")
    laptop.env["LOCKSTEP_SLURM_HOST"] = "login.example:/no/such/python"
    done = lockstep(laptop, "status", "slurm", "mine")
    assert done.returncode == 2 and "/no/such/python on login.example does not run Lockstep" in done.stderr, done
    on_login(laptop, "echo 'root@x: Permission denied (publickey).' >&2; exit 255")
    done = lockstep(laptop, "list", "slurm")
    assert (done.returncode, done.stdout) == (69, "") and "Permission denied" in done.stderr, done
    assert "error: the connection to login.example is lost" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "remembered"),
    [
        (("--wait", "0", "--set", "overrides.lr=1.0e-5"), 124, {"mine"}), (("--dry-run",), 0, set()),
        (("--sweep", "lr=0.1,0.2"), 0, {"mine-0", "mine-1"}),
    ],
)  # fmt: skip
def test_the_machine_that_submits_remembers_where_the_job_is(
    laptop: Site, words: tuple[str, ...], code: int, remembered: set[str]
) -> None:
    """Later commands go to the login node of the submission. With a shared home folder the login node does not connect to itself."""
    laptop.env |= {"LOCKSTEP_SLURM_HOST": "", "LOCKSTEP_HOME": str(laptop.folder / "home")}
    guard = '[ -z "$LOCKSTEP_SLURM_HERE" ] || exit 9'
    (laptop.folder / "bin/ssh").write_text(SSH.replace("#!/bin/sh", f"#!/bin/sh\n{guard}"))
    laptop.shows(QUEUED)
    laptop.does("sbatch", "echo 'sbatch: to start at once' >&2; echo Submitted batch job 8")
    done = lockstep(laptop, "submit", "slurm", job(laptop, command=None, recipe="smoke"), *words)
    assert done.returncode == code, done
    places = {path.stem: json.loads(path.read_text()) for path in (laptop.folder / "home").glob("places/slurm/*")}
    assert places == {name: {"host": AT} for name in remembered}
    if code == 124:
        done = lockstep(laptop, "status", "slurm", "mine")
        assert done.returncode == 0 and "mine: queued" in done.stdout, done


@pytest.fixture
def ranks(laptop: Site) -> Site:
    """A job that runs on one node, where srun starts the given command."""
    laptop.record()
    laptop.does("squeue", "echo '7|node1'")
    laptop.does("scontrol", "echo node1")
    laptop.shows(RUNNING)
    laptop.does("srun", 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"')
    (laptop.folder / "bin/srun").write_text((laptop.folder / "bin/squeue").read_text())
    (laptop.folder / "bin/srun").chmod(0o755)
    return laptop


def execute(site: Site, *words: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [PYTHON, "-c", PROGRAM, "exec", "slurm", "mine", "--", *words]
    return subprocess.run(command, env={**os.environ, **site.env}, input=data, capture_output=True, timeout=60)


@shells
def test_a_command_in_a_rank_gets_its_words(ranks: Site, shell: str) -> None:
    ranks.env["LOGIN_SHELL"] = shell
    done = execute(ranks, "sh", "-c", 'printf "%s|" "$@"; echo oh >&2; exit 7', "x", *ODD)
    assert (done.returncode, done.stdout) == (7, "".join(f"{word}|" for word in ODD).encode()), done
    assert done.stderr == b"oh\n"


def test_a_command_in_a_rank_gets_its_input_and_gives_its_code(ranks: Site) -> None:
    data = os.urandom(3 << 20)
    done = execute(ranks, "cat", data=data)
    assert (done.returncode, done.stdout == data, done.stderr) == (0, True, b"")
    assert execute(ranks, "sh", "-c", "exit 255").returncode == 69, "which is ssh's, too"


def test_followed_lines_come_at_once_and_no_process_follows_for_a_laptop_that_has_gone(laptop: Site) -> None:
    laptop.record()
    laptop.shows(RUNNING)
    log = laptop.job_folder / "submitit/7_0_log.out"
    log.write_text("one\n")
    command = [PYTHON, "-c", PROGRAM, "logs", "slurm", "mine", "--follow", "--rank", "0"]
    with subprocess.Popen(command, env={**os.environ, **laptop.env}, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "one\n"
        with log.open("a") as file:
            file.write("two\n")
        assert process.stdout.readline() == "two\n"
        process.kill()

    def followers() -> list[int]:
        words = b"\0".join((b"lockstep", b"logs", b"slurm", b"mine", b"--follow"))
        pids = []
        for pid, *_ in processes():
            with contextlib.suppress(OSError):
                pids += [pid] if words in Path(f"/proc/{pid}/cmdline").read_bytes() else []
        return pids

    poll(lambda: not followers(), 60, "the end of the follower")
