"""A job's whole life on a real SLURM from a laptop, over a real ssh to a login node whose files the laptop does not have."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import product
from tests.processes import PYTHON, poll
from tests.product import Unreachable, UserError
from tests.slurm.conftest import LATER, Cluster, every, lockstep
from tests.slurm.login import AT, HOST, Laptop, laptop
from tests.slurm.test_slurm_exec import WAITS
from tests.terminal import at_a_terminal, drained, until_shown

pytestmark = pytest.mark.promise("slurm-ssh")

HELLO = "import os; print('hello from', os.environ['RANK'], flush=True)"
BOUND = 120
TRAPS = "trap 'echo got; exit 5' INT; echo ready; while :; do sleep 0.05; done"


@pytest.fixture
def here(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Laptop]:
    monkeypatch.chdir(tmp_path)
    with laptop(cluster, tmp_path, monkeypatch) as found:
        yield found


TRAIN = """
import helper, os, time
while not os.path.exists(GO): time.sleep(0.05)
print("hello from", os.environ["RANK"], helper.WORD, os.getcwd(), flush=True)
"""


@pytest.mark.promise("code-travels")
def test_the_whole_life_of_a_job_with_code_of_ones_own(here: Laptop, tmp_path: Path) -> None:
    folder, file, home = tmp_path / "own", tmp_path / "job.yaml", here.login.seen / "home/.local/state/lockstep"
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
    (here.login.seen / "go").touch()
    done = lockstep("wait", "slurm", "hello", "--host", AT, "--timeout", str(BOUND), bound=BOUND + 30)
    assert done.returncode == 0 and "hello: succeeded" in done.stdout, done
    copy = home / "code" / here.backend.require("hello").plain["code"]["hash"]
    where = f"{here.login.there}/{copy.relative_to(here.login.seen)}"
    done = lockstep("logs", "slurm", "hello", "--host", AT)
    assert sorted(done.stdout.splitlines()) == [
        f"[rank {rank}] hello from {rank} submitted {where}" for rank in (0, 1)
    ], done
    listed = json.loads(lockstep("list", "slurm", "--host", AT, "--json").stdout)
    assert [(row["name"], row["state"]) for row in listed] == [("hello", "succeeded")]
    assert not list((tmp_path / "runs").glob("*")), "nothing of the run is here"
    other = here.spec("hello", "print('other')", slurm={"partition": "nowhere"})
    (row,) = here.backend.dry_run(other, "replace")
    assert row.result == "missing" and "nowhere" in row.detail
    with pytest.raises(UserError, match="nowhere"):
        here.backend.submit(other, "replace")
    assert here.backend.status("hello").state == "succeeded" and len(list(here.backend.logs("hello"))) == 2, (
        "it is still there"
    )


def test_waiting_outlives_a_connection_and_following_ends_with_it(here: Laptop) -> None:
    go = here.login.seen / "go"
    program = WAITS.replace("GO", f"{here.login.there}/go")
    here.backend.submit(here.spec("talks", program, ranks_per_node=1))
    found: list[str] = []

    def follow() -> None:
        for line in here.backend.logs("talks", follow=True):
            found.append(line)

    waits = product.slurm(AT)
    with ThreadPoolExecutor() as threads:
        following, waiting = threads.submit(follow), threads.submit(waits.wait, "talks", BOUND)
        try:
            poll(lambda: found or following.done(), BOUND, "the first line")
            assert here.login.drop() > 0
            with pytest.raises(Unreachable, match=f"the connection to {HOST} is lost"):
                following.result(BOUND)
            every(0.2, lambda: here.login.connections() or waiting.done(), 60, "a new connection")
            assert here.login.drop() > 0
        finally:
            go.touch()
        assert waiting.result(BOUND).state == "succeeded"
    assert found == ["[rank 0] begun"]
    follow()
    assert found[1:] == ["[rank 0] begun", "[rank 0] went on"]


def test_who_cannot_be_reached_is_69_and_never_failed(here: Laptop) -> None:
    here.backend.submit(here.spec("far", HELLO, slurm=LATER))
    here.login.stop()
    for words in (
        ["status", "slurm", "far"], ["logs", "slurm", "far"], ["wait", "slurm", "far", "--timeout", "5"],
        ["cancel", "slurm", "far"], ["list", "slurm"],
    ):  # fmt: skip
        done = lockstep(*words, "--host", AT)
        assert done.returncode == 69 and HOST in done.stderr and "lost" in done.stderr, done
        lines = 2 if words[0] == "wait" else 1  # it says that it waits
        assert done.stderr.count("\n") == lines and done.stdout == "", done
    here.backend.lost_after = 1
    with pytest.raises(Unreachable):
        here.backend.wait("far", 20)
    here.login.start()
    with pytest.raises(Unreachable):  # no "lost", which is an ending
        here.backend.wait("far", 60, lambda status: here.login.stop())
    here.login.start()
    assert here.backend.status("far").state == "pending"


def test_a_submission_whose_connection_breaks_is_whole(here: Laptop) -> None:
    """It was sent, and the other side goes on with it: there is one job. So it is with a replacement."""
    seen, there, spec = here.login.seen, here.login.there, here.spec("cut", HELLO)
    record = seen / "home/.local/state/lockstep/slurm/cut/job.json"
    (seen / "bin").mkdir(exist_ok=True)
    real = shutil.which("sbatch", path="/usr/local/bin:/usr/bin:/bin")
    halt = f"touch {there}/halted; while [ ! -e {there}/on ]; do sleep 0.05; done"
    (seen / "bin/sbatch").write_text(f'#!/bin/sh\n{halt}; exec {real} "$@"\n')
    (seen / "bin/sbatch").chmod(0o755)
    (seen / "home/.bashrc").write_text(f"export PATH={there}/bin:$PATH\n")

    def whole() -> bool:
        staged = [*record.parents[1].glob(".cut.*")]
        return record.exists() and not staged and json.loads(record.read_text())["job_id"] not in (None, *numbers)

    numbers: list[str] = []
    for mode in ("attach", "replace"):
        for name in ("halted", "on"):
            (seen / name).unlink(missing_ok=True)
        with ThreadPoolExecutor() as threads:
            submitting = threads.submit(here.backend.submit, spec, mode)
            poll(lambda: (seen / "halted").exists() or submitting.done(), 60, "the place where it breaks")
            assert (seen / "halted").exists(), submitting.exception()
            assert here.login.drop() > 0
            with pytest.raises(Unreachable, match="submit again"):
                submitting.result(60)
            (seen / "on").touch()
        every(0.2, whole, 60, "the submission")
        numbers.append(here.backend.job_id("cut"))
        assert here.backend.wait("cut", BOUND).state == "succeeded"
        assert sorted(here.backend.logs("cut")) == ["[rank 0] hello from 0", "[rank 1] hello from 1"]


def test_doctor_looks_at_the_way_too(here: Laptop, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(here.spec("ask", HELLO).plain()))
    done = lockstep("doctor", "slurm", str(file), "--json")
    found = {item["name"]: item for item in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout
    assert f"{here.login.there}/home/.local/state/lockstep" in found["connection"]["detail"]
    assert found["cluster"]["result"] == "ok" and found["node"]["result"] == "ok", found
    assert f"{here.login.there}/home/runs" in found["node"]["detail"]
    here.login.knows((here.login.laptop / "key.pub").read_text())
    here.login.drop()
    poll(
        lambda: list((here.login.short / "lockstep-ssh").iterdir()) == [], 60, "the end of the connection that is kept"
    )
    done = lockstep("doctor", "slurm", "--host", "other.example", "--json")
    found = {item["name"]: item for item in json.loads(done.stdout)}
    assert done.returncode == 1 and list(found) == ["connection"]
    assert "has another host key than it had" in found["connection"]["detail"]


@pytest.mark.promise("exec", "logs")
def test_a_command_beside_a_rank_a_terminal_and_the_last_lines(here: Laptop) -> None:
    counts = f"import os\nfor n in range(20): print(n, 'of', os.environ['RANK'], flush=True)\n{WAITS}"
    here.backend.submit(here.spec("inside", counts.replace("GO", f"{here.login.there}/go")))
    poll(lambda: sum("begun" in line for line in here.backend.logs("inside")) == 2, BOUND, "the ranks")
    words = ("slurm", "inside", "--host", AT)
    assert lockstep("logs", *words, "--rank", "1", "--tail", "3").stdout == "18 of 1\n19 of 1\nbegun\n"
    done = lockstep("logs", *words, "--tail", "3")
    assert done.stdout == "[rank 0] 19 of 0\n[rank 0] begun\n[rank 1] begun\n", done
    told = "echo $RANK $LOCKSTEP_RUN_DIR ${LOCKSTEP_JOB-none}; exit 255"
    done = lockstep("exec", *words, "--rank", "1", "--", "sh", "-c", told)
    assert (done.returncode, done.stdout) == (255, f"1 {here.login.there}/home/runs/inside none\n"), done
    pipe = subprocess.PIPE
    command = [PYTHON, "-c", product.PROGRAM, "exec", *words, "--rank", "1", "--"]

    def begun(*program: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([*command, "sh", "-c", *program], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        return process

    with begun(TRAPS) as process:
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=BOUND)[0] == b"got\n" and process.returncode == 5
    with at_a_terminal([*command, "sh", "-c", f"stty size; echo rank $RANK; test -t 2 && {TRAPS}"]) as (
        terminal,
        ours,
        _,
    ):
        shown = until_shown(ours, b"ready", BOUND)
        assert b"33 77" in shown and b"rank 1" in shown, shown
        os.write(ours, b"~.\x03")  # the first two would be ssh's own
        shown = until_shown(ours, b"got", BOUND)
        assert terminal.wait(BOUND) == 5 and b"onnection" not in shown + drained(ours)
    with begun("echo ready; exec sleep 600") as process:
        assert here.login.drop() > 0
        said = process.communicate(timeout=BOUND)[1].decode().splitlines()
    assert process.returncode == 69 and said[-1].startswith("error: ") and HOST in said[-1], said
    with begun("echo ready; exec sleep 600") as process:
        (here.login.seen / "go").touch()  # the command is a step of the job, and keeps no node
        process.communicate(timeout=BOUND)
    assert process.returncode != 0 and here.backend.wait("inside", BOUND).state == "succeeded"
