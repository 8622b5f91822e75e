"""`launch --live`: lost ranks, the events that the others get, restarts of all. At the end no process is left.

The ranks are small programs without torch, and the test reads the launcher's store in their place.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.processes import PYTHON, ROOT, assert_none_inside, clean_env, inside, kill_inside, poll, state_of
from tests.warm.gang import Gang, python, running

RANK = """
import json, os, pathlib, signal, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
child = subprocess.Popen(["sleep", "600"])  # has the pipes and sockets, as a loader's worker
mine = folder / f"{os.environ['LOCKSTEP_RESTARTS']}-{os.environ['RANK']}"
(folder / f".{mine.name}").write_text(json.dumps([os.getpid(), child.pid, dict(os.environ)]))
(folder / f".{mine.name}").rename(mine)
print("begun", flush=True)
while not (end := mine.with_name(f"{mine.name}-end")).exists():
    time.sleep(0.01)
os._exit(int(end.read_text()))
"""


class Live:
    """A launcher of such ranks."""

    def __init__(self, gang: Gang, folder: Path, ranks: int) -> None:
        self.gang, self._folder, self._ranks = gang, folder, ranks
        self.launcher = gang.processes[0].pid
        self.begun: list[tuple[int, int]] = []
        """For each rank of this start: its process and a child."""

    def begin(self, start: int = 0, ready: bool = True) -> None:
        """Returns when the ranks of this start have begun, and have reported it if they are to be `ready`."""
        files = [self._folder / f"{start}-{rank}" for rank in range(self._ranks)]
        poll(lambda: all(file.exists() for file in files), what=f"the ranks of start {start}")
        reports = [json.loads(file.read_text()) for file in files]
        self.begun = [(pid, child) for pid, child, _ in reports]
        for rank, (_, _, env) in enumerate(reports):
            assert (env["RANK"], env["LOCAL_RANK"]) == (str(rank), str(rank)) and env["LOCKSTEP_LIVE"].isdigit()
            assert {env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]} == {str(self._ranks)}
        address, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
        self.store = TCPStore(address, port, None, False, timedelta(seconds=60))
        for rank in range(self._ranks) if ready else ():
            self.store.set(f"lockstep/live/ready/{rank}", "1")
        self._start = start

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            os.kill(self.begun[rank][0], signal.SIGKILL)

    def remaining(self, generation: int) -> list[int]:
        """Returns the remaining ranks. No process of a lost rank is left, and the store has its end."""
        key = f"lockstep/live/generation/{generation}"
        poll(lambda: self.store.check([key]), what=f"generation {generation}: {self.gang.text()}")
        remain: list[int] = json.loads(self.store.get(key))
        lost = set(range(self._ranks)) - set(remain)
        gone = [pid for rank in lost for pid in self.begun[rank]]
        poll(
            lambda: not any(state_of(pid) not in ("", "Z") for pid in gone), what="the end of the lost ranks' processes"
        )
        assert self.store.check([f"lockstep/ended/{rank}" for rank in lost])
        return remain

    def end(self, *ranks: int, code: int = 0) -> None:
        """Has ranks end with this code."""
        for rank in ranks:
            hidden = self._folder / ".end"
            hidden.write_text(str(code))
            hidden.rename(self._folder / f"{self._start}-{rank}-end")

    def wait(self) -> tuple[int, list[str]]:
        """Returns the launcher's exit code and lines. No process is left."""
        done = self.gang.wait(240)
        assert_none_inside(self._folder)
        assert not list((self._folder / "tmp").iterdir()) and "Traceback" not in done.output, done.output
        return done.code, [line for line in done.output.splitlines() if line.startswith("launch: ")]


@contextlib.contextmanager
def live(folder: Path, ranks: int, *flags: str, program: str = RANK) -> Iterator[Live]:
    temporary = folder / "tmp"
    temporary.mkdir(parents=True)
    words = ["-m", "lockstep.training", "launch", "--live", "--ranks", str(ranks), "--grace", "5", *flags]
    words += ["--", PYTHON, "-S", "-X", "utf8", "-c", program, str(folder)]
    with running([words], clean_env(PYTHONPATH=str(ROOT), TMPDIR=str(temporary)), cwd=folder) as gang:
        try:
            yield Live(gang, folder, ranks)
        finally:
            kill_inside(folder)


KILLED = "ended by SIGKILL, by hand or because the memory was used up"


def test_the_others_learn_which_ranks_remain(tmp_path: Path) -> None:
    """Ranks are killed one by one, then two at once. The launcher records the remaining ranks after each loss, for the two once."""
    with live(tmp_path, 6) as job:
        job.begin()
        for generation, rank in enumerate((2, 0, 4), 1):
            job.kill(rank)
            assert rank not in job.remaining(generation)
            assert job.store.get(f"lockstep/ended/{rank}").decode() == KILLED
        os.kill(job.launcher, signal.SIGSTOP)
        poll(lambda: state_of(job.launcher) == "T", what="a launcher that stands")
        job.kill(1, 5)
        poll(lambda: {state_of(job.begun[rank][0]) for rank in (1, 5)} == {"Z"}, what="the end of two ranks")
        os.kill(job.launcher, signal.SIGCONT)
        assert job.remaining(4) == [3]
        job.end(3)
        code, lines = job.wait()
    assert code == 0 and lines == [
        *(f"launch: rank {rank} was {KILLED}: {left} of 6 ranks continue" for rank, left in ((2, 5), (0, 4), (4, 3))),
        f"launch: rank 1, 5 was {KILLED}: 1 of 6 ranks continue",
    ], lines  # fmt: skip


WHY = {
    "late": "no rank continues without rank 1: not all ranks had begun",
    "few": "no rank continues without rank 1: 2 would remain, and --min-ranks is 3",
    "over": "no rank continues without rank 1: others have ended",
    "code": "rank 1 ended with exit code 9",
}


@pytest.mark.parametrize("why", WHY)
def test_if_none_can_continue_all_start_again_as_often_as_they_may(why: str, tmp_path: Path) -> None:
    with live(tmp_path, 3, "--max-restarts", "1", *(["--min-ranks", "3"] if why == "few" else [])) as job:
        for start in range(2):
            job.begin(start, ready=why != "late")
            if why == "over":
                job.end(0)
                poll(lambda: not state_of(job.begun[0][0]), what="the end of rank 0")
            if why == "code":
                job.end(1, code=9)
            else:
                job.kill(1)
        code, lines = job.wait()
    each = [f"launch: {WHY[why]}", *([f"launch: rank 1 was {KILLED}"] if why != "code" else [])]
    assert (code, lines) == (1, [*each, "launch: all ranks start again; restarts left after that: 0", *each])
    assert not list(tmp_path.glob("2-*"))


def test_what_was_lost_comes_back_with_a_restart(tmp_path: Path) -> None:
    with live(tmp_path, 3, "--max-restarts", "2") as job:
        job.begin()
        job.kill(0)
        assert job.remaining(1) == [1, 2]
        job.end(1, code=1)
        job.begin(1)
        assert not job.store.check(["lockstep/live/generation/1"])
        job.kill(2)
        assert job.remaining(1) == [0, 1]
        job.end(0, 1)
        assert job.wait()[0] == 0


LINES = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)  # no process waits for it, though it has the pipes
for number in range(20000):
    print(number, "\u00e4" * 20)
print("one ", end="", flush=True)
time.sleep(0.3)
print("line\\nno end", end="", flush=True)
print("errors", file=sys.stderr, flush=True)
pathlib.Path(sys.argv[1], os.environ["RANK"]).touch()
while not all(pathlib.Path(sys.argv[1], rank).exists() for rank in "01"):  # the first one that ends ends the other
    time.sleep(0.01)
os.kill(os.getpid(), 9) if os.environ["RANK"] == "1" else os._exit(3)
"""


def test_no_line_is_lost_or_cut(tmp_path: Path) -> None:
    with live(tmp_path, 2, program=LINES) as job:
        done = job.gang.wait(240)
        assert len(inside(tmp_path)) == 2, "the launcher had to end before these"
    for rank in (0, 1):
        lines = [line.partition("] ")[2] for line in done.output.splitlines() if line.startswith(f"[rank {rank}] ")]
        expected = [*(f"{number} {'ä' * 20}" for number in range(20000)), "one line", "no end"]
        assert "errors" in lines
        lines.remove("errors")
        assert len(lines) == len(expected) and all(map(str.__eq__, lines, expected)), lines[-3:]


@pytest.mark.promise("bad-input")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--nodes 1:2 --rendezvous a:1", "--nodes must be a number from 1"),
        ("--min-ranks 2", "need --live"), ("--live --min-ranks 3", "there are 2 ranks"),
        ("--live --lost-seconds 0", "from 1"), ("--live --grace 0", "--grace: must be a whole number from 1"),
    ],
)  # fmt: skip
def test_what_live_cannot_do_is_one_line(flags: str, message: str) -> None:
    done = python("-m", "lockstep.training", "launch", "--ranks", "2", *flags.split(), "run", "smoke")
    assert done.code == 2 and message in done.output and len(done.output.splitlines()) == 1, done.output
