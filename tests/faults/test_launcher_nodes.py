"""A job of two nodes whose network is cut: it restarts when the network is back."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Undisturbed
from tests.events import events
from tests.processes import kill_inside, poll, require
from tests.ranks import launching, of_node
from tests.runs import Job, assert_same
from tests.warm.gang import Gang

pytestmark = pytest.mark.promise("nodes")


def _node(job: Job, number: int, namespace: str, **fate: str) -> contextlib.AbstractContextManager[Gang]:
    """One launcher, inside a network namespace."""
    folder = job.run_dir.with_name(f"node-{number}")
    folder.mkdir(exist_ok=True)
    words = [*of_node(number, "10.213.0.1:29401"), "--max-restarts", "5", "--grace", "10", *job.words]
    return launching(*words, env=job.env(**fate, GLOO_SOCKET_IFNAME=f"ls{number}"), cwd=folder, namespace=namespace)


@contextlib.contextmanager
def two_namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by one cable, 10.213.0.1 and 10.213.0.2."""
    names = (f"lsa{os.getpid()}", f"lsb{os.getpid()}")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    require(shutil.which("ip"), "needs iproute2, and root")
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", "ls0", "netns", names[0], "type", "veth", "peer", "name", "ls1", "netns", names[1])
        except subprocess.CalledProcessError as error:
            require(False, f"needs network namespaces and veth ({error.stderr.strip()}), and root")
        for number, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.213.0.{number + 1}/24", "dev", f"ls{number}")
            ip("-n", name, "link", "set", f"ls{number}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_a_node_whose_network_is_cut_ends_its_ranks_and_comes_back(
    tmp_path: Path, data_root: Path, undisturbed: Undisturbed
) -> None:
    """When the cable is plugged in again a new launcher joins."""
    job, held = Job(tmp_path / "run", data_root, 1, collective_timeout=15), tmp_path / "held"
    held.touch()
    fate = {
        "LOCKSTEP_TEST_FATE": "1:9:WAIT",
        "LOCKSTEP_TEST_HELD": str(held),
        "LOCKSTEP_TEST_ONCE": str(tmp_path / "once"),
    }
    with two_namespaces() as names:

        def cable(state: str) -> None:
            subprocess.run(["ip", "-n", names[1], "link", "set", "ls1", state], check=True)

        with _node(job, 0, names[0], **fate) as server:
            with _node(job, 1, names[1], **fate) as cut:
                poll(lambda: events(job.run_dir, "checkpoint_written"), 240, "two nodes at work")
                cable("down")
                poll(lambda: "the ranks of this node end, and it joins again" in cut.text(), 60, "the end of its rank")
                kill_inside(tmp_path / "node-1")
            held.unlink()
            cable("up")
            with _node(job, 1, names[1]) as again:
                assert again.wait(300).code == server.wait(240).code == 0, again.text() + server.text()
    assert [event["world_size"] for event in events(job.run_dir, "start")] == [2, 2]
    assert_same(job.run_dir, undisturbed(2))
