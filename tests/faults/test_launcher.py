"""The launcher: gang restarts, final exit codes, no orphans, signals, lines."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.conftest import Undisturbed
from tests.events import assert_adds_up, events, status_of
from tests.processes import LAUNCH, PYTHON, ROOT, Result, clean_env, handles_term, inside, poll, run, started
from tests.runs import Job, assert_same
from tests.warm.gang import python, running


@pytest.mark.promise("restarts", "kill-resume", "fresh")
def test_a_killed_rank_restarts_the_gang_which_does_not_begin_anew(job: Job, undisturbed: Undisturbed) -> None:
    """`--fresh` is meant once, and not at every restart; the weights are those of a calm run."""
    assert job.go(LOCKSTEP_TEST_FATE="1:3:TERM").code == 75
    job.words.append("--fresh")
    once, began = str(job.run_dir.parent / "once"), time.time()
    with job.launched("--max-restarts", "2", LOCKSTEP_TEST_FATE="1:7:KILL", LOCKSTEP_TEST_ONCE=once) as gang:
        result = gang.wait(240)
    assert result.code == 0, result.output
    assert "launch: rank 1 was ended by SIGKILL" in result.output and "waitForInput" not in result.output
    assert [event["attempt"] for event in events(job.run_dir, "start")] == [1, 2]
    assert sorted(path.name for path in job.run_dir.parent.glob("run*")) == ["run", "run.old-1"]
    assert_adds_up(job.run_dir, began)
    assert_same(job.run_dir, undisturbed(2))


BROKEN = """
import runpy, sys
from lockstep.training import config
def load(*_):
    raise BrokenPipeError(32, "Broken pipe")
config.load, sys.argv[1:] = load, ["run", "smoke"]
runpy.run_module("lockstep.training", run_name="__main__", alter_sys=True)
"""


def test_a_connection_that_breaks_in_a_training_is_an_error() -> None:
    """A tracker or a loader may raise it. Exit code 141 means an output without a reader, and would hide the traceback."""
    result = run([PYTHON, "-c", BROKEN], clean_env(PYTHONPATH=str(ROOT)))
    assert result.code == 1 and "BrokenPipeError" in result.output, result.output


END = """
import os, signal, sys, time
counted, mine, ended_code = sys.argv[1:]
with open(counted, "a") as file:
    file.write(os.environ["RANK"])
with open(counted + ".order", "a") as file:
    print(*{"a", "b", "c", "d", "e", "f"}, file=file)
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(ended_code)))
    open(counted + ".ready", "w").close()
    time.sleep(60)
while not os.path.exists(counted + ".ready"):
    time.sleep(0.01)
os.kill(os.getpid(), 9) if mine == "KILL" else sys.exit(int(mine))
"""
"""Rank 1 ends in the given way. The launcher then ends rank 0, which has another code; a line is counted for each start."""


@pytest.mark.promise("restarts")
@pytest.mark.parametrize(
    ("mine", "ended_code", "launch", "code", "starts"),
    [
        ("2", 75, ("--max-restarts", "3"), 2, 1), ("75", 1, ("--max-restarts", "3"), 75, 1),
        ("1", 75, ("--max-restarts", "1"), 1, 2), ("75", 75, ("--exit-codes", "kubernetes", "--max-restarts", "3"), 143, 1),
        ("KILL", 1, ("--exit-codes", "kubernetes", "--max-restarts", "1"), 1, 2),
    ],
)  # fmt: skip
def test_restarts_and_the_code_for_the_cluster(
    mine: str, ended_code: int, launch: tuple[str, ...], code: int, starts: int, tmp_path: Path
) -> None:
    """A failure is restarted until the restarts are used up; codes 2 and 75 never are. The code of the rank that failed first is the
    job's."""
    counted = tmp_path / "starts"
    result = _launched(
        "--ranks", "2", "--grace", "20", *launch, "--", PYTHON, "-c", END, str(counted), mine, str(ended_code)
    )
    assert result.code == code and "Traceback" not in result.output, result.output
    assert counted.read_text().count("1") == starts
    lines = counted.with_suffix(".order").read_text().splitlines()
    orders = {line for line in lines if len(line) == 11}  # a rank may be killed while it writes
    assert len(orders) == 1, f"a set has one order on all ranks and in each start: {orders}"


def _launched(*words: str, cwd: Path = ROOT) -> Result:
    """Runs the launcher, forked. Tests of a launcher's start use a shell."""
    return python("-m", "lockstep.training", "launch", *words, env=clean_env(PYTHONPATH=str(ROOT)), cwd=cwd)


@pytest.mark.promise("bad-input")
def test_the_reason_why_a_program_cannot_be_started_is_printed(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch(0o644)
    for word in ("train.py", "none"):
        result = _launched("--", word, cwd=tmp_path)
        sentence = f"error: launch: {word} is no executable program on PATH"
        assert result.code == 2 and result.output.startswith(sentence) and len(result.output.splitlines()) == 1, (
            result.output
        )


@pytest.mark.promise("named-rank")
def test_the_rank_that_failed_is_named_and_not_those_that_are_ended_for_it() -> None:
    program = "import os, sys, time; os.environ['RANK'] == '1' and sys.exit(9); time.sleep(60)"
    result = _launched("--ranks", "2", "--max-restarts", "1", "--", PYTHON, "-c", program)
    assert result.code == 1 and [line for line in result.output.splitlines() if line.startswith("launch: ")] == [
        "launch: rank 1 ended with exit code 9", "launch: all ranks start again; restarts left after that: 0",
        "launch: rank 1 ended with exit code 9",
    ], result.output  # fmt: skip


@pytest.mark.promise("named-rank", "bad-input")
def test_a_rank_that_is_about_to_report_a_users_error_may_do_so(tmp_path: Path) -> None:
    """All ranks end with 2; the one that reports it is the last, as `UserError` is reported by rank 0 alone."""
    program = (
        f"import os, pathlib, sys, time; pid = pathlib.Path({str(tmp_path)!r}, 'pid')\n"
        "if os.environ['RANK'] == '1':\n"
        "    pid.with_name('new').write_text(str(os.getpid())); os.rename(pid.with_name('new'), pid); sys.exit(2)\n"
        "while not pid.exists() or os.path.exists(f'/proc/{pid.read_text()}'):\n"
        "    time.sleep(0.01)\n"
        "time.sleep(0.5)\n"
        "sys.exit(print('error: what is wrong', file=sys.stderr) or 2)\n"
    )
    result = _launched("--ranks", "2", "--", PYTHON, "-c", program)
    assert (result.code, result.output) == (2, "[rank 0] error: what is wrong\n")


@pytest.mark.promise("restarts")
def test_who_starts_it_may_ignore_the_end_of_children() -> None:
    """A program inherits the ignored SIGCHLD, and then gets no exit code of its children."""
    words = [*LAUNCH, "--ranks", "2", "--", PYTHON, "-S", "-c", "raise SystemExit(3)"]
    program = f"import os, signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv({PYTHON!r}, {words!r})"
    result = run([PYTHON, "-S", "-c", program])
    assert result.code == 1 and "ended with exit code 3" in result.output, result


@pytest.mark.promise("named-rank")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_a_sentence_a_node_and_no_stack(job: Job, rank: int) -> None:
    job.ranks, sentence = 3, f"rank {rank} did not arrive: ended by"
    with job.launched(LOCKSTEP_TEST_FATE=f"{rank}:7:KILL") as gang:
        result = gang.wait(240)
    assert result.code == 1 and f"launch: rank {rank} was ended by SIGKILL" in result.output, result.output
    assert result.output.count(sentence) == result.output.count("step 6: ") == 1 and "frame #" not in result.output, (
        result.output
    )
    status = status_of(job.run_dir)
    assert status["code"] == 1 and f"rank {rank} " in status["reason"], "rank 0 cannot say so where it was killed"
    assert f"launch: step {job.steps()[0]} is saved: the same command resumes there" in result.output, result.output


@pytest.mark.promise("restarts")
@pytest.mark.parametrize("kind", ["a recipe", "a program"])
def test_a_killed_launcher_leaves_no_rank(job: Job, undisturbed: Undisturbed, kind: str) -> None:
    """The launcher is killed. All its ranks end: of a recipe, where one rank is stopped and the other waits for it, and of a program
    that ignores TERM."""
    begun = job.run_dir.parent / "begun"
    fate = {"LOCKSTEP_TEST_FATE": "1:9:STOP", "LOCKSTEP_TEST_ONCE": str(begun)}
    program = (
        f"import signal, time; signal.signal(15, signal.SIG_IGN); open({str(begun)!r}, 'w').close(); time.sleep(600)"
    )
    words = [*LAUNCH, "--ranks", "2", "--grace", "2", "--", PYTHON, "-c", program]
    command = job.command("--grace", "2") if kind == "a recipe" else words
    folder = job.run_dir.parent
    with started(command, job.env(**fate), folder) as launcher:
        poll(begun.exists, 240, "the ranks")
        launcher.kill()
        poll(lambda: not inside(folder), what="the end of the orphans")
    if kind == "a recipe":  # which loses no more than what came after the last checkpoint
        assert job.steps()[0] >= 6 and job.go().code == 0
        assert_same(job.run_dir, undisturbed(2))


def test_any_program_gets_its_words_as_they_are_written_and_its_lines_a_prefix() -> None:
    words = ["$$", "$local_rank", "${local_rank}x", "a$$b", "$", "${", "100 %", "{0}", "a b", ""]
    script = "import json, os, sys; print(json.dumps([os.environ['RANK'], os.environ['WORLD_SIZE'], *sys.argv[1:]]))"
    result = _launched("--ranks", "2", "--", PYTHON, "-c", script, *words)
    expected = [f"[rank {rank}] {json.dumps([str(rank), '2', *words])}" for rank in (0, 1)]
    assert result.code == 0 and sorted(result.output.splitlines()) == expected, result.output


@pytest.mark.promise("signals")
def test_a_signal_before_the_launcher_is_ready_is_not_lost(job: Job) -> None:
    """The signal comes while the launcher imports torch. As root it is PID 1 of a container, where the kernel drops signals without a
    handler. The launcher ends with 75."""
    namespace = ["unshare", "--pid", "--fork", "--mount-proc"] if os.geteuid() == 0 else []
    with started([*namespace, *job.command("--max-restarts", "0")], job.env()) as process:

        def launcher() -> int:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            return int(children[0]) if namespace and children else 0 if namespace else process.pid

        def importing() -> bool:
            """`unshare` blocks TERM, too, until it has become our program."""
            pid = launcher()
            program = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0] if pid else b""
            return program == PYTHON.encode() and handles_term(pid, "SigBlk")

        poll(importing, what="a launcher that imports torch")
        os.kill(launcher(), signal.SIGTERM)
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 75 and "launch: SIGTERM" in output, output


DEAF = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("TERM", flush=True) or os.environ["RANK"] == "2" and sys.exit(75))
open(sys.argv[1] + os.environ["RANK"], "w").close()
time.sleep(120)
"""


@pytest.mark.promise("signals")
def test_ranks_that_do_not_end_are_killed_when_the_grace_is_over(tmp_path: Path) -> None:
    """A program catches the signal and does not end. The launcher kills its ranks before the platform kills the launcher.
    The end of one rank sends the others no second signal."""
    words = ["--ranks", "3", "--grace", "3", "--", PYTHON, "-c", DEAF, str(tmp_path / "rank-")]
    with running([["-m", "lockstep.training", "launch", *words]]) as gang:
        poll(lambda: len(list(tmp_path.glob("rank-*"))) == 3, 240, "all ranks")
        began = time.monotonic()
        gang.send_signal(signal.SIGTERM)
        result = gang.wait(240)
    assert time.monotonic() - began >= 3 and result.code == 75 and result.output.count("TERM") == 3, result.output
    assert "launch: the launcher killed rank 0, 1: the grace of 3 s was over\n" in result.output, result.output
    assert "by hand" not in result.output, result.output


RUN = "from lockstep.jobs.cli.main import main; main()"


def test_a_signal_while_the_ranks_start_reaches_those_that_run(tmp_path: Path) -> None:
    """A program's first rank asks for the end while its launcher starts the second one."""
    program = (
        f"cd {tmp_path}; trap 'sleep 1; touch saved; exit 75' TERM; "
        "[ $RANK = 0 ] && kill -TERM $PPID; while :; do sleep 0.05; done"
    )
    result = run([*LAUNCH, "--ranks", "2", "--grace", "30", "--", "sh", "-c", program])
    assert result.code == 75 and (tmp_path / "saved").exists(), result.output


def test_what_a_launcher_starts_blocks_no_signal() -> None:
    """Nor does the launcher itself, when its ranks run."""
    program = (
        "import os, pathlib\n"
        "for pid in (os.getpid(), os.getppid()):\n"
        "    print(*(line for line in pathlib.Path(f'/proc/{pid}/status').read_text().splitlines() if 'SigBlk' in line))\n"
    )
    result = run([PYTHON, "-c", RUN, "run", "--ranks", "1", "--", PYTHON, "-c", program])
    assert result.code == 0 and result.output == f"SigBlk:\t{0:016x}\n" * 2, result


def test_a_launcher_under_nohup_outlives_its_terminal(job: Job, undisturbed: Undisturbed) -> None:
    pause = job.run_dir.parent / "pause"
    pause.touch()
    fate = {"LOCKSTEP_TEST_FATE": "1:5:WAIT", "LOCKSTEP_TEST_HELD": str(pause)}
    with started(["nohup", *job.command()], job.env(**fate)) as launcher:
        poll(lambda: events(job.run_dir, "checkpoint_written"), what="a checkpoint")
        os.killpg(launcher.pid, signal.SIGHUP)
        pause.unlink()
        output, _ = launcher.communicate(timeout=240)
    assert launcher.returncode == 0, output
    assert len(events(job.run_dir, "start")) == 1
    assert_same(job.run_dir, undisturbed(2))


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


@pytest.mark.promise("restarts")
def test_lines_come_whole_and_at_once_also_into_a_pipe(tmp_path: Path) -> None:
    """The ranks continue after their first lines were read, and write the next line in two pieces."""
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
    rank_lines = sorted(line for line in rest if line.startswith("[rank"))
    assert rank_lines == ["[rank 0] cut off", "[rank 0] one line", "[rank 1] one line"], rest
