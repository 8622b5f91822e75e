"""Jobs of the Compose backend on a real engine: killed, stopped, starved, out of time; what Prometheus and Docker see."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import product
from tests.containers.jobs import BOUND, SHORT, Jobs
from tests.engine import docker, inspect
from tests.events import status_of, weights_digest
from tests.processes import PYTHON, ROOT, clean_env, poll
from tests.product import JobSpec
from tests.terminal import TRAPS, at_a_terminal, until_shown

pytestmark = [pytest.mark.containers, pytest.mark.promise("compose")]


@pytest.fixture(scope="module")
def calm(jobs: Jobs) -> str:
    """Trains two ranks in one container of the same image, because bits depend on torch's build."""
    settings = [f"{name}={value}" for name, value in SHORT.items()]
    words = ["--ranks", "2", "run", "smoke", "--run-dir", "/runs/calm", "--set", *settings]
    volume = f"{jobs.bench.claim}:/runs"
    docker("run", "--rm", "--shm-size", "256m", "--volume", volume, jobs.image, *words, timeout=BOUND)
    return weights_digest(jobs.bench.folder / "calm")


def has_saved(jobs: Jobs, spec: JobSpec, starts: int) -> Callable[[], bool]:
    """Returns a check: the run has started so often, and has saved since."""

    def has() -> bool:
        attempts = [event["attempt"] for event in jobs.events(spec, "start")]
        saved_attempts = {event["attempt"] for event in jobs.events(spec, "checkpoint_written")}
        return len(attempts) >= starts and attempts[-1] in saved_attempts

    return has


@pytest.mark.promise("images")
def test_nodes_are_killed_and_stopped_and_the_weights_are_those_of_one_container(jobs: Jobs, calm: str) -> None:
    """A new submission restarts a killed node. `docker stop` saves and ends both nodes, and the next job resumes."""
    spec = jobs.smoke("stormy")
    assert jobs.backend.submit(spec).created
    poll(has_saved(jobs, spec, 1), BOUND, "a checkpoint")
    docker("kill", jobs.container(spec, 1))
    status = jobs.backend.status(spec.name)
    assert status.state == "restarting" and "node-1 was killed by SIGKILL" in status.reason, status
    assert not jobs.backend.submit(spec).created, "the same job again brings the node back"
    poll(has_saved(jobs, spec, 2), BOUND, "a checkpoint of the second start")
    docker("kill", jobs.container(spec, 0))  # rank 0 and the rendezvous: the other node soon ends, too

    def trains_again() -> bool:
        status = jobs.backend.status(spec.name)
        assert status.state != "succeeded", status
        if status.state in ("restarting", "failed"):  # as a person would
            jobs.backend.submit(spec, "replace" if status.final else "attach")
        return has_saved(jobs, spec, 3)()

    poll(trains_again, BOUND, "a checkpoint of the third start")
    docker("stop", jobs.container(spec, 1))  # one node gets the signal, both exit; a kill after the grace gives 137
    status = jobs.backend.wait(spec.name, BOUND)
    codes = [inspect(jobs.container(spec, node))[0]["State"]["ExitCode"] for node in (0, 1)]
    assert codes == [75, 75], (codes, *jobs.backend.logs(spec.name))
    assert (status.state, status.code) == ("preempted", 75), status
    assert jobs.backend.submit(spec, "replace").created
    jobs.assert_succeeds(spec)
    assert jobs.backend.summary(spec.name)["world_size"] == 2
    starts = jobs.events(spec, "start")
    assert len(starts) >= 4 and all(start["step"] > 0 for start in starts[1:]), starts
    assert weights_digest(jobs.run(spec)) == calm


LIVE = """
import time
from pathlib import Path
import torch
from lockstep import Session

with Session("run", "sync.name=exact", "checkpoint.every_steps=20", "log.every=1") as run:
    model = run.replicate(torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1)))
    run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
    for _ in run.epochs(1):
        for step in run.iterate(range(300)):
            if Path(f"{run.run_dir}.slow").exists():
                time.sleep(1)
            x = run.part(torch.randn(24, 8, generator=torch.Generator().manual_seed(step)))
            run.step(lambda x: model(x).square().mean(), x)
"""


@pytest.mark.promise("survivors")
def test_a_rank_and_a_container_are_lost_and_the_others_train_on(jobs: Jobs, tmp_path: Path) -> None:
    """`live: true` replaces a killed rank in its container, and the ranks of a killed container when it restarts."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own/train.py").write_text(LIVE)
    more = {"command": ["python", "train.py"], "code": str(tmp_path / "own")}
    spec, whole = jobs.spec("live", ranks_per_node=2, live=True, **more), jobs.spec("whole", nodes=1, **more)
    slow = jobs.bench.folder / f"{spec.name}.slow"
    slow.touch()
    for job in (spec, whole):
        assert jobs.backend.submit(job).created

    def has_begun() -> bool:
        status = jobs.backend.status(spec.name)
        assert not status.final, (status, *jobs.backend.logs(spec.name))
        return len(jobs.events(spec, "step")) >= 2

    poll(has_begun, BOUND, "steps of all ranks")
    kill = "for p in /proc/[0-9]*; do grep -qs 'LOCAL_RANK=1' $p/environ && kill -KILL ${p#/proc/}; done; true"
    docker("exec", jobs.container(spec, 0), "sh", "-c", kill)
    docker("kill", jobs.container(spec, 1))
    status = jobs.backend.status(spec.name)
    assert status.state == "running" and "node-1 was killed by SIGKILL; the others train on" in status.reason, status
    assert [part.ranks for part in status.ranks] == [[0, 1], [2, 3]]
    assert jobs.backend.submit(spec).restarted == ("node-1",)
    poll(
        lambda: {event["rank"] for event in jobs.events(spec, "rank_joined")} == {1, 2, 3}, BOUND, "all ranks are back"
    )
    slow.unlink()
    for job in (spec, whole):
        jobs.assert_succeeds(job)
    ranks = [event["rank"] for event in jobs.events(spec, "rank_lost")]
    assert sorted(ranks) == [1, 2, 3] and len(jobs.events(spec, "start")) == 1, ranks
    goodput = jobs.backend.status(spec.name).goodput
    assert goodput is not None and goodput["restarts"] == 0, goodput
    weights, undisturbed_weights = (jobs.backend.summary(job.name)["weights_sha256"] for job in (spec, whole))
    assert weights == undisturbed_weights


def test_a_rank_that_takes_too_much_memory_is_named_and_a_time_limit_ends_both_nodes_saved(jobs: Jobs) -> None:
    """Both jobs run at the same time."""
    program = "import time; print('begun', flush=True); x = bytearray(600 << 20); time.sleep(600)"
    limits = {"nodes": 1, "memory": "512Mi", "shm": "64Mi", "max_restarts": 0}
    starved = jobs.spec("starved", command=["python", "-c", program], **limits)
    slow = jobs.smoke("slow", time_limit="20s", overrides={"epochs": 1000})
    for spec in (slow, starved):
        jobs.backend.submit(spec)
    status = jobs.backend.wait(starved.name, BOUND)
    assert (status.state, status.code) == ("failed", 1), status
    assert "OOMKilled, limit 512 MiB" in status.reason and "raise memory" in status.reason, status
    status = jobs.backend.wait(slow.name, BOUND)
    assert (status.state, status.code) == ("timed_out", 124), (status, *jobs.backend.logs(slow.name))


def health(container: str) -> str:
    return str(inspect(container)[0]["State"]["Health"]["Status"])


def assert_a_command_runs_in_a_rank(name: str) -> None:
    """The command has the rank's node and variables, its exit code and a terminal. Without an engine the code is 69."""
    words = [PYTHON, "-c", product.PROGRAM, "exec", "compose", name]
    nodes = set()
    for rank in ("0", "1"):
        command = [*words, "--rank", rank, "--", "sh", "-c", "echo $RANK $(hostname); exit 7"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout.split()[0], done.stderr) == (7, rank, ""), done
        nodes.add(done.stdout.split()[1])
    assert len(nodes) == 2
    command = [*words, "--", "sh", "-c", f"until [ \"$(stty size)\" = '33 77' ]; do sleep 0.05; done; {TRAPS}"]
    with at_a_terminal(command, clean_env(LOCKSTEP_HOME=os.environ["LOCKSTEP_HOME"])) as (process, fd, _):
        until_shown(fd, b"ready", 60)
        os.write(fd, b"\x03")
        assert process.wait(60) == 5
    engine = dict(os.environ, DOCKER_HOST="tcp://127.0.0.1:1")
    done = subprocess.run([*words, "--", "true"], env=engine, capture_output=True, text=True, timeout=120)
    assert done.returncode == 69, done


@pytest.mark.promise("metrics", "exec")
def test_a_job_at_the_command_line_its_health_and_its_closed_root(jobs: Jobs, tmp_path: Path) -> None:
    """A stopped rank is unhealthy. The command runs doctor, submit, exec, logs of a rank, cancel, status."""
    every = {"interval": "1s", "start_period": "1s", "retries": 2, "timeout": "5s"}
    check = {"healthcheck": {**every, "test": ["CMD", "python", "/opt/build/healthcheck.py"]}}
    overrides = {"epochs": 1000, "metrics.stale_seconds": 4}
    patch = {"patch": {"services": {"node-0": check, "node-1": check}}}
    spec = jobs.smoke("typed", overrides=overrides, compose=patch)
    file, name = tmp_path / "job.json", jobs.container(spec, 1)
    file.write_text(json.dumps(spec.plain()))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}

    def lockstep(*words: str) -> tuple[int, str]:
        done = subprocess.run(
            [PYTHON, "-c", product.PROGRAM, *words], capture_output=True, text=True, timeout=90, cwd=tmp_path, env=env
        )
        return done.returncode, done.stdout + done.stderr

    def inside(command: str) -> str:
        return docker("exec", name, "sh", "-c", command, check=False)

    def to_the_rank(signal: str) -> None:
        inside(
            f"for p in /proc/[0-9]*; do grep -qs 'LOCAL_RANK=0' $p/environ && kill -{signal} ${{p#/proc/}}; done; true"
        )

    code, output = lockstep("doctor", "compose", str(file))
    assert code == 0, output
    code, output = lockstep("submit", "compose", str(file))
    assert code == 0 and "submitted" in output, output
    code, output = lockstep("submit", "compose", str(file), "--dry-run")
    assert code == 0 and "would attach" in output, output
    poll(has_saved(jobs, spec, 1), BOUND, "a checkpoint")
    poll(lambda: health(name) == "healthy", BOUND, "health")
    output = inside("touch /opt/x /app/x; cat /proc/1/cmdline | tr '\\0' ' '; grep Cap /proc/1/status")
    assert output.count("Read-only file system") == 2 and "python -m lockstep.training launch" in output, output
    assert all(line.split()[1].strip("0") == "" for line in output.splitlines() if line.startswith("Cap")), output
    assert "NoNewPrivs:\t1" in inside("cat /proc/1/status")
    assert_a_command_runs_in_a_rank(spec.name)
    to_the_rank("STOP")
    poll(lambda: health(name) == "unhealthy", BOUND, "a rank that stands still makes the node unhealthy")
    assert jobs.backend.status(spec.name).ranks[1].reason.startswith("unhealthy")
    to_the_rank("CONT")
    code, output = lockstep("logs", "compose", spec.name, "--rank", "0", "--tail", "5")
    assert '"event": "' in output and "[rank" not in output
    code, output = lockstep("cancel", "compose", spec.name)
    assert code == 0 and "cancelled; its containers had the grace period" in output, output
    code, output = lockstep("status", "compose", spec.name)
    assert code == 2 and "there is no compose job" in output, output
    assert status_of(jobs.run(spec))["code"] == 75


def test_user_code_runs_as_it_was_submitted(jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both nodes run the submitted code despite later edits. A killed submission leaves nothing that the next one runs."""
    folder = tmp_path / "own"
    folder.mkdir()
    program = "import helper, os, lockstep.training; print(helper.WORD, os.getcwd(), flush=True)\n"
    (folder / "train.py").write_text(program)
    (folder / "helper.py").write_text("WORD = 'broken off'\n")
    spec = jobs.spec("code", command=["python", "train.py"], code=str(folder))
    with monkeypatch.context() as patch:
        product.break_off_after_code(patch)
        jobs.backend.submit(spec)
    (folder / "helper.py").write_text("WORD = 'submitted'\n")
    jobs.backend.submit(spec)
    (folder / "helper.py").write_text("WORD = 'edited'\n")
    assert jobs.backend.wait(spec.name, BOUND).state == "succeeded", "\n".join(jobs.backend.logs(spec.name))
    lines = sorted(jobs.backend.logs(spec.name))
    assert [line.split()[:3] for line in lines] == [["[rank", f"{rank}]", "submitted"] for rank in (0, 1)], lines
    assert all("/tmp/lockstep-code-" in line for line in lines)
    volumes = docker("volume", "ls", "--quiet", "--filter", f"label=lockstep/code={spec.name}").split()
    identity = jobs.backend.require(spec.name).plain["code"]["hash"]
    assert volumes == [f"lockstep-{spec.name}-code-{identity[:12]}"]
    assert jobs.backend.drift(spec)[0].startswith("code: ")
    jobs.backend.submit(spec, "replace")
    assert jobs.backend.wait(spec.name, BOUND).state == "succeeded"
    assert all("edited" in line for line in jobs.backend.logs(spec.name))
