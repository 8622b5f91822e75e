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
from tests.events import weights_digest
from tests.processes import PYTHON, ROOT, clean_env, poll
from tests.product import JobSpec
from tests.terminal import at_a_terminal, until_shown

pytestmark = [pytest.mark.containers, pytest.mark.promise("compose")]


LOCKSTEP = [PYTHON, "-c", product.PROGRAM]


@pytest.fixture(scope="module")
def calm(jobs: Jobs) -> str:
    """The final weights of one container of four ranks. The same image: bits depend on torch's build."""
    settings = [f"{name}={value}" for name, value in SHORT.items()]
    words = ["--ranks", "4", "run", "smoke", "--run-dir", "/runs/calm", "--set", *settings]
    volume = f"{jobs.bench.claim}:/runs"
    docker("run", "--rm", "--shm-size", "256m", "--volume", volume, jobs.image, *words, timeout=BOUND)
    return weights_digest(jobs.bench.folder / "calm")


def saved(jobs: Jobs, spec: JobSpec, starts: int) -> Callable[[], bool]:
    """Whether the run has started so often, and has saved since then."""

    def has() -> bool:
        begun = [event["attempt"] for event in jobs.events(spec, "start")]
        written = {event["attempt"] for event in jobs.events(spec, "checkpoint_written")}
        return len(begun) >= starts and begun[-1] in written

    return has


@pytest.mark.promise("images")
def test_nodes_are_killed_and_stopped_and_the_weights_are_those_of_one_container(jobs: Jobs, calm: str) -> None:
    """A killed node comes back when the job is submitted again. `docker stop` ends both saved, and the next job resumes."""
    spec = jobs.smoke("stormy")
    assert jobs.backend.submit(spec).created
    poll(saved(jobs, spec, 1), BOUND, "a checkpoint")
    docker("kill", jobs.container(spec, 1))
    found = jobs.backend.status(spec.name)
    assert found.state == "restarting" and "node-1 was killed by SIGKILL" in found.reason, found
    assert [part.ranks for part in found.ranks] == [[0, 1], [2, 3]]
    assert not jobs.backend.submit(spec).created, "the same job again brings the node back"
    poll(saved(jobs, spec, 2), BOUND, "a checkpoint of the second start")
    docker("kill", jobs.container(spec, 0))  # rank 0, and the rendezvous with it: the other node soon ends, too

    def trains_again() -> bool:
        found = jobs.backend.status(spec.name)
        assert found.state != "succeeded", found
        if found.state in ("restarting", "failed"):  # what a person does then
            jobs.backend.submit(spec, "replace" if found.final else "attach")
        return saved(jobs, spec, 3)()

    poll(trains_again, BOUND, "a checkpoint of the third start")
    docker("stop", jobs.container(spec, 1))  # one node gets the signal, both leave; a kill after its grace gives 137
    found = jobs.backend.wait(spec.name, BOUND)
    codes = [inspect(jobs.container(spec, node))[0]["State"]["ExitCode"] for node in (0, 1)]
    assert codes == [75, 75], (codes, *jobs.backend.logs(spec.name))
    assert (found.state, found.code) == ("preempted", 75), found
    assert jobs.backend.submit(spec, "replace").created
    jobs.succeeded(spec)
    assert jobs.backend.summary(spec.name)["world_size"] == 4
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
    """`live: true`: a killed rank is replaced in its container, and the ranks of a killed container when that one is back."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own/train.py").write_text(LIVE)
    more = {"command": ["python", "train.py"], "code": str(tmp_path / "own")}
    spec, whole = jobs.spec("live", live=True, **more), jobs.spec("whole", nodes=1, ranks_per_node=1, **more)
    slow = jobs.bench.folder / f"{spec.name}.slow"
    slow.touch()
    for each in (spec, whole):
        assert jobs.backend.submit(each).created

    def begun() -> bool:
        found = jobs.backend.status(spec.name)
        assert not found.final, (found, *jobs.backend.logs(spec.name))
        return len(jobs.events(spec, "step")) >= 2

    poll(begun, BOUND, "steps of all ranks")
    kill = "for p in /proc/[0-9]*; do grep -qs 'LOCAL_RANK=1' $p/environ && kill -KILL ${p#/proc/}; done; true"
    docker("exec", jobs.container(spec, 0), "sh", "-c", kill)
    docker("kill", jobs.container(spec, 1))
    found = jobs.backend.status(spec.name)
    assert found.state == "running" and "node-1 was killed by SIGKILL; the others train on" in found.reason, found
    assert jobs.backend.submit(spec).restarted == ("node-1",)
    poll(
        lambda: {event["rank"] for event in jobs.events(spec, "rank_joined")} == {1, 2, 3}, BOUND, "all ranks are back"
    )
    slow.unlink()
    for each in (spec, whole):
        jobs.succeeded(each)
    lost = [event["rank"] for event in jobs.events(spec, "rank_lost")]
    assert sorted(lost) == [1, 2, 3] and len(jobs.events(spec, "start")) == 1, lost
    goodput = jobs.backend.status(spec.name).goodput
    assert goodput is not None and goodput["restarts"] == 0, goodput
    ours, undisturbed = (jobs.backend.summary(each.name)["weights_sha256"] for each in (spec, whole))
    assert ours == undisturbed


def test_a_rank_that_takes_too_much_memory_is_named_and_a_time_limit_ends_both_nodes_saved(jobs: Jobs) -> None:
    """Two jobs side by side."""
    program = "import time; print('begun', flush=True); x = bytearray(600 << 20); time.sleep(600)"
    limits = {"nodes": 1, "ranks_per_node": 1, "memory": "512Mi", "shm": "64Mi", "max_restarts": 0}
    starved = jobs.spec("starved", command=["python", "-c", program], **limits)
    slow = jobs.smoke("slow", time_limit="20s", ranks_per_node=1, overrides={"epochs": 1000})
    for spec in (slow, starved):
        jobs.backend.submit(spec)
    found = jobs.backend.wait(starved.name, BOUND)
    assert (found.state, found.code) == ("failed", 1), found
    assert "OOMKilled, limit 512 MiB" in found.reason and "raise memory" in found.reason, found
    found = jobs.backend.wait(slow.name, BOUND)
    assert (found.state, found.code) == ("timed_out", 124), (found, *jobs.backend.logs(slow.name))


def health(container: str) -> str:
    return str(inspect(container)[0]["State"]["Health"]["Status"])


@pytest.mark.promise("metrics")
def test_a_job_at_the_command_line_its_health_and_its_closed_root(jobs: Jobs, tmp_path: Path) -> None:
    """As a person types it: doctor, submit, diff, logs of a rank, cancel, status. A rank that stands still is unhealthy."""
    every = {"interval": "1s", "start_period": "1s", "retries": 2, "timeout": "5s"}
    check = {"healthcheck": {**every, "test": ["CMD", "python", "/opt/build/healthcheck.py"]}}
    overrides = {"epochs": 1000, "metrics.stale_seconds": 4}
    patch = {"patch": {"services": {"node-0": check, "node-1": check}}}
    spec = jobs.smoke("typed", ranks_per_node=1, overrides=overrides, compose=patch)
    file, name = tmp_path / "job.json", jobs.container(spec, 1)
    file.write_text(json.dumps(spec.plain()))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}

    def typed(*words: str) -> tuple[int, str]:
        done = subprocess.run([*LOCKSTEP, *words], capture_output=True, text=True, timeout=90, cwd=tmp_path, env=env)
        return done.returncode, done.stdout + done.stderr

    def inside(command: str) -> str:
        return docker("exec", name, "sh", "-c", command, check=False)

    def to_the_rank(signal: str) -> None:
        inside(
            f"for p in /proc/[0-9]*; do grep -qs 'LOCAL_RANK=0' $p/environ && kill -{signal} ${{p#/proc/}}; done; true"
        )

    code, output = typed("doctor", "compose", str(file))
    assert code == 0, output
    code, output = typed("submit", "compose", str(file))
    assert code == 0 and "submitted" in output, output
    code, output = typed("submit", "compose", str(file), "--dry-run")
    assert code == 0 and "would attach" in output, output
    poll(saved(jobs, spec, 1), BOUND, "a checkpoint")
    poll(lambda: health(name) == "healthy", BOUND, "health")
    output = inside("touch /opt/x /app/x; cat /proc/1/cmdline | tr '\\0' ' '; grep Cap /proc/1/status")
    assert output.count("Read-only file system") == 2 and "python -m lockstep.training launch" in output, output
    assert all(line.split()[1].strip("0") == "" for line in output.splitlines() if line.startswith("Cap")), output
    assert "NoNewPrivs:\t1" in inside("cat /proc/1/status")
    to_the_rank("STOP")
    poll(lambda: health(name) == "unhealthy", BOUND, "a rank that stands still makes the node unhealthy")
    assert jobs.backend.status(spec.name).ranks[1].reason.startswith("unhealthy")
    to_the_rank("CONT")
    code, output = typed("logs", "compose", spec.name, "--rank", "0", "--tail", "5")
    assert '"event": "' in output and "[rank" not in output
    code, output = typed("cancel", "compose", spec.name)
    assert code == 0 and "cancelled; its containers had the grace period" in output, output
    code, output = typed("status", "compose", spec.name)
    assert code == 2 and "there is no compose job" in output, output
    assert json.loads((jobs.run(spec) / "status.json").read_text())["code"] == 75


def test_code_of_ones_own_runs_as_it_was_submitted(jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On both nodes, whatever is edited meanwhile; a submission that was killed leaves nothing that the next one would run."""
    folder = tmp_path / "own"
    folder.mkdir()
    program = "import helper, os, lockstep.training; print(helper.WORD, os.getcwd(), flush=True)\n"
    (folder / "train.py").write_text(program)
    (folder / "helper.py").write_text("WORD = 'broken off'\n")
    spec = jobs.spec("code", command=["python", "train.py"], code=str(folder), ranks_per_node=1)
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


WAITS = "import time; print('begun', flush=True); time.sleep(600)"
TRAPS = "trap 'echo got; exit 5' INT; echo ready; while :; do sleep 0.05; done"


@pytest.mark.promise("exec")
def test_a_command_in_a_rank_has_a_terminal(jobs: Jobs) -> None:
    spec = jobs.spec("inside", command=["python", "-c", WAITS], ranks_per_node=1)
    jobs.backend.submit(spec)
    poll(lambda: sum("begun" in line for line in jobs.backend.logs(spec.name)) == 2, BOUND, "the ranks")
    words = [*LOCKSTEP, "exec", "compose", spec.name]
    nodes = set()
    for rank in ("0", "1"):
        command = [*words, "--rank", rank, "--", "sh", "-c", "echo $RANK $(hostname); exit 7"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout.split()[0], done.stderr) == (7, rank, ""), done
        nodes.add(done.stdout.split()[1])
    assert len(nodes) == 2
    command = [*words, "--", "sh", "-c", f"until [ \"$(stty size)\" = '33 77' ]; do sleep 0.05; done; {TRAPS}"]
    with at_a_terminal(command, clean_env(LOCKSTEP_HOME=os.environ["LOCKSTEP_HOME"])) as (process, ours, _):
        until_shown(ours, b"ready", 60)
        os.write(ours, b"\x03")
        assert process.wait(60) == 5
    engine = dict(os.environ, DOCKER_HOST="tcp://127.0.0.1:1")
    done = subprocess.run([*words, "--", "true"], env=engine, capture_output=True, text=True, timeout=120)
    assert done.returncode == 69, done
