"""The launcher: gang restarts, final exit codes, no orphans, nodes that leave and come back, a network that is cut."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.events import events
from tests.faults.harness import Job, assert_same, settings
from tests.processes import PYTHON, clean_env, free_port, poll, run, started
from training import checkpoint
from training.launch import cluster_code, exit_code


def test_a_killed_rank_restarts_the_gang_and_the_weights_are_the_same(job: Job, undisturbed: Any) -> None:
    done = job.go(
        "--max-restarts", "2", LOCKSTEP_TEST_FATE="1:7:KILL", LOCKSTEP_THREADS="1",
        LOCKSTEP_TEST_ONCE=str(job.run_dir.parent / "once"),
    )  # fmt: skip
    assert done.code == 0, done.output
    assert [event["attempt"] for event in events(job.run_dir, "start")] == [1, 2]
    assert_same(job.run_dir, undisturbed[2])


def test_fresh_is_meant_once_and_not_at_every_restart(job: Job, undisturbed: Any) -> None:
    assert job.go(LOCKSTEP_TEST_FATE="1:3:TERM", LOCKSTEP_THREADS="1").code == 75
    job.words.append("--fresh")
    once = str(job.run_dir.parent / "once")
    done = job.go(
        "--max-restarts", "2", LOCKSTEP_TEST_FATE="1:7:KILL", LOCKSTEP_THREADS="1", LOCKSTEP_TEST_ONCE=once
    )  # fmt: skip
    assert done.code == 0, done.output
    assert [event["attempt"] for event in events(job.run_dir, "start")] == [1, 2]
    assert [path.name for path in job.run_dir.parent.glob("run*")] == ["run", "run.old-1"] or not (
        job.run_dir.parent / "run.old-2"
    ).exists()
    assert_same(job.run_dir, undisturbed[2])


def test_restarts_end(job: Job) -> None:
    done = job.go("--max-restarts", "1", LOCKSTEP_TEST_FATE="0:1:KILL", LOCKSTEP_THREADS="1")
    assert done.code == 1
    assert len(events(job.run_dir, "start")) == 2


@pytest.mark.parametrize(("what", "code"), [("EXIT2", 2), ("TERM", 75)])
def test_a_final_ending_is_not_restarted(job: Job, what: str, code: int) -> None:
    done = job.go("--max-restarts", "3", LOCKSTEP_TEST_FATE=f"1:5:{what}", LOCKSTEP_THREADS="1")
    assert done.code == code, done.output
    assert len(events(job.run_dir, "start")) == 1


@pytest.mark.parametrize(("what", "code"), [("EXIT2", 2), ("TERM", 143), ("KILL", 1)])
def test_what_kubernetes_sees(job: Job, what: str, code: int) -> None:
    """A crash is restarted within the pod until the restarts are used up; `tests/kubernetes` replaces pods, too."""
    restarts = ("--max-restarts", "0" if what != "KILL" else "1")
    fate = "0:1" if what == "KILL" else "1:5"
    done = job.go(*restarts, "--exit-codes", "kubernetes", LOCKSTEP_TEST_FATE=f"{fate}:{what}", LOCKSTEP_THREADS="1")
    assert done.code == code, done.output


def test_exit_codes_of_the_cluster_schemes() -> None:
    assert [cluster_code(code, "plain", 0, 3) for code in (0, 1, 2, 75)] == [0, 1, 2, 75]
    assert [cluster_code(code, "kubernetes", 0, 3) for code in (0, 1, 2, 75)] == [0, 138, 2, 143]
    assert [cluster_code(1, "kubernetes", attempt, 2) for attempt in range(4)] == [138, 138, 1, 1]
    assert exit_code.__doc__


def test_a_killed_launcher_leaves_no_orphan_and_loses_nothing(job: Job, undisturbed: Any) -> None:
    job.words += ["epochs=200"]
    with started(job.command(), job.env(LOCKSTEP_THREADS="1")) as launcher:
        poll(lambda: events(job.run_dir, "checkpoint_written"), what="a checkpoint")
        launcher.kill()
        poll(lambda: not job.pids(), 40, "the end of the orphans")
    assert json.loads((job.run_dir / "status.json").read_text())["code"] == 75
    job.words.pop()
    assert job.steps()


def test_the_launcher_runs_any_program_and_prefixes_its_lines() -> None:
    script = "import os; print('I am', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
    done = run([PYTHON, "-m", "training", "launch", "--ranks", "3", "--", PYTHON, "-c", script], clean_env())
    assert done.code == 0, done.output
    assert sorted(done.output.splitlines()) == [f"[rank {rank}] I am {rank} of 3" for rank in range(3)]


def _blocks_term(pid: int) -> bool:
    mask = re.search(r"^SigBlk:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    return mask is not None and bool(int(mask[1], 16) >> (signal.SIGTERM - 1) & 1)


def test_a_signal_before_the_launcher_is_ready_is_not_lost(job: Job) -> None:
    """While it imports torch; as PID 1 of a container, where there may be one: the kernel drops what has no handler."""
    inside = ["unshare", "--pid", "--fork", "--mount-proc"] if os.geteuid() == 0 else []
    with started([*inside, *job.command("--max-restarts", "0")], job.env()) as process:

        def launcher() -> int:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            return int(children[0]) if inside and children else 0 if inside else process.pid

        poll(lambda: launcher() and _blocks_term(launcher()), what="a launcher that imports torch")
        os.kill(launcher(), signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 75 and "launch: SIGTERM before the ranks had begun" in output, output


def test_a_launcher_under_nohup_outlives_its_terminal(job: Job, undisturbed: Any) -> None:
    with started(["nohup", *job.command()], job.env(LOCKSTEP_THREADS="1", LOCKSTEP_TEST_PACE="0.1")) as launcher:
        poll(lambda: events(job.run_dir, "checkpoint_written"), what="a checkpoint")
        os.killpg(launcher.pid, signal.SIGHUP)
        output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, output
    assert len(events(job.run_dir, "start")) == 1
    assert_same(job.run_dir, undisturbed[2])


USR1 = """
import os, pathlib, signal, sys, time
folder = pathlib.Path({folder!r})
signal.signal(signal.SIGUSR1, lambda *_: (folder / "heard").touch())
if (folder / "heard").exists():
    sys.exit(0)
(folder / "ready").touch()
while not (folder / "heard").exists():
    time.sleep(0.02)
sys.exit(9)
"""


def test_a_program_may_use_usr1_for_itself_and_is_restarted_all_the_same(tmp_path: Path) -> None:
    program = USR1.format(folder=str(tmp_path))
    command = [PYTHON, "-m", "training", "launch", "--ranks", "1", "--max-restarts", "1", "--", PYTHON, "-c", program]
    with started(command) as launcher:
        poll((tmp_path / "ready").exists, what="a handler")
        launcher.send_signal(signal.SIGUSR1)
        output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, output


PIECES = """
import os, pathlib, time
rank, folder = os.environ["RANK"], pathlib.Path({folder!r})
print("begun", rank, flush=True)
while not (folder / "go-on").exists():
    time.sleep(0.02)
print("one ", end="", flush=True)
time.sleep(1)  # torch's agent looks ten times meanwhile
print("line", flush=True)
(folder / rank).touch()
while not (folder / "0").exists() or not (folder / "1").exists():
    time.sleep(0.02)
if rank == "0":
    print("cut off", end="", flush=True)
    os.kill(os.getpid(), 9)
time.sleep(60)
"""


def test_lines_come_whole_and_at_once_also_into_a_pipe(tmp_path: Path) -> None:
    """The ranks go on when their first lines were read, and write the next one in two pieces."""
    command = [
        PYTHON,
        "-m",
        "training",
        "launch",
        "--ranks",
        "2",
        "--",
        PYTHON,
        "-c",
        PIECES.format(folder=str(tmp_path)),
    ]
    with started(command) as process:
        assert process.stdout is not None
        bound = threading.Timer(60, process.kill)
        bound.start()
        first = [process.stdout.readline() for _ in range(2)]
        (tmp_path / "go-on").touch()
        rest = process.stdout.read().splitlines()
        bound.cancel()
    assert sorted(first) == ["[rank 0] begun 0\n", "[rank 1] begun 1\n"]
    said = sorted(line for line in rest if line.startswith("[rank"))
    assert said == ["[rank 0] cut off", "[rank 0] one line", "[rank 1] one line"], rest


class Node:
    """One launcher of an elastic job, perhaps inside a network namespace of its own."""

    def __init__(self, job: Job, number: int, port: int, host: str, address: str, namespace: str | None = None) -> None:
        inside = ["ip", "netns", "exec", namespace] if namespace else []
        self.mark = Job(job.run_dir, Path(), 1).mark
        self.command = [
            *inside, PYTHON, "-m", "training", "launch", "--ranks", "1", "--nodes", "1:2", "--max-restarts", "5",
            "--rendezvous", f"{host}:{port}", "--serve" if number == 0 else "--no-serve", "--address", address,
            "--grace", "10", *job.words,
        ]  # fmt: skip
        interface = {"GLOO_SOCKET_IFNAME": f"ls{number}"} if namespace else {}
        self.env = clean_env(LOCKSTEP_TEST_MARK=self.mark, LOCKSTEP_THREADS="1", LOCKSTEP_TEST_PACE="0.06", **interface)

    def crash(self) -> None:
        """As a power cut: every process of the node at once."""
        finder = Job(Path(), Path(), 1)
        finder.mark = self.mark
        for pid in finder.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        poll(lambda: not finder.pids(), 10, "the end of a node")


def _elastic_job(tmp_path: Path, data_root: Path, epochs: int) -> Job:
    return Job(
        tmp_path / "run", data_root, 1, model="tests.nets:Paced", precision="float64", epochs=epochs,
        **{"evaluate.every": 1000, "collective_timeout": 5, "ema.decay": 0},
    )  # fmt: skip


def _worlds(job: Job) -> list[int]:
    return [event["world_size"] for event in events(job.run_dir, "start")]


def _steps(job: Job) -> int:
    return max((event["step"] for event in events(job.run_dir, "checkpoint")), default=0)


def _assert_close_to_one_rank(job: Job, tmp_path: Path, data_root: Path, epochs: int) -> None:
    """No batch statistics: an elastic run ends in the weights of one rank, up to the order of summation."""
    alone = _elastic_job(tmp_path / "alone", data_root, epochs)
    assert alone.go(LOCKSTEP_THREADS="1").code == 0
    final = f"checkpoints/step-{8 * epochs:08d}"
    one, other = (checkpoint.load(j.run_dir / final)["shared"]["model"] for j in (job, alone))
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-9, atol=1e-9)


def test_a_node_leaves_and_comes_back(tmp_path: Path, data_root: Path) -> None:
    epochs = 100
    job = _elastic_job(tmp_path, data_root, epochs)
    port = free_port()
    first, second = (Node(job, number, port, "127.0.0.1", "127.0.0.1") for number in range(2))
    with started(first.command, first.env) as one:
        with started(second.command, second.env):
            poll(lambda: _worlds(job)[-1:] == [2] and _steps(job) >= 4, 90, "two nodes at work")
            second.crash()
        before = _steps(job)
        poll(lambda: _worlds(job)[-1:] == [1] and _steps(job) > before, 90, "the rest to go on")
        with started(second.command, second.env) as again:
            poll(lambda: _worlds(job)[-1:] == [2], 90, "the node to be taken in")
            output = again.communicate(timeout=300)[0]
            assert again.returncode == 0, output
        output = one.communicate(timeout=60)[0]
        assert one.returncode == 0, output
    starts = events(job.run_dir, "start", "resumed")
    assert _worlds(job)[0] in (1, 2) and _worlds(job)[-3:] == [2, 1, 2], starts
    _assert_close_to_one_rank(job, tmp_path, data_root, epochs)


@contextlib.contextmanager
def _two_namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by one cable, 10.213.0.1 and 10.213.0.2."""
    names = (f"lsa{os.getpid()}", f"lsb{os.getpid()}")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    if not shutil.which("ip"):
        _need("iproute2")
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", "ls0", "netns", names[0], "type", "veth", "peer", "name", "ls1", "netns", names[1])
        except subprocess.CalledProcessError as error:
            _need(f"network namespaces and veth ({error.stderr.strip()})")
        for number, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.213.0.{number + 1}/24", "dev", f"ls{number}")
            ip("-n", name, "link", "set", f"ls{number}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _need(what: str) -> None:
    reason = f"needs {what}, and root"
    pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)


def test_a_cut_network_costs_one_node_and_not_the_run(tmp_path: Path, data_root: Path) -> None:
    epochs = 80
    job = _elastic_job(tmp_path, data_root, epochs)
    with _two_namespaces() as names:
        nodes = [
            Node(job, number, 29401, "10.213.0.1", f"10.213.0.{number + 1}", name) for number, name in enumerate(names)
        ]
        with started(nodes[0].command, nodes[0].env) as one, started(nodes[1].command, nodes[1].env) as two:
            poll(lambda: _worlds(job)[-1:] == [2] and _steps(job) >= 4, 90, "two nodes at work")
            subprocess.run(["ip", "-n", names[1], "link", "set", "ls1", "down"], check=True)
            output = one.communicate(timeout=150)[0]
            assert one.returncode == 0, output
            assert _worlds(job)[-1] == 1, output
            nodes[1].crash()
            two.communicate(timeout=20)
    _assert_close_to_one_rank(job, tmp_path, data_root, epochs)


def test_node_local_checkpoints_survive_a_rank_0_that_moved(tmp_path: Path, data_root: Path) -> None:
    """Two nodes with a disk each. Afterwards the second one is node 0, and its own disk is a checkpoint behind."""
    words = settings(data_root, **{"checkpoint.write": "node", "model": "tests.nets:Paced"})

    def both(disks: tuple[str, str], **fate: str) -> list[int]:
        port = free_port()
        commands = [
            [
                PYTHON, "-m", "training", "run", "smoke", "--run-dir", str(tmp_path / disk), *words,
            ]
            for disk in disks
        ]  # fmt: skip
        envs = [
            clean_env(
                RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port), LOCKSTEP_THREADS="1", **fate,
            )
            for rank in range(2)
        ]  # fmt: skip
        with started(commands[0], envs[0]) as one, started(commands[1], envs[1]) as two:
            outputs = [process.communicate(timeout=90)[0] for process in (one, two)]
            assert "Traceback" not in "".join(outputs), outputs
            self_output.append(outputs[0])
            return [one.returncode, two.returncode]

    self_output: list[str] = []
    stop = tmp_path / "a" / "STOP"
    stop.parent.mkdir()
    stop.touch()
    assert both(("a", "b")) == [75, 75]
    stop.unlink(missing_ok=True)
    newest = checkpoint.candidates(tmp_path / "b" / "checkpoints")[0]
    assert newest.name == checkpoint.candidates(tmp_path / "a" / "checkpoints")[0].name
    shutil.rmtree(newest)  # node b lost its newest one …
    assert both(("b", "a")) == [0, 0]  # … and holds rank 0 now
    step = checkpoint.step_of(newest)
    assert step > 0 and f"Resuming at step {step}" in self_output[-1], self_output[-1]
    finals = [checkpoint.load(tmp_path / disk / "checkpoints" / "step-00000024") for disk in "ab"]
    for name, tensor in finals[0]["shared"]["model"].items():
        assert torch.equal(tensor, finals[1]["shared"]["model"][name])


def test_a_restart_at_another_world_size_through_the_launcher(job: Job) -> None:
    assert job.go(LOCKSTEP_TEST_FATE="1:7:TERM", LOCKSTEP_THREADS="1").code == 75
    job.ranks = 3
    done = job.go(LOCKSTEP_THREADS="1")
    assert done.code == 0 and "3 ranks on cpu" in done.output, done.output
