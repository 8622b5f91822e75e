"""`launch --live` on several nodes: lost nodes, the events that the others get, replacements, and the end of all.

The nodes are launchers of one machine, each at another address. The ranks are small programs without torch, and the test reads the
ranks' store in their place.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.processes import PYTHON, ROOT, assert_none_inside, clean_env, free_port, kill_inside, poll, state_of
from tests.ranks import of_node
from tests.training.test_live_launch import KILLED, RANK
from tests.warm.gang import Gang, running

pytestmark = pytest.mark.promise("survivors")

LOST_SECONDS = 6


class Node:
    """A launcher with two ranks."""

    def __init__(self, folder: Path, gang: Gang) -> None:
        self.folder, self.gang = folder, gang
        self.pid = gang.processes[0].pid

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> tuple[int, list[str]]:
        """Returns the launcher's exit code and lines. No process is left."""
        done = self.gang.wait(60)
        assert_none_inside(self.folder)
        assert "Traceback" not in done.output, done.output
        return done.code, [line for line in done.output.splitlines() if line.startswith("launch: ")]


class Nodes:
    """One job."""

    def __init__(self, folder: Path, *flags: str, nodes: int = 2) -> None:
        self.folder, self.flags, self.nodes, self.port = folder, flags, nodes, free_port()

    @contextlib.contextmanager
    def node(self, number: int) -> Iterator[Node]:
        own = Path(tempfile.mkdtemp(dir=self.folder))
        words = [
            "-m", "lockstep.training", "launch", "--live", *of_node(number, f"127.0.0.2:{self.port}", 2, self.nodes),
            "--grace", "5", "--lost-seconds", str(LOST_SECONDS), *self.flags,
            "--", PYTHON, "-S", "-X", "utf8", "-c", RANK.replace("['LOCKSTEP_RESTARTS']", "['TORCHELASTIC_RESTART_COUNT'] + '.' + "
            "os.environ.get('LOCKSTEP_REPLACEMENT', '0')"), str(self.folder),
        ]  # fmt: skip
        env = clean_env(PYTHONPATH=str(ROOT), TMPDIR=str(own), LOCKSTEP_SECRET="ours")
        with running([words], env, cwd=own) as gang:
            try:
                yield Node(own, gang)
            finally:
                kill_inside(own)

    @contextlib.contextmanager
    def all(self) -> Iterator[list[Node]]:
        with contextlib.ExitStack() as stack:
            yield [stack.enter_context(self.node(number)) for number in range(self.nodes)]

    def begun(self, rank: int, replacement: int = 0) -> tuple[int, dict[str, str]]:
        """Waits for this rank. Returns its process and its variables."""
        file = self.folder / f"0.{replacement}-{rank}"
        poll(file.exists, what=f"rank {rank}, replacement {replacement}")
        pid, _, env = json.loads(file.read_text())
        return int(pid), env

    def begin(self) -> list[int]:
        """Returns the ranks' processes when all have begun and reported it."""
        reports = [self.begun(rank) for rank in range(2 * self.nodes)]
        env = reports[0][1]
        self.store = TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), None, False, timedelta(seconds=60))
        for rank, (_, own) in enumerate(reports):
            assert (own["RANK"], own["LOCAL_RANK"], own["GROUP_RANK"]) == (str(rank), str(rank % 2), str(rank // 2))
            assert (own["WORLD_SIZE"], own["GROUP_WORLD_SIZE"]) == (str(2 * self.nodes), str(self.nodes))
            self.store.set(f"lockstep/live/ready/{rank}", "1")
        return [pid for pid, _ in reports]

    def remaining(self, generation: int) -> list[int]:
        key = f"lockstep/live/generation/{generation}"
        poll(lambda: self.store.check([key]), what=f"generation {generation}")
        remain: list[int] = json.loads(self.store.get(key))
        return remain

    def how(self, rank: int) -> str:
        return self.store.get(f"lockstep/ended/{rank}").decode()

    def admit(self, *replacements: int) -> int:
        """Prepares the replacements, and asks for them. Returns the generation that admits them."""
        for one in replacements:
            self.store.set(f"lockstep/live/prepared/{one}", "1")
        self.store.set("lockstep/live/admission/1", "1")
        return int(self.store.get("lockstep/live/admission/1/answer"))

    def end(self, *ranks: int, replacement: int = 0, code: int = 0) -> None:
        for rank in ranks:
            hidden = self.folder / ".end"
            hidden.write_text(str(code))
            hidden.rename(self.folder / f"0.{replacement}-{rank}-end")


def test_a_rank_of_another_node_is_lost_and_replaced_there(tmp_path: Path) -> None:
    job = Nodes(tmp_path, "--max-restarts", "1")
    with job.all() as (first, second):
        pids = job.begin()
        os.kill(pids[3], signal.SIGKILL)
        assert job.remaining(1) == [0, 1, 2] and job.how(3) == KILLED
        _, env = job.begun(3, replacement=1)
        assert (env["LOCAL_RANK"], env["GROUP_RANK"]) == ("1", "1")
        generation = job.admit(1)
        assert job.remaining(generation) == [0, 1, 2, 3]
        job.end(0, 1, 2)
        job.end(3, replacement=1)
        assert [node.wait()[0] for node in (first, second)] == [0, 0]


@pytest.mark.parametrize("how", ["crash", "kill", "stop", "term"])
def test_a_node_is_lost_and_another_one_takes_its_seat(how: str, tmp_path: Path) -> None:
    """If only the node's launcher is killed, its ranks end too."""
    job = Nodes(tmp_path, "--max-restarts", "1")
    with job.all() as (first, second):
        pids = job.begin()
        if how == "crash":
            kill_inside(second.folder)
        else:
            second.signal({"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}[how])
        assert job.remaining(1) == [0, 1]
        why = "was told to leave" if how == "term" else f"was not heard of for {LOST_SECONDS} s"
        assert job.how(2) == job.how(3) == f"its node 127.0.0.3 {why}"
        if how == "term":
            assert second.wait()[0] == 75
        elif how == "stop":
            assert {state_of(pid) for pid in pids[2:]} <= {"S", "R"}
            second.signal(signal.SIGCONT)  # it has lost its slot, and joins again
        with job.node(1) if how != "stop" else contextlib.nullcontext(second) as again:
            for rank, replacement in ((2, 1), (3, 2)):
                job.begun(rank, replacement=replacement)
            poll(lambda: not any(map(state_of, pids[2:])), what="the end of those that were lost")
            assert job.remaining(job.admit(1, 2)) == [0, 1, 2, 3]
            job.end(0, 1)
            job.end(2, replacement=1)
            job.end(3, replacement=2)
            assert first.wait()[0] == 0 and again.wait()[0] == 0


@pytest.mark.parametrize(
    ("flag", "signalled", "code"),
    [("--max-restarts=1", (0, 1), 75), ("--max-restarts=1", (0,), 75), ("--min-ranks=3", (1,), 75), ("--max-restarts=1", (), 2)],
    ids=["all get a signal", "the first one gets a signal", "the others cannot do without one", "a rank ends with 2"],
)  # fmt: skip
def test_all_nodes_end_together(flag: str, signalled: tuple[int, ...], code: int, tmp_path: Path) -> None:
    job = Nodes(tmp_path, flag)
    with job.all() as nodes:
        job.begin()
        for number in signalled:
            nodes[number].signal(signal.SIGTERM)
        if not signalled:
            job.end(3, code=2)
        ends = [node.wait() for node in nodes]
    assert [end[0] for end in ends] == [code, code] and "continue" not in str(ends)


def test_two_nodes_that_leave_at_once_are_counted_once(tmp_path: Path) -> None:
    job = Nodes(tmp_path, "--min-ranks", "2", nodes=3)
    with job.all() as (first, *others):
        job.begin()
        first.signal(signal.SIGSTOP)  # so that it sees both at once
        for node in others:
            node.signal(signal.SIGTERM)
        first.signal(signal.SIGCONT)
        assert [node.wait()[0] for node in others] == [75, 75]
        job.end(0, 1)
        assert first.wait()[0] == 0
