"""An error in a script names the rank that raised it, whatever its words. Its traceback is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.events import status_of
from tests.own.job import script

pytestmark = pytest.mark.promise("named-rank")

SCRIPT = """
import socket
from lockstep.wire import hangs

hangs.of_run = lambda _: time.sleep(600)  # the disk of the run directory hangs

class Slow(Dataset):
    def __len__(self): return 64
    def __getitem__(self, index):
        if RANK == 1 and index % 8 == 5: time.sleep(60)
        return torch.ones(4), 0

def loader_times_out():
    for x, _ in DataLoader(Slow(), 4, num_workers=1, timeout=1): pass

def plain(error):
    def raises():
        raise error
    return raises

class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x
    @staticmethod
    def backward(ctx, grad): raise RuntimeError("socket of the renderer timed out: connection closed")

def in_backward():
    Backward.apply(torch.ones(1, requires_grad=True)).sum().backward()

KINDS = {"loader": loader_times_out, "socket": plain(socket.timeout("timed out")), "backward": in_backward}
with Session(sys.argv[1], "collective_timeout=20") as run:
    RANK = run.rank
    model = replicated(run)
    data = [(torch.ones(4), torch.zeros(2)) for _ in range(64)]
    for epoch in run.epochs(1):
        for number, (x, y) in enumerate(run.batches(data, 8)):
            if number == 3 and RANK == 1:
                KINDS[sys.argv[2]]()
            run.step(((model(x) - y) ** 2).mean())
"""
SAYS = {
    "loader": "RuntimeError: DataLoader timed out", "socket": "TimeoutError: timed out",
    "backward": "socket of the renderer timed out",
}  # fmt: skip


@pytest.mark.parametrize("kind", SAYS)
def test_an_error_of_the_script_blames_no_other_rank(kind: str, tmp_path: Path) -> None:
    done = script(2, SCRIPT, tmp_path / "run", kind)
    assert done.code == 1 and SAYS[kind] in done.output and "Traceback" in done.output, done.output
    assert "rank 0 did not arrive" not in done.output, done.output
    assert "rank 1 did not arrive" in done.output, done.output  # rank 0 reports it, as its collective has failed
    assert status_of(tmp_path / "run")["code"] == 1


GROUP = """
import datetime, torch.distributed as dist
with Session(sys.argv[1]) as run:
    model = replicated(run)
    own, over = dist.new_group(timeout=datetime.timedelta(seconds=0.5)), pathlib.Path(sys.argv[2])
    for epoch in run.epochs(1):
        for x in run.iterate([torch.ones(8, 4)] * 4):
            run.step(model(x).square().mean(), samples=8)
            while run.rank and not over.exists():
                time.sleep(0.02)
            try:
                dist.all_reduce(torch.ones(1), group=own)
            finally:
                over.touch()
"""
"""Rank 1 comes to the first collective of the script's group when rank 0 waits no longer."""


def test_a_timeout_in_a_group_of_the_scripts_own_is_a_collective_that_failed(tmp_path: Path) -> None:
    done = script(2, GROUP, tmp_path / "run", str(tmp_path / "over"))
    assert done.code == 1 and "Traceback" not in done.output, done.output
    assert "step 1: a collective failed, although every rank is present (" in done.output, done.output


KILLED = """
class Slow(Dataset):
    def __len__(self): return 160
    def __getitem__(self, index):
        if rank == 2 and killed.exists(): time.sleep(600)
        return torch.ones(4), torch.zeros(2)

killed = pathlib.Path(sys.argv[2])
with Session(sys.argv[1]) as run:
    rank = run.rank
    model = replicated(run)
    for epoch in run.epochs(1):
        for number, (x, y) in enumerate(run.batches(Slow(), 16, workers=1)):
            if number == 4 and rank == 2:
                killed.touch()
                time.sleep(0.5)  # its loader is in the next batch
                os.kill(os.getpid(), signal.SIGKILL)
            run.step(((model(x) - y) ** 2).mean())
"""
"""Rank 2 is killed, and its loader's process lives on."""


def test_a_killed_rank_alone_is_named_and_at_once(tmp_path: Path) -> None:
    """A loader's process that kept its connections, and ranks that wait for others, would make the living look lost."""
    killed = tmp_path / "killed"
    done = script(4, KILLED, tmp_path / "run", str(killed))
    assert done.code == 1 and "step 4: rank 2 did not arrive (" in done.output, done.output
    assert done.output.count("did not arrive") == 1, done.output
    status = tmp_path / "run/status.json"
    assert "rank 2 did not arrive" in json.loads(status.read_text())["reason"]
    assert status.stat().st_mtime - killed.stat().st_mtime < 60
