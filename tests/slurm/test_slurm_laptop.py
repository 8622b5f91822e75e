"""A job's whole life on a real SLURM from a laptop, over a real ssh to a login node whose files the laptop does not have."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lockstep.jobs import sweep
from lockstep.jobs.slurm.backend import SlurmBackend
from lockstep.jobs.slurm.transport.ssh import Ssh
from lockstep.jobs.spec.model import JobSpec
from lockstep.jobs.status import Disconnected
from lockstep.training.contract import UserError
from tests.processes import PYTHON, poll
from tests.slurm.conftest import Cluster, every, lockstep
from tests.slurm.login import HOST, Laptop, laptop
from tests.slurm.trainings import SETTINGS

HELLO = "import os; print('hello from', os.environ['RANK'], flush=True)"
WAITS = (
    "import os, time\nprint('begun', flush=True)\nwhile not os.path.exists('GO'): time.sleep(0.05)\nprint('went on')"
)
BOUND = 120


@pytest.fixture
def here(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Laptop]:
    monkeypatch.chdir(tmp_path)
    with laptop(cluster, tmp_path, monkeypatch) as found:
        yield found


def test_the_whole_life_of_a_job(here: Laptop, tmp_path: Path) -> None:
    go = f"while not os.path.exists('{here.login.there}/go'): time.sleep(0.05)\n"
    program = f"import os, time\n{go}{HELLO}"
    spec = here.spec("hello", program)
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(spec.plain()))
    done = lockstep("submit", "slurm", str(file))
    assert done.returncode == 0 and "hello: submitted (SLURM job" in done.stdout, done
    assert "is there already" in lockstep("submit", "slurm", str(file)).stdout
    (here.login.seen / "go").touch()
    done = lockstep("wait", "slurm", "hello", "--host", HOST, "--timeout", str(BOUND), bound=BOUND + 30)
    assert done.returncode == 0 and "hello: succeeded" in done.stdout, done
    done = lockstep("logs", "slurm", "hello", "--host", HOST)
    assert sorted(done.stdout.splitlines()) == ["[rank 0] hello from 0", "[rank 1] hello from 1"], done
    assert lockstep("diff", "slurm", str(file)).stdout == "no difference\n"
    listed = lockstep("list", "slurm", "--host", HOST, "--json")
    assert [(row["name"], row["state"]) for row in json.loads(listed.stdout)] == [("hello", "succeeded")]
    home = here.login.seen / "home"
    assert (home / ".local/state/lockstep/slurm/hello/job.json").exists() and not list((tmp_path / "runs").glob("*"))
    sent = next((home / ".local/state/lockstep/slurm/hello/submitit").glob("[0-9]*_submission.sh")).read_text()
    assert lockstep("render", "slurm", str(file)).stdout == sent
    backend = here.backend
    assert backend.require("hello").plain == {**spec.record(), "slurm": {**spec.record()["slurm"], "host": None}}
    with pytest.raises(UserError, match="--replace"):
        backend.submit(spec)
    assert backend.submit(spec, "new").name == "hello-v2" and backend.submit(spec, "replace").created
    assert {backend.wait(name, BOUND).state for name in ("hello", "hello-v2")} == {"succeeded"}
    other = here.spec("hello", "print('other')", slurm={"partition": "nowhere"})
    with pytest.raises(UserError, match="SLURM refuses hello: invalid partition"):
        backend.submit(other, "replace")
    assert backend.status("hello").state == "succeeded" and len(list(backend.logs("hello"))) == 2, (
        "what was there is there"
    )
    assert backend.drift(here.spec("hello", program, grace_seconds=7)) == ["grace_seconds: 5 → 7"]


def test_training_a_sweep_with_summaries(here: Laptop, data_root: Path) -> None:
    overrides = {**SETTINGS, "epochs": 1, "evaluate.every": 1, "data.root": str(data_root), "model": "mlp"}
    values = {
        "name": "grid", "recipe": "smoke", "overrides": overrides, "memory": "2Gi", "cpus": 1, "run_dir": "runs/grid",
        "slurm": {"host": HOST, "python": PYTHON},
    }  # fmt: skip
    file = Path("grid.yaml")
    file.write_text(json.dumps(values))
    done = lockstep("submit", "slurm", str(file), "--sweep", "lr=0.1,0.001", "--wait", "150", bound=200)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert done.returncode == 0 and [line[:3] for line in lines[1:]] == [
        ["grid-0", "0.1000", "succeeded"], ["grid-1", "0.001", "succeeded"]
    ], done  # fmt: skip
    assert float(lines[1][3]) >= 0
    assert [(row.name, row.state) for row in here.backend.list()] == [("grid-0", "succeeded"), ("grid-1", "succeeded")]
    ids = [here.backend.job_id(f"grid-{index}").split("_") for index in (0, 1)]
    assert ids[0][0] == ids[1][0] and [one[1] for one in ids] == ["0", "1"]
    specs = sweep.expand(JobSpec.of(values), {"lr": [0.1, 0.001]})
    with pytest.raises(UserError, match="grid-0 has already finished"):
        here.backend.sweep("grid", specs)


def test_code_of_ones_own_travels(here: Laptop, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    (folder / "it's a folder").mkdir(parents=True)
    (folder / "train.py").write_text("import helper, os; print(helper.WORD, os.getcwd(), flush=True)\n")
    (folder / "helper.py").write_text("WORD = open(\"it's a folder/a 'word'\").read()\n")
    (folder / "it's a folder/a 'word'").write_text("submitted")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    spec = here.spec("own", "", command=[PYTHON, "train.py"], code=str(folder), slurm={"patch": {"begin": "now+1hour"}})
    here.backend.submit(spec)
    (folder / "helper.py").write_text("WORD = 'edited'\n")
    here.ask("scontrol", "update", f"jobid={here.backend.job_id('own')}", "starttime=now")
    found = here.backend.wait("own", BOUND)
    lines = sorted(here.backend.logs("own"))
    assert found.state == "succeeded", (found, lines)
    identity = here.backend.require("own").plain["code"]["hash"]
    copy = f"home/.local/state/lockstep/code/{identity}"
    assert lines == [f"[rank {rank}] submitted {here.login.there}/{copy}" for rank in (0, 1)]
    kept = here.login.seen / copy
    assert (kept / "run.sh").stat().st_mode & 0o777 == 0o555 and (kept / "train.py").stat().st_mode & 0o777 == 0o444
    before = kept.stat().st_ino
    here.backend.transport.unpack(identity)
    assert kept.stat().st_ino == before, "the copy is good"
    (kept / "train.py").chmod(0o644)
    (kept / "train.py").write_text("print('changed by hand')\n")
    here.backend.transport.unpack(identity)
    assert "helper.WORD" in (kept / "train.py").read_text() and list(kept.parent.glob(f".{identity}.changed.*"))


def test_secrets_and_the_users_own_environment(here: Laptop, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import os; print(os.environ['KEY'], os.environ['GREETING'], os.environ.get('OF_THE_LAPTOP'))"
    spec = here.spec(
        "secret", program, env={"GREETING": 'it\'s "1e3"; $HOME'}, secrets={"KEY": {"secret": "s", "key": "k"}}
    )
    monkeypatch.setenv("OF_THE_LAPTOP", "stays here")
    with pytest.raises(UserError, match="needs the secret KEY"):
        here.backend.submit(spec)
    monkeypatch.setenv("KEY", "hunter'2")
    here.backend.submit(spec)
    assert here.backend.wait("secret", BOUND).state == "succeeded"
    assert list(here.backend.logs("secret", rank=1)) == ["hunter'2 it's \"1e3\"; $HOME None"]
    files = [path for path in here.login.seen.rglob("*") if path.is_file() and not path.name.endswith("_log.out")]
    assert not any(b"hunter" in path.read_bytes() for path in files)


def test_two_laptops_submit_at_once(here: Laptop) -> None:
    """The lock is the cluster's: one of them creates the job, and the other one attaches to it."""
    spec = here.spec("both", HELLO, slurm={"patch": {"begin": "now+1hour"}})
    backends = [SlurmBackend(transport=Ssh(HOST)) for _ in range(3)]
    with ThreadPoolExecutor() as threads:
        done = list(threads.map(lambda backend: backend.submit(spec), backends))
    for backend in backends:
        backend.transport.close()  # type: ignore[attr-defined]
    assert sorted(item.created for item in done) == [False, False, True] and len({item.where for item in done}) == 1
    assert len(here.ask("squeue", "-h", "-o", "%i").split()) == 1


def test_logs_are_followed_over_a_connection_that_breaks(here: Laptop) -> None:
    go = here.login.seen / "go"
    here.backend.submit(here.spec("talks", WAITS.replace("GO", f"{here.login.there}/go"), ranks_per_node=1))
    found: list[str] = []

    def follow() -> None:
        for line in here.backend.logs("talks", follow=True):
            found.append(line)

    with ThreadPoolExecutor() as threads:
        following = threads.submit(follow)
        try:
            poll(lambda: found or following.done(), BOUND, "the first line")
            for _ in range(3):
                assert here.login.drop() > 0
                every(0.2, lambda: here.login.connections() or following.done(), 60, "a new connection")
        finally:
            go.touch()
        following.result(BOUND)
    assert found == ["[rank 0] begun", "[rank 0] went on"], "each line once"
    assert here.backend.wait("talks", BOUND).state == "succeeded"


def test_waiting_outlives_a_connection_and_cancel_saves(here: Laptop) -> None:
    go = f"{here.login.there}/go"
    here.backend.submit(here.spec("long", WAITS.replace("GO", go), ranks_per_node=1))
    reasons: list[str] = []
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(lambda: here.backend.wait("long", BOUND, lambda status: reasons.append(status.reason)))
        poll(lambda: any("on node" in reason for reason in reasons), BOUND, "the job")
        for _ in range(3):
            assert here.login.drop() > 0
            every(0.2, lambda: here.login.connections() or waiting.done(), 60, "a new connection")
        (here.login.seen / "go").touch()
        assert waiting.result(BOUND).state == "succeeded", reasons
    (here.login.seen / "go").unlink()
    here.backend.submit(here.spec("ended", WAITS.replace("GO", go), ranks_per_node=1))
    poll(lambda: list(here.backend.logs("ended", rank=0)) == ["begun"], BOUND, "the rank")
    done = lockstep("cancel", "slurm", "ended", "--host", HOST)
    assert "ended: cancelled" in done.stdout, done
    assert here.backend.status("ended").state == "cancelled"


def test_who_cannot_be_reached_is_69_and_never_failed(here: Laptop) -> None:
    here.backend.submit(here.spec("far", HELLO, slurm={"patch": {"begin": "now+1hour"}}))
    here.login.stop()
    for words in (
        ["status", "slurm", "far"], ["logs", "slurm", "far"], ["wait", "slurm", "far", "--timeout", "5"],
        ["cancel", "slurm", "far"], ["list", "slurm"],
    ):  # fmt: skip
        done = lockstep(*words, "--host", HOST)
        assert done.returncode == 69 and done.stderr.startswith(
            "error: the connection to login.example is lost (ssh:"
        ), done
        assert done.stderr.count("\n") == 1 and done.stdout == "", done
    here.backend.lost_after = 1
    with pytest.raises(Disconnected):
        here.backend.wait("far", 20)
    here.login.start()
    with pytest.raises(Disconnected):  # no "lost", which is an ending
        here.backend.wait("far", 60, lambda status: here.login.stop())
    here.login.start()
    assert here.backend.status("far").state == "pending"


CUTS = ("before it is unpacked", "within sbatch", "behind sbatch")
"""All of the job is on the other side by then; `test_a_submission_that_came_in_part` has what is not."""


@pytest.mark.parametrize("cut", CUTS)
def test_a_submission_whose_connection_breaks_is_whole_or_none(here: Laptop, cut: str) -> None:
    """It was sent: it is whole, and there is never a second job."""
    spec = here.spec("cut", HELLO, slurm={"patch": {"begin": "now+1hour"}})
    _cut_off(here, cut, lambda: here.backend.submit(spec))
    jobs = here.login.seen / "home/.local/state/lockstep/slurm"
    with here.backend.transport.locked(here.backend.folder, 60):  # the shell of the one before has ended
        pass
    assert len(here.ask("squeue", "-h", "-o", "%i").split()) == 1 and (jobs / "cut/job.json").exists()
    assert [entry.name for entry in jobs.iterdir() if entry.name.startswith(".cut")] == []
    assert not here.backend.submit(spec).created
    assert len(here.ask("squeue", "-h", "-o", "%i").split()) == 1
    here.ask("scontrol", "update", f"jobid={here.backend.job_id('cut')}", "starttime=now")
    assert here.backend.wait("cut", BOUND).state == "succeeded"
    assert sorted(here.backend.logs("cut")) == ["[rank 0] hello from 0", "[rank 1] hello from 1"]


def test_a_replacement_whose_connection_breaks_is_whole(here: Laptop) -> None:
    spec = here.spec("kept", HELLO)
    here.backend.submit(spec)
    assert here.backend.wait("kept", BOUND).state == "succeeded"
    first = here.backend.job_id("kept")
    _cut_off(here, "within sbatch", lambda: here.backend.submit(spec, "replace"))
    with here.backend.transport.locked(here.backend.folder, 60):
        pass
    assert here.backend.job_id("kept") != first
    assert here.backend.wait("kept", BOUND).state == "succeeded" and len(list(here.backend.logs("kept"))) == 2


def _cut_off(here: Laptop, cut: str, submit: Callable[[], object]) -> None:
    """Submits over a connection that breaks there."""
    seen, there = here.login.seen, here.login.there
    (seen / "bin").mkdir(exist_ok=True)
    real = subprocess.run(
        ["/bin/sh", "-c", "PATH=/usr/bin:/bin command -v sbatch"], capture_output=True, text=True, check=True
    )
    halts = {
        "within sbatch": f"touch {there}/halted; while [ ! -e {there}/on ]; do sleep 0.05; done; exec {real.stdout.strip()} \"$@\"",
        "behind sbatch": f"{real.stdout.strip()} \"$@\"; touch {there}/halted; while [ ! -e {there}/on ]; do sleep 0.05; done",
    }  # fmt: skip
    if cut in halts:
        program = "sbatch"
        (seen / "bin/sbatch").write_text(f"#!/bin/sh\n{halts[cut]}\n")
    else:
        program = "mktemp"
        (seen / "bin/mktemp").write_text(
            f'#!/bin/sh\ntouch {there}/halted; while [ ! -e {there}/on ]; do sleep 0.05; done; exec /usr/bin/mktemp "$@"\n'
        )
    (seen / f"bin/{program}").chmod(0o755)
    (seen / "home/.bashrc").write_text(f"export PATH={there}/bin:$PATH\n")
    here.backend.transport.close()  # type: ignore[attr-defined]
    for name in ("halted", "on"):
        (seen / name).unlink(missing_ok=True)
    with ThreadPoolExecutor() as threads:
        submitting = threads.submit(submit)
        poll(lambda: (seen / "halted").exists() or submitting.done(), 60, "the place where it breaks")
        assert (seen / "halted").exists(), submitting.exception()
        assert here.login.drop() > 0
        with pytest.raises(Disconnected, match="connection to login.example is lost.*: submit again"):
            submitting.result(60)
        (seen / "on").touch()
    (seen / f"bin/{program}").unlink()


def test_doctor_looks_at_the_way_too(here: Laptop, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(here.spec("ask", HELLO).plain()))
    done = lockstep("doctor", "slurm", str(file), "--json")
    found = {item["name"]: item for item in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout
    assert (
        found["connection"]["detail"]
        == f"{HOST}, as root; LOCKSTEP_HOME there is {here.login.there}/home/.local/state/lockstep"
    )
    assert found["tools"]["result"] == "ok" and found["node"]["result"] == "ok", found
    assert f"{here.login.there}/home/runs" in found["node"]["detail"]
    here.login.knows((here.login.laptop / "key.pub").read_text())
    here.login.drop()
    poll(
        lambda: list((here.login.short / "lockstep-ssh").iterdir()) == [], 30, "the end of the connection that is kept"
    )
    done = lockstep("doctor", "slurm", "--host", "other.example", "--json")
    found = {item["name"]: item for item in json.loads(done.stdout)}
    assert done.returncode == 1 and list(found) == ["connection"]
    assert "has another host key than it had" in found["connection"]["detail"]
