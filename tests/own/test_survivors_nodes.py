"""`launch --live` on two nodes, each in a network namespace: ranks and nodes are lost, cut off and signalled, and
rejoin. The weights are those of an undisturbed run. Real processes, a real cable."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from tests.events import status_of, weights_digest
from tests.faults.test_launcher_nodes import two_namespaces
from tests.own.test_survivors import BOUND, JOB, hashes, undisturbed
from tests.processes import PYTHON, assert_none_inside, clean_env, kill_inside, poll, ranks_of
from tests.ranks import live, of_node

LOST_SECONDS = 4
_OF_RANKS = {"kill": signal.SIGKILL, "term rank": signal.SIGTERM}
FAULTS = ("kill", "kill", "kill", "term rank", "crash", "launcher", "stop launcher", "cut", "term")


class Node:
    """A launcher of two ranks."""

    def __init__(self, number: int, namespace: str, run_dir: Path, times: int, stack: contextlib.ExitStack) -> None:
        self.number, self.namespace = number, namespace
        self.folder = Path(tempfile.mkdtemp(dir=run_dir.parent))
        words = [
            *of_node(number, "10.213.0.1:29500", ranks=2), "--lost-seconds", str(LOST_SECONDS), "--max-restarts", "50", "--grace", "30",
            "--", PYTHON, "-u", str(JOB), str(run_dir), "net", f"config.times={times}",
        ]  # fmt: skip
        env = clean_env(LOCKSTEP_SECRET="ours", GLOO_SOCKET_IFNAME=f"ls{number}")
        self._gang = stack.enter_context(live(*words, env=env, cwd=self.folder, namespace=namespace))
        self.process = self._gang.processes[0]

    def ranks(self) -> dict[int, int]:
        return ranks_of(self.process.pid)

    def text(self) -> str:
        return f"--- node {self.number}, ended with {self.process.poll()}\n{self._gang.text()}"


def lose(node: Node, fault: str, draw: random.Random, cable: str) -> bool:
    """Injects the fault. Returns whether the node's launcher ends."""
    process = node.process
    if fault in _OF_RANKS:
        if ranks := node.ranks():
            with contextlib.suppress(ProcessLookupError):
                os.kill(ranks[draw.choice(sorted(ranks))], _OF_RANKS[fault])
    elif fault == "crash":
        kill_inside(node.folder)
    elif fault == "cut":
        subprocess.run(["ip", "-n", node.namespace, "link", "set", cable, "down"], check=True)
        until = time.monotonic() + draw.choice((0.5, 1.5 * LOST_SECONDS))
        poll(lambda: time.monotonic() > until)
        subprocess.run(["ip", "-n", node.namespace, "link", "set", cable, "up"], check=True)
    else:
        process.send_signal(
            {"launcher": signal.SIGKILL, "stop launcher": signal.SIGSTOP, "term": signal.SIGTERM}[fault]
        )
        if fault == "stop launcher":
            until = time.monotonic() + draw.choice((0.5, 1.5 * LOST_SECONDS))
            poll(lambda: time.monotonic() > until)
            process.send_signal(signal.SIGCONT)
    return fault in ("crash", "launcher", "term")


def check(tmp_path: Path, seed: int, times: int) -> list[str]:
    run_dir, draw, faults, expected = tmp_path / "run", random.Random(seed), list[str](), undisturbed("net", times)
    nodes: list[Node] = []
    with two_namespaces() as names, contextlib.ExitStack() as stack:

        def start(number: int) -> Node:
            nodes.append(Node(number, names[number], run_dir, times, stack))
            return nodes[-1]

        first, second = start(0), start(1)

        def steps() -> int:
            return len(hashes(run_dir))

        def report() -> str:
            return "\n".join([str(faults), *(node.text() for node in nodes)])

        def until(step: int) -> None:
            poll(lambda: steps() >= step or first.process.poll() is not None, BOUND, "the step")

        until(draw.randrange(3, 30))
        for _ in range(draw.choice((1, 2, 3))):
            fault = draw.choice(FAULTS)
            node = first if fault in _OF_RANKS and draw.random() < 0.5 else second
            faults.append(f"{fault} node {node.number} after step {steps()}")
            if lose(node, fault, draw, "ls1"):
                poll(lambda: node.process.poll() is not None, BOUND, f"the end of its launcher: {report()}")
                assert_none_inside(node.folder)
                if draw.random() < 0.7:
                    second = start(1)
                    faults.append("another one comes")
                elif first.process.poll() is None:
                    break
            until(steps() + draw.randrange(1, 60))
        try:
            poll(lambda: first.process.poll() is not None, BOUND, "the end")
            if second.process.poll() is None:
                poll(lambda: second.process.poll() is not None, BOUND, "the end of the other node")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{report()}") from None
        assert first.process.poll() == 0, report()
        assert status_of(run_dir)["code"] == 0, report()
        assert hashes(run_dir) == expected, report()
        assert weights_digest(run_dir) == expected[-1][1], report()
        for node in nodes:
            assert_none_inside(node.folder)
    return faults


@pytest.mark.promise("survivors", "nodes")
@pytest.mark.parametrize("seed", [1])
def test_nodes_are_lost_and_come_anew(seed: int, tmp_path: Path) -> None:
    check(tmp_path, seed, times=3)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(10, 50))
def test_many_seeds_on_two_nodes(seed: int, tmp_path: Path) -> None:
    check(tmp_path, seed, times=6)
