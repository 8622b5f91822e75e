"""Nodes that meet late, and nodes that end at different times: none leaves before all are done, and waiting is no failure."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.events import assert_adds_up, status_of
from tests.processes import PYTHON, clean_env, free_port, poll
from tests.ranks import of_node
from tests.warm.gang import Gang, python, running

pytestmark = pytest.mark.promise("nodes")

WAIT = "while ! test -e go; do sleep 0.05; done; "


class Node:
    """A forked launcher with one rank. `test_launcher` has the tests of a launcher's start."""

    def __init__(self, gang: Gang) -> None:
        self.gang, self.send_signal = gang, gang.send_signal

    def ends(self, seconds: float = 240) -> tuple[int, str]:
        """Returns the exit code and the output."""
        done = self.gang.wait(seconds)
        assert "Traceback" not in done.output, done.output
        return done.code, done.output

    def waits(self, seconds: float = 1) -> None:
        """Asserts that the launcher still runs after so many seconds."""
        with pytest.raises(subprocess.TimeoutExpired):
            self.gang.processes[0].wait(seconds)


class Nodes:
    """The launchers of one job of two nodes."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder, self.flags, self.port = folder, flags, free_port()

    def node(
        self, number: int, program: str, *flags: str, secret: str = "ours"
    ) -> contextlib.AbstractContextManager[Node]:
        """Its rank is a shell program."""
        return self.launcher(number, ["sh", "-c", f"cd {self.folder}; {program}"], *flags, secret=secret)

    @contextlib.contextmanager
    def launcher(
        self, number: int, program: list[str], *flags: str, secret: str = "ours", forked: bool = False
    ) -> Iterator[Node]:
        """
        Args:
            forked: the rank is forked, too.
        """
        words = [
            "-m", "tests.warm.launcher" if forked else "lockstep.training", "launch", *of_node(number, f"127.0.0.2:{self.port}"),
            "--grace", "30", *self.flags, *flags, "--", *program,
        ]  # fmt: skip
        with running([words], clean_env(LOCKSTEP_SECRET=secret)) as gang:
            yield Node(gang)

    @contextlib.contextmanager
    def both(self, first_program: str, second_program: str) -> Iterator[tuple[Node, Node]]:
        with self.node(0, first_program) as first, self.node(1, second_program) as second:
            yield first, second

    def seen(self, *names: str) -> None:
        for name in names:
            poll((self.folder / name).exists, what=name)

    def go(self) -> None:
        (self.folder / "go").touch()


def test_a_node_that_is_done_leaves_after_rank_0s_last_line(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    with nodes.both(f"touch here; {WAIT} echo the last line", "touch done") as (first, second):
        nodes.seen("here", "done")
        second.waits()
        nodes.go()
        code, output = first.ends()
        assert code == 0 and "[rank 0] the last line" in output.splitlines()
        assert second.ends()[0] == 0


def test_the_node_that_has_failed_late_leaves_first(tmp_path: Path) -> None:
    """One node is done, then the other fails. The failed one ends first, so that a cluster names it; the node that is done waits, and
    ends with the same code."""
    nodes = Nodes(tmp_path, "--linger", "600")
    with nodes.both("touch done", f"{WAIT} exit 2") as (waiting, failed):
        nodes.seen("done")
        nodes.go()
        assert failed.ends()[0] == 2
        waiting.waits()
        waiting.send_signal(signal.SIGTERM)
        assert waiting.ends()[0] == 2


def test_a_late_failure_that_is_started_again_starts_those_again_that_were_done(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "--max-restarts", "1")
    program = f"test -e failed && exit 0; {WAIT} touch failed; exit 7"
    with nodes.both(program, "echo run >> runs; touch done") as (first, second):
        nodes.seen("done")
        nodes.go()
        assert [first.ends()[0], second.ends()[0]] == [0, 0]
    assert (tmp_path / "runs").read_text().split() == ["run", "run"]


def test_a_program_that_needs_longer_to_save_is_not_cut_off(tmp_path: Path) -> None:
    """The rendezvous goes with its node, and a launcher that loses it ends its ranks."""
    nodes = Nodes(tmp_path)
    saves = "trap '{}exit 75' TERM; touch here-$RANK; while :; do sleep 0.05; done"
    with nodes.both(saves.format(""), saves.format("sleep 4; touch saved; ")) as (first, second):
        nodes.seen("here-0", "here-1")
        for node in (first, second):
            node.send_signal(signal.SIGTERM)
        assert [first.ends()[0], second.ends()[0]] == [75, 75]
    assert (tmp_path / "saved").exists()


def test_a_signal_to_one_nodes_launcher_ends_the_job(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "--max-restarts", "1")
    program = "trap 'exit 75' TERM; touch here-$RANK; while :; do sleep 0.05; done"
    with nodes.both(program, program) as (first, second):
        nodes.seen("here-0", "here-1")
        second.send_signal(signal.SIGTERM)
        assert [first.ends()[0], second.ends()[0]] == [75, 75]


def test_a_server_that_no_longer_answers_keeps_no_signal_waiting(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    with nodes.both("touch here; sleep 600", "touch done") as (first, second):
        nodes.seen("here", "done")
        second.waits()
        first.send_signal(signal.SIGSTOP)  # as a machine that is gone
        try:
            second.waits()
            second.send_signal(signal.SIGTERM)
            assert second.ends()[0] == 75
        finally:
            first.send_signal(signal.SIGCONT)


def test_an_endpoint_that_is_none_is_wrong_usage(tmp_path: Path) -> None:
    for number, endpoint in enumerate(("127.0.0.2:99999", "a..b:29400")):
        with Nodes(tmp_path).node(number, "true", "--rendezvous", endpoint) as node:
            code, output = node.ends()
        assert code == 2 and "HOST:PORT" in output, output


def test_nodes_that_are_missing_are_given_up_once(tmp_path: Path) -> None:
    counts = tmp_path / "restarts"
    flags = ("--join-timeout", "3", "--exit-codes", "kubernetes", "--max-restarts", "3", "--restarts-dir", str(counts))
    with Nodes(tmp_path).node(1, "true", *flags) as node:
        code, output = node.ends()
    assert code == 1 and output.rstrip().endswith("giving up"), "a code of 128 or more has the pod started again"
    assert not list(counts.glob("*")), "it was no failure"


def test_a_signal_while_nodes_are_missing_ends_those_that_are_here(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "--nodes", "3")
    with nodes.both("true", "true") as (first, second):
        store = TCPStore("127.0.0.2", nodes.port, is_master=False)
        poll(lambda: store.check(["lockstep/nodes/lockstep/report/1"]), what="the second node")
        first.send_signal(signal.SIGTERM)
        code, output = first.ends()
        assert code == 75 and output.rstrip().endswith("launch: SIGTERM before the ranks had started"), output
        assert second.ends()[0] == 75


def test_a_node_may_be_late_without_a_restart(tmp_path: Path) -> None:
    """So may the node that serves, and a node that takes its place."""
    nodes = Nodes(
        tmp_path, "--exit-codes", "kubernetes", "--max-restarts", "3", "--restarts-dir", str(tmp_path / "counts")
    )
    program = f"touch begun-$RANK; {WAIT}"
    with nodes.node(1, program) as early:
        early.waits(2)
        with nodes.node(0, program) as server:
            nodes.seen("begun-0", "begun-1")
        for begun in tmp_path.glob("begun-*"):
            begun.unlink()
        with nodes.node(0, program) as server:
            nodes.seen("begun-0", "begun-1")
            (count,) = (tmp_path / "counts").iterdir()  # of the first node, which counts for all
            assert json.loads(count.read_text()) == {"used": 2}, "one of them if this launcher is killed"
            nodes.go()
            assert [server.ends()[0], early.ends()[0]] == [0, 0]


def test_a_node_whose_ranks_have_ended_stays_at_a_signal_until_all_have(tmp_path: Path) -> None:
    """The ranks of one node have ended when its launcher gets a signal. It passes the signal to the other node, waits for its ranks,
    and ends with their code."""
    program = f"trap 'exit 75' TERM; touch begun-$RANK; {WAIT}"
    nodes = Nodes(tmp_path)
    with nodes.both(program, "touch begun-1") as (first, second):
        nodes.seen("begun-0", "begun-1")
        second.waits(0.5)
        second.send_signal(signal.SIGTERM)
        (code, output), (second_code, second_output) = first.ends(), second.ends()
    assert code == second_code == 75 and "before all nodes had ended" not in second_output, output + second_output


LOOP = """
import os, signal, sys, torch
from lockstep import Session
with Session(f"{sys.argv[1]}/run", "checkpoint.every_steps=1") as run:
    model = run.replicate(torch.nn.Linear(2, 2))
    run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    for epoch in run.epochs(1):
        for (x,) in run.batches(torch.utils.data.TensorDataset(torch.ones(16, 2)), 4):
            if run.rank == 1 and run.steps == 2 and not run.resumed:
                os.kill(os.getpid(), signal.SIGKILL)
            run.step(model(x).sum())
"""


@pytest.mark.promise("named-rank")
def test_a_killed_rank_is_named_on_the_other_node_and_both_start_again(tmp_path: Path) -> None:
    nodes, words = Nodes(tmp_path, "--max-restarts", "1"), [PYTHON, "-c", LOOP, str(tmp_path)]
    assert python("-c", "").code == 0  # what forks is there before a clock runs
    began = time.time()
    with nodes.launcher(0, words, forked=True) as first, nodes.launcher(1, words, forked=True) as second:
        (code, output), (second_code, _) = first.ends(), second.ends()
    assert code == second_code == 0 and "rank 1 did not arrive: ended by SIGKILL" in output, output
    assert_adds_up(tmp_path / "run", began)
    assert status_of(tmp_path / "run")["code"] == 0


@pytest.mark.promise("other-users")
def test_a_node_with_another_secret_is_refused_and_the_ranks_see_none(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    program = f"touch here-$RANK; test -z $LOCKSTEP_SECRET || exit 3; {WAIT}"
    with nodes.node(0, program) as first:
        with nodes.node(1, program, secret="another") as stranger:
            code, output = stranger.ends()
            assert code == 2 and "LOCKSTEP_SECRET" in output, output
        with nodes.node(1, program) as second:
            nodes.seen("here-0", "here-1")
            nodes.go()
            (code, output), (second_code, _) = first.ends(), second.ends()
    assert code == second_code == 0 and "LOCKSTEP_SECRET" not in output, output


def test_nodes_without_a_secret_say_who_can_disturb_them(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    with nodes.node(0, "true", secret="") as first, nodes.node(1, "true", secret="") as second:
        (code, output), (second_code, second_output) = first.ends(), second.ends()
    assert code == second_code == 0
    assert output.count("LOCKSTEP_SECRET is not set") == 1 and "LOCKSTEP_SECRET" not in second_output, output
