"""Nodes that meet late, and nodes that end at different times: none leaves before all are done, and waiting is no failure."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import PYTHON, clean_env, free_port, poll, started

QUICK = (
    "import sys; from lockstep.training.launch import agent, rendezvous; rendezvous.SAID_EVERY = 0.3; "
    "sys.exit(agent.main(sys.argv[1:]))"
)


class Nodes:
    """The launchers of one job, each with one rank: a shell program."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder, self.flags, self.port = folder, flags, free_port()
        self.start = ["-m", "lockstep.training", "launch"]

    @contextlib.contextmanager
    def node(self, number: int, program: str, *flags: str, secret: str = "") -> Iterator[subprocess.Popen[str]]:
        words = [
            PYTHON, *self.start, "--ranks", "1", "--nodes", "2", "--rendezvous", f"127.0.0.2:{self.port}",
            "--address", f"127.0.0.{number + 2}", "--serve" if number == 0 else "--no-serve", "--grace", "10", *self.flags, *flags,
            "--", "sh", "-c", f"cd {self.folder}; {program}",
        ]  # fmt: skip
        with started(words, clean_env(LOCKSTEP_SECRET=secret)) as process:
            yield process

    def seen(self, name: str) -> None:
        poll((self.folder / name).exists, 60, name)


def _end(process: subprocess.Popen[str], seconds: float = 60) -> tuple[int, str]:
    output = process.communicate(timeout=seconds)[0]
    return process.returncode, output


WAIT = "while ! test -e go; do sleep 0.05; done; "


def test_a_node_that_is_done_leaves_after_rank_0s_last_line(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    with nodes.node(0, f"touch here; {WAIT} echo the last line") as first, nodes.node(1, "touch done") as second:
        nodes.seen("here")
        nodes.seen("done")
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(1.5)
        (tmp_path / "go").touch()
        code, output = _end(first)
        assert code == 0 and "[rank 0] the last line" in output.splitlines()
        assert _end(second)[0] == 0


@pytest.mark.parametrize("code", [2, 1])
def test_a_late_failure_is_the_exit_code_of_every_node(tmp_path: Path, code: int) -> None:
    nodes = Nodes(tmp_path)
    with nodes.node(0, f"{WAIT} exit {code}") as first, nodes.node(1, "touch done") as second:
        nodes.seen("done")
        (tmp_path / "go").touch()
        assert [_end(first)[0], _end(second)[0]] == [code, code]


@pytest.mark.parametrize("failing", [0, 1])
def test_rank_0s_node_leaves_first_after_a_late_failure_too(tmp_path: Path, failing: int) -> None:
    """A cluster ends the job with the first node that has failed, and takes the others away."""
    nodes = Nodes(tmp_path, "--linger", "600")
    programs = [f"touch done-{number}" for number in range(2)]
    programs[failing] = f"{WAIT} exit 2"
    with nodes.node(0, programs[0]) as first, nodes.node(1, programs[1]) as second:
        nodes.seen(f"done-{1 - failing}")
        (tmp_path / "go").touch()
        assert _end(first)[0] == 2
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(1)
        second.send_signal(signal.SIGTERM)
        assert _end(second, 20)[0] == 2


def test_a_late_failure_that_is_started_again_starts_those_again_that_were_done(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "--max-restarts", "1")
    program = f"test -e failed && exit 0; {WAIT} touch failed; exit 7"
    with nodes.node(0, program) as first, nodes.node(1, "echo run >> runs; touch done") as second:
        nodes.seen("done")
        (tmp_path / "go").touch()
        assert [_end(first)[0], _end(second)[0]] == [0, 0]
    assert (tmp_path / "runs").read_text().split() == ["run", "run"]


def test_a_node_that_waits_for_the_others_end_heeds_a_signal(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    with nodes.node(0, f"{WAIT}") as first, nodes.node(1, "touch done") as second:
        nodes.seen("done")
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(1)
        second.send_signal(signal.SIGTERM)
        code, output = _end(second, 20)
        assert code == 75 and "SIGTERM before all nodes had ended" in output
        (tmp_path / "go").touch()
        assert _end(first, 30)[0] == 0


def test_a_node_that_lingers_heeds_a_signal(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    with nodes.node(0, "true") as first, nodes.node(1, "true", "--linger", "600") as second:
        assert _end(first)[0] == 0
        second.send_signal(signal.SIGTERM)  # as an operator that has seen the first node completed
        assert _end(second, 20)[0] == 0


def test_two_signals_at_once_change_nothing_at_the_end(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    with nodes.node(0, "true") as first, nodes.node(1, "true", "--linger", "600") as second:
        assert _end(first)[0] == 0
        second.send_signal(signal.SIGTERM)
        second.send_signal(signal.SIGHUP)
        code, output = _end(second, 20)
    assert code == 0 and "Traceback" not in output, output


def test_a_program_that_needs_longer_to_save_is_not_cut_off(tmp_path: Path) -> None:
    """The rendezvous goes with its node, and a launcher that loses it ends its ranks."""
    nodes = Nodes(tmp_path)
    quick, slow = ("trap '{}exit 75' TERM; touch here-$RANK; while :; do sleep 0.05; done" for _ in range(2))
    with nodes.node(0, quick.format("")) as first, nodes.node(1, slow.format("sleep 4; touch saved; ")) as second:
        nodes.seen("here-0")
        nodes.seen("here-1")
        for node in (first, second):
            node.send_signal(signal.SIGTERM)
        assert [_end(first)[0], _end(second)[0]] == [75, 75]
    assert (tmp_path / "saved").exists()


def test_a_server_that_no_longer_answers_keeps_no_signal_waiting(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    with nodes.node(0, "touch here; sleep 600") as first, nodes.node(1, "touch done") as second:
        nodes.seen("here")
        nodes.seen("done")
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(1)
        first.send_signal(signal.SIGSTOP)  # as a machine that is gone
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                second.wait(1)
            second.send_signal(signal.SIGTERM)
            assert _end(second, 90)[0] == 75
        finally:
            first.send_signal(signal.SIGCONT)


def test_an_elastic_job_that_may_not_restart_fails_with_the_node_that_is_lost(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "--nodes", "1:2")
    with nodes.node(0, "touch done") as first:
        with nodes.node(1, f"touch here; {WAIT}"):
            nodes.seen("done")
            nodes.seen("here")
        code, output = _end(first, 90)
    assert code == 1 and "a node was lost before it ended" in output


def test_a_final_failure_is_final_on_every_node(tmp_path: Path) -> None:
    """With restarts of its own left, a node that has not failed would be started again for a job that is over."""
    nodes = Nodes(tmp_path, "--exit-codes", "kubernetes", "--max-restarts", "1")
    with nodes.node(0, "echo >> runs; touch done") as first, nodes.node(1, f"{WAIT} exit 7") as second:
        nodes.seen("done")
        (tmp_path / "go").touch()
        assert [_end(first, 15)[0], _end(second, 15)[0]] == [1, 1], "and nobody who saves is waited for"


@pytest.mark.parametrize("endpoint", ["127.0.0.2:99999", "127.0.0.2:abc", "a..b:29400"])
def test_an_endpoint_that_is_none_is_wrong_usage(tmp_path: Path, endpoint: str) -> None:
    for number in (0, 1):
        with Nodes(tmp_path).node(number, "true", "--rendezvous", endpoint) as process:
            code, output = _end(process)
        assert code == 2 and "is not HOST:PORT" in output and "Traceback" not in output, output


def test_the_time_limit_counts_while_the_others_are_looked_for(tmp_path: Path) -> None:
    with Nodes(tmp_path).node(1, "true", "--time-limit", "2", "--join-timeout", "60") as process:
        code, output = _end(process, 40)
    assert code == 124 and "the time limit of 2 s is over" in output


def test_an_elastic_job_goes_on_without_a_node_that_is_lost_at_the_end(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "--nodes", "1:2", "--max-restarts", "1")
    with nodes.node(0, "echo $WORLD_SIZE >> worlds; touch done") as first:
        with nodes.node(1, f"echo $$ > pid; {WAIT}") as second:
            nodes.seen("done")
            nodes.seen("pid")
        second.wait(10)
        assert _end(first, 90)[0] == 0
    assert (tmp_path / "worlds").read_text().split()[-1] == "1"


@pytest.mark.parametrize("number", [0, 1])
def test_nodes_that_are_missing_are_told_and_given_up_once(tmp_path: Path, number: int) -> None:
    counts = tmp_path / "restarts"
    flags = ("--join-timeout", "3", "--exit-codes", "kubernetes", "--max-restarts", "3", "--restarts-dir", str(counts))
    nodes = Nodes(tmp_path)
    nodes.start = ["-c", QUICK]
    with nodes.node(number, "true", *flags) as process:
        code, output = _end(process)
    assert code == 1, "a code of 128 or more has the pod started again"
    said = r"1 of 2 nodes are here, 1 missing: waiting, \d s of 3 s" if number == 0 else r"no answer at 127\S+ yet"
    assert re.search(said, output), output
    assert output.rstrip().endswith("giving up")
    assert list(counts.iterdir()) == [], "it was no failure"


@pytest.mark.parametrize("late", [0, 1])
def test_a_node_may_be_late_without_a_restart(tmp_path: Path, late: int) -> None:
    nodes = Nodes(
        tmp_path, "--exit-codes", "kubernetes", "--max-restarts", "3", "--restarts-dir", str(tmp_path / "counts")
    )
    with nodes.node(1 - late, "touch begun-$RANK") as early:
        poll(lambda: [*tmp_path.glob("counts/*.json")], 60, "the launcher")
        with pytest.raises(subprocess.TimeoutExpired):
            early.wait(2)
        assert [json.loads(file.read_text()) for file in (tmp_path / "counts").iterdir()] == [
            {"used": 0, "running": True}
        ]
        with nodes.node(late, "touch begun-$RANK") as other:
            assert [_end(other)[0], _end(early)[0]] == [0, 0]
    nodes.seen("begun-0")
    nodes.seen("begun-1")


LOOP = """
import os, signal, sys, torch
from lockstep import Session
with Session("run", "checkpoint.every_steps=1") as run:
    model = run.replicate(torch.nn.Linear(2, 2))
    run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    for epoch in run.epochs(1):
        for (x,) in run.batches(torch.utils.data.TensorDataset(torch.ones(16, 2)), 4):
            if run.rank == 1 and run.steps == 2 and not os.path.exists("killed"):
                open("killed", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            run.step(model(x).sum())
"""


def test_a_killed_rank_is_named_on_the_other_node_and_both_start_again(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    nodes = Nodes(tmp_path, "--max-restarts", "1")
    program = f"exec {PYTHON} loop.py"
    with nodes.node(0, program) as first, nodes.node(1, program) as second:
        (code, output), (other, _) = _end(first), _end(second)
    assert code == other == 0, output
    assert "rank 1 did not arrive: ended by SIGKILL, by hand or because the memory was used up (last seen" in output
    assert json.loads((tmp_path / "run/status.json").read_text())["code"] == 0


def test_a_node_with_another_secret_is_refused_and_the_ranks_see_none(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    program = f"touch here-$RANK; test -z $LOCKSTEP_SECRET || exit 3; {WAIT}"
    with nodes.node(0, program, secret="ours") as first:
        with nodes.node(1, program, secret="another") as stranger:
            code, output = _end(stranger)
            assert code == 1 and "set LOCKSTEP_SECRET to the same value on every node" in output, output
        with nodes.node(1, program, secret="ours") as second:
            nodes.seen("here-0")
            nodes.seen("here-1")
            (tmp_path / "go").touch()
            (code, output), (other, _) = _end(first), _end(second)
    assert code == other == 0 and "LOCKSTEP_SECRET" not in output, output


def test_nodes_without_a_secret_say_who_can_disturb_them(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    with nodes.node(0, "true") as first, nodes.node(1, "true") as second:
        (code, output), (other, said) = _end(first), _end(second)
    assert code == other == 0
    assert output.count("warning: LOCKSTEP_SECRET is not set") == 1 and "LOCKSTEP_SECRET" not in said, output
