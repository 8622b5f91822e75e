"""What somebody on the network, or a file of somebody else's, can do to a run: nothing."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import product
from tests.events import events
from tests.jobs.helpers import lockstep
from tests.processes import PYTHON, ROOT, clean_env, poll, require, run, started
from tests.product import UserError
from tests.ranks import training
from tests.runs import Job
from tests.warm.process import start

pytestmark = pytest.mark.promise("other-users")


def _listening(pids: list[int]) -> set[tuple[str, int]]:
    """(address, port) of each TCP socket on which one of these processes listens."""
    require(shutil.which("ss"), "needs ss (iproute2)")
    rows = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
    found = set()
    for row in rows:
        if any(f"pid={pid}," in row for pid in pids):
            address, _, port = row.split()[3].rpartition(":")
            found.add((address.strip("[]"), int(port)))
    return found


def test_a_run_on_one_machine_listens_on_loopback_only(job: Job) -> None:
    """The ranks' store and gloo ask nobody who he is; the metrics are nobody else's either."""
    held = job.run_dir.parent / "held"
    with started(job.command(), job.env(LOCKSTEP_TEST_FATE="1:5:HOLD", LOCKSTEP_TEST_HELD=str(held))):
        poll(held.exists, what="rank 1 in its fifth pass")
        found = _listening(job.pids())
    assert len(found) == 5, found  # the ranks' store; gloo and metrics of two ranks; of the launcher none
    assert {address for address, _ in found} == {"127.0.0.1"}, found


@pytest.mark.promise("no-foreign-code")
def test_only_a_network_is_called(tmp_path: Path) -> None:
    for model in ("subprocess:Popen", "os:system", "pathlib:Path.touch"):
        done = training(
            "run", "smoke", "--run-dir", str(tmp_path / "run"), "--set", f"model={model}", "model_options={}"
        )
        assert done.code == 2 and model in done.output and len(done.output.splitlines()) == 1, done


@pytest.mark.promise("no-foreign-code")
def test_a_run_directory_runs_no_code_of_its_own(job: Job, tmp_path: Path) -> None:
    """`evaluate` of a directory that somebody else may have written imports our models only, unless it is told to."""
    job.ranks = 1
    assert job.go().code == 0
    refused = training("evaluate", str(job.run_dir))
    assert refused.code == 2 and "tests.nets:Dying" in refused.output, refused.output
    assert training("evaluate", str(job.run_dir), "--trust-model").code == 0
    (tmp_path / "evil.py").write_text("open('bomb-went-off', 'w')\n")
    run_file = job.run_dir / "run.yaml"
    run_file.write_text(run_file.read_text().replace("tests.nets:Dying", "evil:Net"))
    env = clean_env(PYTHONPATH=f"{ROOT}:{tmp_path}")
    for words in (["evaluate", str(job.run_dir)], ["export", str(job.run_dir), str(tmp_path / "w.pth")],
                  ["report", str(job.run_dir)]):  # fmt: skip
        run([PYTHON, "-m", "lockstep.training", *words], env, cwd=tmp_path)
    assert not (tmp_path / "bomb-went-off").exists()


SLOW = """
import socket, sys, time
crowd = []
for _ in range(1100):
    s = socket.socket()
    s.settimeout(5)
    try:
        s.connect(("127.0.0.1", int(sys.argv[1])))
        s.send(b"GET /met")
    except OSError:
        pass
    crowd.append(s)
print("crowded", flush=True)
while True:  # a byte now and then: none of them is silent
    time.sleep(0.5)
    for s in crowd:
        try:
            s.send(b"x")
        except OSError:
            pass
"""


def test_a_crowd_of_slow_clients_costs_no_checkpoint(job: Job, tmp_path: Path) -> None:
    """1,100 connections that never end their request, to a process that may open 512 files."""
    job.ranks = 1
    held = tmp_path / "held"
    held.touch()
    fate = {"LOCKSTEP_TEST_FATE": "0:5:WAIT", "LOCKSTEP_TEST_HELD": str(held)}
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with job.started(**fate) as gang:
        poll(lambda: events(job.run_dir, "checkpoint_written"), what="a checkpoint")
        pid = gang.rank_pid(0)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (512, hard))
        port = json.loads((job.run_dir / "endpoints/rank-00000.json").read_text())["port"]
        with started([PYTHON, "-c", SLOW, str(port)], clean_env()) as crowd:
            assert crowd.stdout is not None and crowd.stdout.readline() == "crowded\n"
            assert len(os.listdir(f"/proc/{pid}/fd")) < 200
            held.unlink()
            done = gang.wait(120)
    assert done.code == 0 and "warning" not in done.output, done.output
    assert job.steps()[0] == 24


ROUNDS = int(os.environ.get("LOCKSTEP_FRESH", "30"))  # a test's own environment no longer has it


@pytest.mark.promise("fresh")
def test_two_fresh_starts_at_once_never_share_a_directory(tmp_path: Path) -> None:
    """30 rounds (LOCKSTEP_FRESH for more): each ends with every directory owned by one start, and the loser is told."""
    program = (
        "import sys, pathlib, time\nfrom tests import product\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "while not (path.parent / 'go').exists(): pass\n"
        "try:\n    owner = product.fresh_run(path) / 'owner'\n"
        "except product.UserError as error:\n    print('refused', error)\n"
        "else:\n    owner.open('a').write(sys.argv[2])\n"
        "    time.sleep(0.6)\n    print('mine', owner.read_text() == sys.argv[2])\n"
    )
    for number in range(ROUNDS):
        folder = tmp_path / str(number)
        (folder / "run/checkpoints").mkdir(parents=True)
        with open(folder / "said", "wb") as said:
            both = [start(["-c", program, str(folder / "run"), name], clean_env(), said.fileno()) for name in "ab"]
            time.sleep(0.05)
            (folder / "go").touch()
            assert [process.wait(30) for process in both] == [0, 0]
        lines = (folder / "said").read_text().splitlines()
        assert "mine True" in lines and "mine False" not in lines, lines


NOBODY = 65534
SWAP = """
import os, sys, time
team, planted = sys.argv[1:]
os.setgid(65534); os.setuid(65534)
print("ready", flush=True)
while True:  # in turn the owner's folder and the planted one have the name
    try:
        os.rename(team + "/home", team + "/aside")
        os.rename(planted, team + "/home")
        os.rename(team + "/home", planted)
        os.rename(team + "/aside", team + "/home")
    except OSError:
        time.sleep(0.001)
"""


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Path]:
    """A folder that everybody can reach."""
    require(os.geteuid() == 0, "needs root, to act as another user")
    with tempfile.TemporaryDirectory(prefix="lockstep-team-") as made:
        Path(made).chmod(0o755)
        yield Path(made)


def _lockstep(home: Path, *words: str) -> tuple[int, str]:
    done = lockstep(home.parent.parent, *words, LOCKSTEP_HOME=str(home))
    return done.returncode, done.stdout + done.stderr


def test_who_may_rename_above_the_jobs_runs_no_code(team: Path, tmp_path: Path) -> None:
    """Another user owns the folder above LOCKSTEP_HOME, and swaps in a folder of records: none of them is run or ended."""
    shared, went_off = team / "shared", tmp_path / "went-off"
    shared.mkdir()
    job = tmp_path / "job.yaml"
    job.write_text("name: own\ncommand: [python, -c, 'print(1)']\nmax_restarts: 0\n")
    assert _lockstep(shared / "home", "submit", "local", str(job))[0] == 0
    assert _lockstep(shared / "home", "wait", "local", "own", "--timeout", "60")[0] == 0
    planted = shared / "planted"
    shutil.copytree(shared / "home", planted)
    record = planted / "local/own/job.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "command": ["touch", str(went_off)]}))
    for path in (shared, planted, *planted.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    with subprocess.Popen(
        [PYTHON, "-c", SWAP, str(shared), str(planted)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as other:  # fmt: skip
        try:
            assert other.stdout is not None and other.stdout.readline() == b"ready\n"
            for _ in range(5):
                for words in (["submit", "local", str(job), "--replace"], ["status", "local", "own"], ["list", "local"],
                              ["cancel", "local", "own"], ["logs", "local", "own"]):  # fmt: skip
                    code, told = _lockstep(shared / "home", *words)
                    refused = code == 2 and f"{shared} belongs to user {NOBODY}" in told and told.count("\n") == 1
                    assert refused, (words, code, told)
        finally:
            other.kill()
    assert not went_off.exists()


FORGED = """
import os, sys
os.setgid(65534); os.setuid(65534)
os.execve("/bin/sh", ["sh", "-c", "echo ready; sleep 120"], dict(word.split("=", 1) for word in sys.argv[1:]))
"""


def test_another_users_process_with_the_marks_of_a_job_is_none_of_it(team: Path, tmp_path: Path) -> None:
    """`exec` does not take its environment, `cancel` does not wait for it, and the job ends."""
    job, went_off = tmp_path / "job.yaml", tmp_path / "went-off"
    program = "import os, time; open('started', 'w').write(str(os.getppid())); time.sleep(300)"
    job.write_text(
        f"name: own\ncommand: [python, -c, {json.dumps(program)}]\nmax_restarts: 0\nranks_per_node: 1\ngrace_seconds: 5\n"
    )
    home, marks = tmp_path / "home", {}
    assert _lockstep(home, "submit", "local", str(job))[0] == 0
    try:
        poll((home.parent.parent / "started").exists, what="a rank")
        record = json.loads((home / "local/own/job.json").read_text())
        marks = {
            "RANK": "0", "LOCAL_RANK": "0", "LOCKSTEP_JOB": record["job"], "PATH": os.environ["PATH"], "FORGED": "1",
            "LOCKSTEP_LAUNCHER": (home.parent.parent / "started").read_text(), "BASH_ENV": "/dev/null",
        }  # fmt: skip
        words = [f"{name}={value}" for name, value in marks.items()]
        with subprocess.Popen([PYTHON, "-c", FORGED, *words], stdout=subprocess.PIPE) as other:
            try:
                assert other.stdout is not None and other.stdout.readline() == b"ready\n"
                begun = Path(f"/proc/{other.pid}/stat").read_text()
                code, told = _lockstep(home, "exec", "local", "own", "--", "env")
                assert code == 0 and "FORGED" not in told, (begun, told)
                began = time.monotonic()
                code, told = _lockstep(home, "cancel", "local", "own")
                assert code == 0 and time.monotonic() - began < 60, told
                assert "cancelled" in _lockstep(home, "status", "local", "own")[1]
                assert other.poll() is None, "it was not ended either"
                code, told = _lockstep(home, "exec", "local", "own", "--", "touch", str(went_off))
                assert code == 2 and not went_off.exists(), told
            finally:
                other.kill()
    finally:
        _lockstep(home, "cancel", "local", "own")


def test_a_link_of_another_user_in_a_run_directory_is_refused(job: Job, tmp_path: Path) -> None:
    require(os.geteuid() == 0, "needs root, to act as another user")
    victim = tmp_path / "victim"
    victim.write_text("mine\n")
    for name in (".lock", "events.jsonl", "metrics"):
        job.run_dir.mkdir(parents=True, exist_ok=True)
        link = job.run_dir / name
        link.symlink_to(tmp_path if name == "metrics" else victim)
        os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
        done = job.go()
        assert done.code == 2 and f"{link} is a link of user {NOBODY}" in done.output, done.output
        link.unlink()
    assert victim.read_text() == "mine\n"


def test_a_link_of_another_user_in_the_place_of_a_runs_folder_is_not_followed(job: Job, tmp_path: Path) -> None:
    """While the run goes on: where its metrics were written, and where its servers' addresses lie until it ends."""
    require(os.geteuid() == 0, "needs root, to act as another user")
    job.ranks = 1
    victim, held = tmp_path / "victim", tmp_path / "held"
    victim.mkdir()
    (victim / "rank-00000.json").write_text("mine\n")
    held.touch()
    with job.started(LOCKSTEP_TEST_FATE="0:5:WAIT", LOCKSTEP_TEST_HELD=str(held)) as gang:
        poll((job.run_dir / "metrics/rank-00000.prom").exists, what="a textfile")
        for name in ("metrics", "endpoints"):
            folder = job.run_dir / name
            folder.rename(tmp_path / name)
            folder.symlink_to(victim)
            os.chown(folder, NOBODY, NOBODY, follow_symlinks=False)
        held.unlink()
        done = gang.wait(120)
    assert done.code == 0 and done.output.count(f"cannot write {job.run_dir}/metrics/rank-00000.prom") == 1, done
    assert [path.name for path in victim.iterdir()] == ["rank-00000.json"], "neither written nor removed there"


@pytest.mark.parametrize(
    ("mode", "owner", "told"),
    [(0o777, 0, "mode 777"), (0o770, 0, "mode 770"), (0o2775, 0, "mode 2775"), (0o755, NOBODY, f"user {NOBODY}"),
     (0o1777, NOBODY, f"user {NOBODY}"), (0o1777, 0, ""), (0o755, 0, "")],
)  # fmt: skip
def test_each_folder_above_the_jobs_is_judged(team: Path, mode: int, owner: int, told: str) -> None:
    """Also the one that a link leads through. A folder of a team is one that root has made, or has the sticky bit."""
    shared = team / "shared"
    (shared / "mine").mkdir(parents=True)
    (team / "link").symlink_to(shared / "mine")
    os.chown(shared, owner, owner)
    shared.chmod(mode)
    for home in (shared / "mine/home", team / "link/home"):
        if told:
            with pytest.raises(UserError) as caught:
                product.private_folder(home / "slurm")
            message = str(caught.value)
            assert told in message and str(shared) in message and "LOCKSTEP_HOME" in message and not home.exists()
        else:
            product.private_folder(home / "slurm")
            assert home.stat().st_mode & 0o777 == 0o700, "what is made on the way is ours alone"
    planted = team / "planted"
    planted.symlink_to(shared / "mine")
    os.chown(planted, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(UserError, match=f"belongs to user {NOBODY}"):
        product.private_folder(planted / "home/slurm")
