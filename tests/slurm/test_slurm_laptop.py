"""A job's whole life on a real SLURM from a laptop, over a real ssh to a login node with separate files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import product
from tests.processes import PYTHON, poll
from tests.slurm.conftest import LATER, Cluster, lockstep
from tests.slurm.login import AT, HOST, Laptop, laptop
from tests.slurm.test_slurm_exec import WAITS
from tests.terminal import TRAPS, at_a_terminal, drained, until_shown

pytestmark = pytest.mark.promise("slurm-ssh")

HELLO = "import os; print('hello from', os.environ['RANK'], flush=True)"
BOUND = 120


@pytest.fixture
def here(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Laptop]:
    monkeypatch.chdir(tmp_path)
    with laptop(cluster, tmp_path, monkeypatch) as machine:
        yield machine


TRAIN = """
import helper, os, time
while not os.path.exists(GO): time.sleep(0.05)
print("hello from", os.environ["RANK"], helper.WORD, os.getcwd(), flush=True)
"""


@pytest.mark.promise("code-travels")
def test_the_whole_life_of_a_job_with_user_code(here: Laptop, tmp_path: Path) -> None:
    folder, file, home = tmp_path / "own", tmp_path / "job.yaml", here.login.local / "home/.local/state/lockstep"
    (folder / "it's a folder").mkdir(parents=True)
    (folder / "train.py").write_text(TRAIN.replace("GO", repr(f"{here.login.there}/go")))
    (folder / "helper.py").write_text("WORD = open(\"it's a folder/a 'word'\").read()\n")
    (folder / "it's a folder/a 'word'").write_text("submitted")
    spec = here.spec("hello", "", command=[PYTHON, "train.py"], code=str(folder))
    file.write_text(json.dumps(spec.plain()))
    dry = lockstep("submit", "slurm", str(file), "--dry-run", "--json")
    assert dry.returncode == 0 and json.loads(dry.stdout)["would"] == "start" and not list(home.rglob("hello*")), dry
    done = lockstep("submit", "slurm", str(file))
    assert done.returncode == 0 and "hello: submitted (SLURM job" in done.stdout, done
    assert "is there already" in lockstep("submit", "slurm", str(file)).stdout
    (folder / "helper.py").write_text("WORD = 'edited'\n")
    (here.login.local / "go").touch()
    done = lockstep("wait", "slurm", "hello", "--host", AT, "--timeout", str(BOUND), bound=BOUND + 30)
    assert done.returncode == 0 and "hello: succeeded" in done.stdout, done
    record = json.loads((home / "slurm/hello/job.json").read_text())
    copy = home / "code" / record["spec"]["code"]["hash"]
    where = f"{here.login.there}/{copy.relative_to(here.login.local)}"
    done = lockstep("logs", "slurm", "hello", "--host", AT)
    assert sorted(done.stdout.splitlines()) == [
        f"[rank {rank}] hello from {rank} submitted {where}" for rank in (0, 1)
    ], done
    jobs = json.loads(lockstep("list", "slurm", "--host", AT, "--json").stdout)
    assert [(row["name"], row["state"]) for row in jobs] == [("hello", "succeeded")]
    assert not list((tmp_path / "runs").glob("*")), "nothing of the run is here"
    file.write_text(json.dumps(here.spec("hello", "print('other')", slurm={"partition": "nowhere"}).plain()))
    for words in (["--dry-run"], []):
        done = lockstep("submit", "slurm", str(file), "--replace", *words)
        assert done.returncode == 2 and "nowhere" in done.stdout + done.stderr, done
    done = lockstep("status", "slurm", "hello", "--host", AT)
    assert done.returncode == 0 and "hello: succeeded" in done.stdout, "it is still there"
    file.write_text(json.dumps(spec.plain()))
    done = lockstep("doctor", "slurm", str(file), "--json")
    rows = {item["name"]: item for item in json.loads(done.stdout)}
    assert done.returncode == 0 and rows["cluster"]["result"] == rows["start"]["result"] == "ok", rows


def test_who_cannot_be_reached_is_69_and_never_failed(here: Laptop, tmp_path: Path) -> None:
    here.submit(here.spec("far", HELLO, slurm=LATER))
    here.login.stop()
    for words in (
        ["status", "slurm", "far"], ["logs", "slurm", "far"], ["wait", "slurm", "far", "--timeout", "5"],
        ["cancel", "slurm", "far"], ["list", "slurm"], ["doctor", "slurm"],
    ):  # fmt: skip
        done = lockstep(*words, "--host", AT)
        assert done.returncode == 69 and f"the connection to {HOST} is lost" in done.stderr and done.stdout == "", done
    here.login.start()
    done = lockstep("status", "slurm", "far", "--host", AT)
    assert done.returncode == 0 and "far: pending" in done.stdout, done
    here.login.knows((here.login.laptop / "key.pub").read_text())
    done = lockstep("status", "slurm", "far", "--host", AT)
    assert done.returncode == 69 and "Host key verification failed" in done.stderr, done


def test_what_is_followed_ends_with_its_connection_on_both_sides(here: Laptop) -> None:
    here.submit(here.spec("talks", WAITS.replace("GO", f"{here.login.there}/go"), ranks_per_node=1))
    command = [PYTHON, "-c", product.PROGRAM, "logs", "slurm", "talks", "--host", AT, "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "[rank 0] begun\n"
        assert here.login.drop() > 0
        assert f"the connection to {HOST} is lost" in process.communicate(timeout=BOUND)[1] and process.returncode == 69
    (here.login.local / "go").touch()
    done = lockstep("logs", "slurm", "talks", "--host", AT, "--follow")
    assert done.stdout == "[rank 0] begun\n[rank 0] went on\n", done


def test_a_submission_whose_connection_breaks_is_whole(here: Laptop) -> None:
    """The connection breaks after the submission is sent. The login node completes the submission as one job, also a replacement."""
    local, there, spec = here.login.local, here.login.there, here.spec("cut", HELLO)
    record = local / "home/.local/state/lockstep/slurm/cut/job.json"
    (local / "bin").mkdir(exist_ok=True)
    real = shutil.which("sbatch", path="/usr/local/bin:/usr/bin:/bin")
    halt = f"touch {there}/halted; while [ ! -e {there}/on ]; do sleep 0.05; done"
    (local / "bin/sbatch").write_text(f'#!/bin/sh\n{halt}; exec {real} "$@"\n')
    (local / "bin/sbatch").chmod(0o755)
    (local / "home/.bashrc").write_text(f"export PATH={there}/bin:$PATH\n")

    def is_complete() -> bool:
        staged_folders = [*record.parents[1].glob(".cut.*")]
        return (
            record.exists() and not staged_folders and json.loads(record.read_text())["job_id"] not in (None, *numbers)
        )

    numbers: list[str] = []
    for mode in ("attach", "replace"):
        for name in ("halted", "on"):
            (local / name).unlink(missing_ok=True)
        words = ["submit", "slurm", here.file(spec), *(["--replace"] if mode == "replace" else [])]
        command = [PYTHON, "-c", product.PROGRAM, *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as submitting:
            poll(lambda: (local / "halted").exists() or submitting.poll() is not None, 60, "the place where it breaks")
            assert (local / "halted").exists(), submitting.communicate()
            assert here.login.drop() > 0
            assert "submit again" in submitting.communicate(timeout=60)[1] and submitting.returncode == 69
            (local / "on").touch()
        poll(is_complete, 60, "the submission", pause=0.2)
        numbers.append(json.loads(record.read_text())["job_id"])
        assert lockstep("wait", "slurm", "cut", "--host", AT, "--timeout", str(BOUND), bound=BOUND + 30).returncode == 0
        done = lockstep("logs", "slurm", "cut", "--host", AT)
        assert sorted(done.stdout.splitlines()) == ["[rank 0] hello from 0", "[rank 1] hello from 1"], done


@pytest.mark.promise("exec", "logs")
def test_a_command_in_a_rank_a_terminal_and_the_last_lines(here: Laptop) -> None:
    counts = f"import os\nfor n in range(20): print(n, 'of', os.environ['RANK'], flush=True)\n{WAITS}"
    here.submit(here.spec("inside", counts.replace("GO", f"{here.login.there}/go")))
    words = ("slurm", "inside", "--host", AT)
    poll(lambda: lockstep("logs", *words).stdout.count("begun") == 2, BOUND, "the ranks")
    assert lockstep("logs", *words, "--rank", "1", "--tail", "3").stdout == "18 of 1\n19 of 1\nbegun\n"
    done = lockstep("logs", *words, "--tail", "2")
    assert done.stdout == "".join(f"[rank {rank}] 19 of {rank}\n[rank {rank}] begun\n" for rank in (0, 1)), done
    script = "echo $RANK $LOCKSTEP_RUN_DIR ${LOCKSTEP_JOB-none}; exit 7"
    done = lockstep("exec", *words, "--rank", "1", "--", "sh", "-c", script)
    assert (done.returncode, done.stdout) == (7, f"1 {here.login.there}/home/runs/inside none\n"), done
    pipe = subprocess.PIPE
    command = [PYTHON, "-c", product.PROGRAM, "exec", *words, "--rank", "1", "--"]

    def start(*program: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([*command, "sh", "-c", *program], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        return process

    with at_a_terminal([*command, "sh", "-c", f"stty size; echo rank $RANK; test -t 2 && {TRAPS}"]) as (
        terminal,
        fd,
        _,
    ):
        screen = until_shown(fd, b"ready", BOUND)
        assert b"33 77" in screen and b"rank 1" in screen, screen
        os.write(fd, b"~.\x03")  # ssh would take the first two for itself
        screen = until_shown(fd, b"got", BOUND)
        assert terminal.wait(BOUND) == 5 and b"onnection" not in screen + drained(fd)
    with start("echo ready; exec sleep 600") as process:
        assert here.login.drop() > 0
        lines = process.communicate(timeout=BOUND)[1].decode().splitlines()
    assert process.returncode == 69 and lines[-1].startswith("error: ") and HOST in lines[-1], lines
    with start("echo ready; exec sleep 600") as process:
        (here.login.local / "go").touch()  # the command is a step of the job and holds no node
        process.communicate(timeout=BOUND)
    assert process.returncode != 0
    assert lockstep("wait", *words, "--timeout", str(BOUND), bound=BOUND + 30).returncode == 0
