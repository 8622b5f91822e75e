"""The launcher: gang restarts, final exit codes, no orphans, signals, lines."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from lockstep.training.launch.codes import cluster_code, deaths, exit_code, too_early
from tests.conftest import Undisturbed
from tests.events import events
from tests.processes import LAUNCH, PYTHON, ROOT, clean_env, free_port, poll, run, started
from tests.runs import Job, assert_same


def test_a_killed_rank_restarts_the_gang_and_the_weights_are_the_same(job: Job, undisturbed: Undisturbed) -> None:
    done = job.launch(
        "--max-restarts", "2", LOCKSTEP_TEST_FATE="1:7:KILL",
        LOCKSTEP_TEST_ONCE=str(job.run_dir.parent / "once"),
    )  # fmt: skip
    assert done.code == 0, done.output
    assert "launch: rank 1 was ended by SIGKILL" in done.output and "waitForInput" not in done.output
    assert [event["attempt"] for event in events(job.run_dir, "start")] == [1, 2]
    assert_same(job.run_dir, undisturbed(2))


def test_fresh_is_meant_once_and_not_at_every_restart(job: Job, undisturbed: Undisturbed) -> None:
    assert job.go(LOCKSTEP_TEST_FATE="1:3:TERM").code == 75
    job.words.append("--fresh")
    once = str(job.run_dir.parent / "once")
    done = job.launch(
        "--max-restarts", "2", LOCKSTEP_TEST_FATE="1:7:KILL", LOCKSTEP_TEST_ONCE=once
    )  # fmt: skip
    assert done.code == 0, done.output
    assert [event["attempt"] for event in events(job.run_dir, "start")] == [1, 2]
    assert sorted(path.name for path in job.run_dir.parent.glob("run*")) == ["run", "run.old-1"]
    assert_same(job.run_dir, undisturbed(2))


END = "import os, sys; end = sys.argv[1]; os.kill(os.getpid(), 9) if end == 'KILL' else sys.exit(int(end))"
"""A rank that ends as it is told; what the launcher makes of that does not depend on what it has trained."""


def _ends(how: str, counted: Path, *launch: str) -> int:
    """The launcher's exit code for two ranks, of which the second one ends like this. A line in `counted` for each start."""
    program = (
        f"import os, sys\nopen({str(counted)!r}, 'a').write(os.environ['RANK'])\n"
        f"if os.environ['RANK'] == '0': import time; time.sleep(60)\n{END}"
    )
    words = ["launch", "--ranks", "2", "--grace", "20", *launch, "--", PYTHON, "-c", program, how]
    done = run([PYTHON, "-m", "lockstep.training", *words])
    assert "Traceback" not in done.output, done.output
    return done.code


@pytest.mark.parametrize(
    ("how", "launch", "code", "starts"),
    [
        ("KILL", ("--max-restarts", "1"), 1, 2), ("2", ("--max-restarts", "3"), 2, 1), ("75", ("--max-restarts", "3"), 75, 1),
        ("2", ("--exit-codes", "kubernetes"), 2, 1), ("75", ("--exit-codes", "kubernetes"), 143, 1),
        ("KILL", ("--exit-codes", "kubernetes", "--max-restarts", "1"), 1, 2),
    ],
)  # fmt: skip
def test_restarts_and_the_code_for_the_cluster(
    how: str, launch: tuple[str, ...], code: int, starts: int, tmp_path: Path
) -> None:
    """Failures are restarted until the restarts are used up, exit 2 and 75 never; `tests/kubernetes` replaces pods, too."""
    assert _ends(how, tmp_path / "starts", *launch) == code
    assert (tmp_path / "starts").read_text().count("1") == starts


def test_exit_codes_of_the_cluster_schemes() -> None:
    assert [cluster_code(code, "plain", 0, 3) for code in (0, 1, 2, 75)] == [0, 1, 2, 75]
    assert [cluster_code(code, "kubernetes", 0, 3) for code in (0, 1, 2, 75)] == [0, 138, 2, 143]
    assert [cluster_code(1, "kubernetes", attempt, 2) for attempt in range(4)] == [138, 138, 1, 1]


def _ended(codes: dict[int, int]) -> RunResult:
    """What the agent finds when these ranks have failed, each with its exit code."""
    failures = {rank: ProcessFailure(rank, pid=0, exitcode=code, error_file="") for rank, code in codes.items()}
    return RunResult(state=WorkerState.FAILED if codes else WorkerState.SUCCEEDED, failures=failures)


def test_several_endings_are_one_code() -> None:
    """Wrong usage beats preempted beats failed."""
    endings = ((), (1,), (-9, 75), (75, 2, 1), (-11,))
    assert [exit_code(_ended(dict(enumerate(codes)))) for codes in endings] == [0, 1, 75, 2, 1]


def test_a_rank_that_a_signal_ended_was_still_importing() -> None:
    """It has saved nothing and lost nothing, so its launcher ends as after a preemption. Only by the signal that it was sent."""
    result = _ended({0: 1, 1: -signal.SIGUSR2})
    found = [too_early(result, number) for number in (signal.SIGUSR2, signal.SIGTERM, None)]
    assert found == ["SIGUSR2", "", ""]


def test_who_was_killed_is_said() -> None:
    result = _ended({0: 1, 1: -9, 2: -15, 3: -11})
    assert deaths(result, signal.SIGTERM) == [
        "rank 1 was ended by SIGKILL, by hand or because the memory was used up", "rank 3 was ended by SIGSEGV",
    ]  # fmt: skip
    assert deaths(result, None, [0, 3], ours=False) == ["rank 0 ended with exit code 1", "rank 3 was ended by SIGSEGV"]
    # The first one failed when its launcher was about to look: then the agent's signals are known by themselves.
    assert [line.split()[1] for line in deaths(result, None, ours=False)] == ["0", "1", "3"]
    killed = _ended({1: -9, 2: -15})
    assert [line.split()[1] for line in deaths(killed, None)] == ["1", "2"], "one of them, and nobody knows which"
    assert not deaths(_ended({0: 75, 1: 2}), None, [0, 1], ours=False)


@pytest.mark.parametrize(
    ("name", "mode", "word", "told"),
    [
        ("exe.sh", 0o755, "exe.sh", "exe.sh is in this folder, and not on PATH: write ./exe.sh"),
        ("train.py", 0o644, "train.py", "train.py is not executable: put its interpreter before it, as in -- python train.py"),
        ("train.py", 0o644, "none", "there is no program 'none'"),
    ],
)  # fmt: skip
def test_why_a_program_cannot_be_started_is_said(tmp_path: Path, name: str, mode: int, word: str, told: str) -> None:
    (tmp_path / name).touch(mode)
    done = run([PYTHON, "-m", "lockstep.training", "launch", "--", word], clean_env(PYTHONPATH=str(ROOT)), 60, tmp_path)
    assert done.code == 2 and f"error: launch: {told}" in done.output, done.output


def test_the_rank_that_failed_is_named_and_not_those_that_are_ended_for_it() -> None:
    program = "import os, sys, time; os.environ['RANK'] == '1' and sys.exit(9); time.sleep(60)"
    words = ["launch", "--ranks", "2", "--max-restarts", "1", "--", PYTHON, "-c", program]
    done = run([PYTHON, "-m", "lockstep.training", *words], clean_env())
    assert done.code == 1 and [line for line in done.output.splitlines() if line.startswith("launch: ")] == [
        "launch: rank 1 ended with exit code 9", "launch: all ranks start again; restarts left after that: 0",
        "launch: rank 1 ended with exit code 9",
    ], done.output  # fmt: skip


def test_a_killed_launcher_leaves_no_orphan_and_loses_nothing(job: Job, undisturbed: Undisturbed) -> None:
    held = job.run_dir.parent / "held"
    with started(job.command(), job.env(LOCKSTEP_TEST_FATE="1:9:HOLD", LOCKSTEP_TEST_HELD=str(held))) as launcher:
        poll(held.exists, what="rank 1 in its ninth pass")
        launcher.kill()
        poll(lambda: not job.pids(), 40, "the end of the orphans")
    assert json.loads((job.run_dir / "status.json").read_text())["code"] == 75
    assert job.steps()[0] >= 8
    assert job.go().code == 0
    assert_same(job.run_dir, undisturbed(2))


def test_what_a_killed_launcher_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    env = clean_env(TMPDIR=str(tmp_path))
    sleeping = ["-c", "import pathlib, time; pathlib.Path('ready').touch(); time.sleep(60)"]
    command = [PYTHON, "-m", "lockstep.training", "launch", "--ranks", "1", "--", PYTHON]

    def folders() -> list[Path]:
        return list(tmp_path.glob("lockstep-*"))

    with started([*command, *sleeping], env, tmp_path) as first:
        poll((tmp_path / "ready").exists, what="a rank")
        (used,) = folders()
        assert run([*command, "-c", "pass"], env, cwd=tmp_path).code == 0
        assert folders() == [used]  # the other one's is in use
        first.kill()
    assert run([*command, "-c", "pass"], env, cwd=tmp_path).code == 0
    assert folders() == []


def test_the_launcher_runs_any_program_and_prefixes_its_lines() -> None:
    script = "import os; print('I am', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
    done = run([PYTHON, "-m", "lockstep.training", "launch", "--ranks", "3", "--", PYTHON, "-c", script], clean_env())
    assert done.code == 0, done.output
    assert sorted(done.output.splitlines()) == [f"[rank {rank}] I am {rank} of 3" for rank in range(3)]


def test_the_words_of_a_program_reach_it_as_they_are_written() -> None:
    words = ["$$", "$local_rank", "${local_rank}x", "a$$b", "$", "${", "100 %", "{0}", "a b", ""]
    script = "import json, sys; print(json.dumps(sys.argv[1:]))"
    command = ["launch", "--ranks", "1", "--no-prefix", "--", PYTHON, "-c", script, *words]
    done = run([PYTHON, "-m", "lockstep.training", *command], clean_env())
    assert done.code == 0 and json.loads(done.output) == words, done.output


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

        def importing() -> bool:
            """`unshare` blocks TERM, too, until it has become our program."""
            pid = launcher()
            program = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0] if pid else b""
            return program == PYTHON.encode() and _blocks_term(pid)

        poll(importing, what="a launcher that imports torch")
        os.kill(launcher(), signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 75 and "launch: SIGTERM before the ranks had started" in output, output


LOCKSTEP = [PYTHON, "-c", "from lockstep.jobs.cli.main import main; main()"]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_before_lockstep_run_is_a_launcher_is_not_lost(job: Job, name: str) -> None:
    """While it reads the recipe: the launcher takes its place, and the signal."""
    with started([*LOCKSTEP, "run", "smoke", "--ranks", "1", *job.words[2:]], job.env()) as process:

        def reading() -> bool:
            return b"lockstep.jobs.cli.main" in Path(f"/proc/{process.pid}/cmdline").read_bytes() and _blocks_term(
                process.pid
            )

        poll(reading, what="a command that holds signals back")
        process.send_signal(signal.Signals[name])
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 75 and f"launch: {name} before the ranks had started" in output, output


@pytest.mark.parametrize("command", [[*LOCKSTEP, "run"], [PYTHON, "-m", "lockstep.training", "launch", "--no-prefix"]])
def test_what_a_launcher_starts_blocks_no_signal(command: list[str]) -> None:
    """Nor does the launcher itself, when its ranks run."""
    program = (
        "import os, pathlib\n"
        "for pid in (os.getpid(), os.getppid()):\n"
        "    print(*(line for line in pathlib.Path(f'/proc/{pid}/status').read_text().splitlines() if 'SigBlk' in line))\n"
    )
    done = run([*command, "--ranks", "1", "--", PYTHON, "-c", program])
    assert done.code == 0 and done.output == f"SigBlk:\t{0:016x}\n" * 2, done


def test_a_launcher_under_nohup_outlives_its_terminal(job: Job, undisturbed: Undisturbed) -> None:
    pause = job.run_dir.parent / "pause"
    pause.touch()
    fate = {"LOCKSTEP_TEST_FATE": "1:5:WAIT", "LOCKSTEP_TEST_HELD": str(pause)}
    with started(["nohup", *job.command()], job.env(**fate)) as launcher:
        poll(lambda: events(job.run_dir, "checkpoint_written"), what="a checkpoint")
        os.killpg(launcher.pid, signal.SIGHUP)
        pause.unlink()
        output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, output
    assert len(events(job.run_dir, "start")) == 1
    assert_same(job.run_dir, undisturbed(2))


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
    command = [*LAUNCH, "--ranks", "1", "--max-restarts", "1", "--", PYTHON, "-c", program]
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
    command = [*LAUNCH, "--ranks", "2", "--", PYTHON, "-c", PIECES.format(folder=str(tmp_path))]
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


def test_a_restart_at_another_world_size_through_the_launcher(job: Job) -> None:
    assert job.launch(LOCKSTEP_TEST_FATE="1:7:TERM").code == 75
    job.ranks = 3
    done = job.launch()
    assert done.code == 0 and "3 ranks on cpu" in done.output, done.output


IMPORTING = """
import pathlib, os
import lockstep
pathlib.Path(os.environ["RANK"]).touch()
import time
time.sleep(60)  # other imports
"""


@pytest.mark.parametrize("launcher", ["launch", "torch.distributed.run"])
def test_a_launcher_that_is_killed_takes_ranks_that_still_import_with_it(launcher: str, tmp_path: Path) -> None:
    """From the first line of ours on, under torchrun, too, which tells its ranks nothing about itself."""
    (tmp_path / "train.py").write_text(IMPORTING)
    mark = Job(tmp_path, tmp_path)
    if launcher == "launch":
        command = [PYTHON, "-m", "lockstep.training", "launch", "--ranks", "2", "--", PYTHON, "train.py"]
    else:
        command = [PYTHON, "-m", launcher, "--nproc-per-node", "2", "--master-port", str(free_port()), "train.py"]
    with started(command, clean_env(LOCKSTEP_TEST_MARK=mark.mark), tmp_path) as process:
        poll(lambda: all((tmp_path / rank).exists() for rank in "01"), what="two ranks that import")
        process.kill()
        process.wait(10)
        poll(lambda: not mark.pids(), 5, "the end of the ranks")


def test_a_recipe_whose_torchrun_is_killed_ends_when_it_has_imported(job: Job) -> None:
    """It holds signals back until then, and does not begin to wait for its peers after that."""
    command = [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    with started([*command, "-m", "lockstep.training", *job.words], job.env()) as process:
        poll(
            lambda: all(_blocks_term(pid) for rank in (0, 1) if (pid := job.rank_pid(rank) or os.getpid())),
            what="ranks",
        )
        process.kill()
        output, _ = process.communicate(timeout=60)  # the ranks write there until they end
        poll(lambda: not job.pids(), 10, "the end of the ranks")
    assert output.count("SIGTERM before the ranks were connected") == 2, output


def test_a_rank_whose_torchrun_died_before_its_first_line_ends(tmp_path: Path) -> None:
    """Its parent is init then, which is no torchrun."""
    marks = {"TORCHELASTIC_RUN_ID": "gone", "RANK": "0"}
    program = "import os, time\nwhile os.getppid() == PARENT: time.sleep(0.01)\nimport lockstep\nopen('alive', 'w')\ntime.sleep(60)"
    parent = f"import os, subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {program!r}.replace('PARENT', str(os.getpid()))], " \
             f"env=os.environ | {marks!r})"  # fmt: skip
    mark = Job(tmp_path, tmp_path)
    assert run([PYTHON, "-c", parent], clean_env(LOCKSTEP_TEST_MARK=mark.mark), cwd=tmp_path).code == 0
    try:
        poll(lambda: not mark.pids(), 10, "the end of the rank")
    finally:
        mark.assert_gone()
    assert not (tmp_path / "alive").exists()
