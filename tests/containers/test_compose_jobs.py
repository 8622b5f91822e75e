"""Jobs of the Compose backend on a real engine: killed, stopped, starved, out of time; what Prometheus and Docker see."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from lockstep.jobs.compose import checks as compose_doctor
from lockstep.jobs.compose.backend import ComposeBackend
from lockstep.jobs.spec.model import JobSpec
from lockstep.training.contract import UserError
from tests.containers.jobs import BOUND, Jobs, assert_same, weights
from tests.engine import docker, inspect, remove_jobs
from tests.processes import ROOT, poll

pytestmark = pytest.mark.containers


@pytest.fixture(scope="module")
def calm(jobs: Jobs) -> dict[str, torch.Tensor]:
    """The final weights of the undisturbed run."""
    spec = jobs.smoke("calm")
    assert jobs.backend.submit(spec).created
    jobs.succeeded(spec)
    assert jobs.backend.summary(spec.name)["world_size"] == 4
    assert [part.ranks for part in jobs.backend.status(spec.name).ranks] == [[0, 1], [2, 3]]
    return weights(jobs.run_directory(spec))


def trained(jobs: Jobs, spec: JobSpec, starts: int) -> Callable[[], bool]:
    """Whether the run has saved in its attempt number `starts`."""
    return lambda: any(event["attempt"] >= starts for event in jobs.events(spec, "checkpoint_written"))


def test_nodes_that_are_killed_come_back_and_the_weights_are_those_of_the_undisturbed_run(
    jobs: Jobs, calm: dict[str, torch.Tensor]
) -> None:
    spec = jobs.smoke("stormy")
    jobs.backend.submit(spec)
    poll(trained(jobs, spec, 1), BOUND, "a checkpoint")
    docker("kill", jobs.container(spec, 1))
    found = jobs.backend.status(spec.name)
    assert found.state == "restarting" and "node-1 was killed by SIGKILL" in found.reason, found
    assert not jobs.backend.submit(spec).created, "the same job again brings the node back"
    poll(trained(jobs, spec, 2), BOUND, "a checkpoint of the second attempt")
    docker("kill", jobs.container(spec, 0))  # rank 0, and the rendezvous with it: the other node soon ends, too

    def over() -> bool:
        found = jobs.backend.status(spec.name)
        if found.state in ("restarting", "failed"):  # what a person does then
            jobs.backend.submit(spec, "replace" if found.final else "attach")
            return False
        return found.final

    poll(over, BOUND, "the end")
    jobs.succeeded(spec)
    starts = jobs.events(spec, "start")
    assert len(starts) >= 3 and all(start["step"] > 0 for start in starts[1:]), starts
    assert_same(weights(jobs.run_directory(spec)), calm)


def test_docker_stop_saves_and_the_next_job_goes_on(jobs: Jobs, calm: dict[str, torch.Tensor]) -> None:
    spec = jobs.smoke("stopped")
    jobs.backend.submit(spec)
    poll(trained(jobs, spec, 1), BOUND, "a checkpoint")
    began = time.monotonic()
    docker("stop", jobs.container(spec, 1))  # one node is told, both leave
    took = time.monotonic() - began
    found = jobs.backend.wait(spec.name, 60)
    codes = [inspect(jobs.container(spec, node))[0]["State"]["ExitCode"] for node in (0, 1)]
    assert codes == [75, 75] and took < spec.grace_seconds, (codes, took, *jobs.backend.logs(spec.name))
    assert (found.state, found.code) == ("preempted", 75), found
    assert jobs.backend.submit(spec, "replace").created
    jobs.succeeded(spec)
    assert jobs.events(spec, "start")[-1]["step"] > 0, "it went on"
    assert_same(weights(jobs.run_directory(spec)), calm)


def test_a_rank_that_takes_too_much_memory_is_named(jobs: Jobs) -> None:
    program = "import time; print('begun', flush=True); x = bytearray(600 << 20); time.sleep(600)"
    spec = jobs.spec(
        "starved",
        command=["python", "-c", program],
        nodes=1,
        ranks_per_node=1,
        memory="512Mi",
        shm="64Mi",
        max_restarts=0,
    )
    jobs.backend.submit(spec)
    found = jobs.backend.wait(spec.name, BOUND)
    assert (found.state, found.code) == ("failed", 1), found
    assert "OOMKilled, limit 512 MiB" in found.reason and "raise memory" in found.reason, found


def test_the_time_limit_ends_both_nodes_saved(jobs: Jobs) -> None:
    spec = jobs.smoke("slow", time_limit="20s", overrides={"epochs": 1000})
    jobs.backend.submit(spec)
    found = jobs.backend.wait(spec.name, BOUND)
    assert (found.state, found.code) == ("timed_out", 124), (found, *jobs.backend.logs(spec.name))


def test_health_and_the_closed_root(jobs: Jobs) -> None:
    check = {
        "interval": "1s",
        "start_period": "1s",
        "retries": 2,
        "timeout": "5s",
        "test": ["CMD", "python", "/opt/build/healthcheck.py"],
    }
    patch = {"services": {"node-0": {"healthcheck": check}}}
    spec = jobs.smoke(
        "health", nodes=1, overrides={"epochs": 1000, "metrics.stale_seconds": 4}, compose={"patch": patch}
    )
    jobs.backend.submit(spec)
    name = jobs.container(spec, 0)

    def health() -> str:
        return str(inspect(name)[0]["State"]["Health"]["Status"])

    poll(lambda: health() == "healthy", 60, "health")
    said = docker(
        "exec",
        name,
        "sh",
        "-c",
        "touch /opt/x /app/x; cat /proc/1/cmdline | tr '\\0' ' '; grep Cap /proc/1/status",
        check=False,
    )
    assert said.count("Read-only file system") == 2 and "python -m lockstep.training launch" in said, said
    assert all(line.split()[1].strip("0") == "" for line in said.splitlines() if line.startswith("Cap")), said
    assert "NoNewPrivs:\t1" in docker("exec", name, "cat", "/proc/1/status")
    docker(
        "exec",
        name,
        "sh",
        "-c",
        "for p in /proc/[0-9]*; do grep -qs 'LOCAL_RANK=1' $p/environ && kill -STOP ${p#/proc/}; done; true",
    )
    poll(lambda: health() == "unhealthy", 60, "a rank that stands still makes the node unhealthy")
    assert jobs.backend.status(spec.name).ranks[0].reason.startswith("unhealthy")
    docker("kill", name)


def cifar10(target: Path, each: int = 400) -> None:
    """Files of CIFAR-10's binary format, with images of noise: a byte of label, then 3 × 32 × 32 bytes."""
    rng = np.random.default_rng(0)
    (target / "cifar-10-batches-bin").mkdir()
    for name in (*(f"data_batch_{index}.bin" for index in range(1, 6)), "test_batch.bin"):
        rows = rng.integers(0, 256, (each, 1 + 3 * 32 * 32), dtype=np.uint8)
        rows[:, 0] = rng.integers(0, 10, each)
        rows.tofile(target / "cifar-10-batches-bin" / name)


def test_shards_that_prepare_has_staged_are_trained_on(jobs: Jobs, tmp_path: Path) -> None:
    """CIFAR-10 lies on a volume; `lockstep prepare` shards it once, two nodes map the shards read-only.

    The raw images are gone by then: only the shards can have been read.
    """
    raw = tmp_path / "raw"
    raw.mkdir(mode=0o755)
    cifar10(raw)
    volume = f"lockstep-test-data-{jobs.suffix}"
    docker("volume", "create", volume)
    try:
        holder = docker("create", "--volume", f"{volume}:/data", jobs.image).strip()
        docker("cp", f"{raw}", f"{holder}:/data/")
        docker("rm", holder)
        job = {
            "name": f"cifar-{jobs.suffix}", "recipe": "bag_of_tricks", "image": jobs.image, "nodes": 2, "ranks_per_node": 2,
            "memory": "3Gi", "shards": "/data/shards", "volumes": [{"claim": volume, "path": "/data", "read_only": True}],
            "overrides": {"data.root": "/data/raw", "model_options": {"width": 0.125}, "epochs": 1,
                          "schedule": [[0, 0], [1, 0.1]], "threads": 1},
        }  # fmt: skip
        jobs.names.add(job["name"])
        file = tmp_path / "job.json"
        file.write_text(json.dumps(job))
        spec = JobSpec.load(file)
        assert jobs.backend.prepare(spec).created
        assert not jobs.backend.prepare(spec).created, "they are there already"
        remover = ("--user", "0", "--volume", f"{volume}:/data", "--entrypoint", "sh")
        left = docker("run", "--rm", *remover, jobs.image, "-c", "rm -r /data/raw && find /data -type f")
        assert left and all(line.startswith("/data/shards/cifar10/") for line in left.split()), left
        jobs.backend.submit(spec)
        jobs.succeeded(spec)
        settings = yaml.safe_load(jobs.read(spec, "run.yaml"))["config"]["data"]
        assert (settings["source"], settings["shards"]) == ("cifar10", "/data/shards/cifar10")
        summary = jobs.backend.summary(spec.name)
        assert summary["steps"] > 0 and summary["world_size"] == 4
        (start,) = jobs.events(spec, "start")[:1]
        assert start["step"] == 0
    finally:
        remove_jobs(job["name"])
        docker("volume", "rm", "--force", volume)


def test_a_command_line_from_submit_to_cancel(jobs: Jobs, tmp_path: Path) -> None:
    """As a person types it: submit, logs of a rank, status, wait, diff, cancel."""
    spec = jobs.smoke("typed", overrides={"epochs": 1000})
    file = tmp_path / "job.json"
    file.write_text(json.dumps(spec.plain()))
    lockstep = [shutil.which("lockstep", path=f"{Path(sys.executable).parent}") or "lockstep"]

    def typed(*words: str, timeout: float = 90) -> tuple[int, str]:
        done = subprocess.run([*lockstep, *words], capture_output=True, text=True, timeout=timeout, cwd=tmp_path)
        return done.returncode, done.stdout + done.stderr

    code, said = typed("doctor", "compose", str(file))
    assert code == 0, said
    code, said = typed("submit", "compose", str(file))
    assert code == 0 and "submitted" in said, said
    poll(lambda: jobs.events(spec, "checkpoint_written"), BOUND, "a checkpoint")
    code, said = typed("wait", "compose", spec.name, "--timeout", "1")
    assert code == 124 and "step" in said, said
    assert typed("diff", "compose", str(file)) == (0, "no difference\n")
    docker("update", "--memory", "1g", "--memory-swap", "1g", jobs.container(spec, 0))
    code, said = typed("diff", "compose", str(file))
    assert code == 1 and "node-0.Memory" in said, said
    code, said = typed("cancel", "compose", spec.name)
    assert code == 0 and "cancelled; the state is saved" in said, said
    code, said = typed("status", "compose", spec.name)
    assert code == 75, said
    code, said = typed("logs", "compose", spec.name, "--rank", "0")
    assert '"event": "checkpoint' in said and "[rank" not in said
    code, said = typed("submit", "compose", str(file))  # it goes on where it was saved
    assert code == 0 and "submitted" in said, said
    poll(lambda: jobs.events(spec, "resumed"), BOUND, "the run that goes on")
    assert typed("cancel", "compose", spec.name)[0] == 0


def test_an_image_of_ours_that_was_not_built_is_pulled_from_nowhere(jobs: Jobs) -> None:
    """And doctor misses what the job would then fail for: the image, or the shards on its volume."""
    claim = f"lockstep-test-shards-{jobs.suffix}"
    values = {
        "name": f"unbuilt-{jobs.suffix}", "recipe": "smoke", "image": "lockstep:never-built", "shards": "/data/shards",
        "volumes": [{"claim": claim, "path": "/data", "read_only": True}],
    }  # fmt: skip
    unbuilt = JobSpec.of(values)
    with pytest.raises(UserError, match="lockstep:never-built is not on this machine: make image-cpu builds"):
        ComposeBackend().submit(unbuilt)
    found = {check.name: check.result for check in compose_doctor.check(unbuilt)}
    assert (found["image"], found["shards"]) == ("missing", "missing"), found
    docker("volume", "create", claim)
    try:
        found = {
            check.name: check.result for check in compose_doctor.check(JobSpec.of({**values, "image": jobs.image}))
        }
        assert (found["image"], found["shards"]) == ("ok", "missing"), found
    finally:
        docker("volume", "rm", claim)


def test_code_of_ones_own_runs_as_it_was_submitted(jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On both nodes, whatever is edited meanwhile; a submission that was killed leaves nothing that the next one would run."""
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path / "home"))
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "train.py").write_text(
        "import helper, os, lockstep.training; print(helper.WORD, os.getcwd(), flush=True)\n"
    )
    (folder / "helper.py").write_text("WORD = 'broken off'\n")
    spec = jobs.spec("code", command=["python", "train.py"], code=str(folder), ranks_per_node=1)
    monkeypatch.setattr(ComposeBackend, "_up", lambda self, spec: self._bring_code(spec))
    jobs.backend.submit(spec)  # killed before the first container was there
    monkeypatch.undo()
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path / "home"))
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


OWN_LOOP = """
import os, pathlib, signal, torch
from lockstep import Session
with Session("elsewhere", config={"at": -1}) as run:
    torch.manual_seed(1)
    model = run.replicate(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 2)))
    run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    data = torch.utils.data.TensorDataset(torch.randn(96, 8), torch.randint(0, 2, (96,)))
    for epoch in run.epochs(3):
        for x, y in run.batches(data, 12):
            once = pathlib.Path(os.environ.get("ONCE", "/nowhere/once"))
            if run.steps == 11 and run.rank == 1 and once.parent.exists() and not once.exists():
                once.touch()
                os.kill(os.getpid(), signal.SIGTERM)
            run.step(torch.nn.functional.cross_entropy(model(x), y))
        run.log(seen=run.steps)
"""


def test_a_loop_of_ones_own_is_signalled_and_ends_in_the_same_bits(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes, a Session in the image, a signal to one rank: 75, saved in the job's folder; submitted again it goes on."""
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path / "home"))
    (tmp_path / "own").mkdir()
    (tmp_path / "own/train.py").write_text(OWN_LOOP)
    own = {
        "command": ["python", "train.py"], "code": str(tmp_path / "own"), "ranks_per_node": 1, "max_restarts": 0,
        "overrides": {"threads": 1, "checkpoint.keep": 50},
    }  # fmt: skip
    undisturbed, disturbed = jobs.spec("own-calm", **own), jobs.spec("own", **own, env={"ONCE": "/runs/once"})
    jobs.backend.submit(undisturbed)
    jobs.succeeded(undisturbed)
    jobs.backend.submit(disturbed)
    assert (found := jobs.backend.wait(disturbed.name, BOUND)).code == 75, (found, *jobs.backend.logs(disturbed.name))
    jobs.backend.submit(disturbed)
    jobs.succeeded(disturbed)
    assert [event["attempt"] for event in jobs.events(disturbed, "resumed")] == [2]
    assert jobs.backend.summary(disturbed.name)["logged"] == {"seen": 24.0}
    assert_same(weights(jobs.run_directory(undisturbed)), weights(jobs.run_directory(disturbed)))


WAITS = "import time; print('begun', flush=True); time.sleep(600)"
TRAPS = "trap 'echo got; exit 5' INT; echo ready; while :; do sleep 0.05; done"
PROGRAM = "import sys; sys.argv[0] = 'lockstep'; from lockstep.jobs.cli.main import main; main()"


def test_a_command_beside_a_rank_hears_signals_and_has_a_terminal(jobs: Jobs) -> None:
    """In an elastic job, whose ranks are looked for: the engine itself passes no signal on without a terminal."""
    elastic = {"min_nodes": 1, "max_nodes": 2}
    spec = jobs.spec("inside", command=["python", "-c", WAITS], ranks_per_node=1, elastic=elastic)
    jobs.backend.submit(spec)
    poll(lambda: sum("begun" in line for line in jobs.backend.logs(spec.name)) == 2, BOUND, "the ranks")
    words = [sys.executable, "-c", PROGRAM, "exec", "compose", spec.name]
    nodes = set()
    for rank in ("0", "1"):
        command = [*words, "--rank", rank, "--", "sh", "-c", "echo $RANK $(hostname); exit 7"]
        done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout.split()[0], done.stderr) == (7, rank, ""), done
        nodes.add(done.stdout.split()[1])
    assert len(nodes) == 2
    process = subprocess.Popen(
        [*words, "--", "sh", "-c", TRAPS], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[0] == b"got\n" and process.returncode == 5
    finally:
        process.kill()
        process.wait()
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
    process = subprocess.Popen(
        [*words, "--", "sh", "-c", f"until [ \"$(stty size)\" = '33 77' ]; do sleep 0.05; done; {TRAPS}"], cwd=ROOT,
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    try:
        shown, deadline = b"", time.monotonic() + 60
        while b"ready" not in shown:
            assert time.monotonic() < deadline, shown
            if select.select([ours], [], [], 0.1)[0]:
                shown += os.read(ours, 1 << 12)
        os.write(ours, b"\x03")
        assert process.wait(60) == 5
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)
    engine = dict(os.environ, DOCKER_HOST="tcp://127.0.0.1:1")
    done = subprocess.run([*words, "--", "true"], cwd=ROOT, env=engine, capture_output=True, timeout=120)
    assert done.returncode == 69, done
