"""The stand-in itself: that it refuses what CUDA refuses, so that a run without a complaint says something."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu_rehearsal.rehearsal import Gang, rehearsing

HEAD = """
import torch
from tests.gpu_rehearsal.emulation import Emulation
emulation = Emulation()
emulation.__enter__()
a, b = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
side, stream = torch.cuda.Stream(), torch.cuda.Stream()
torch.cuda.synchronize()

def capture(body):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        body()
    return graph

def away():
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        b.add_(a)
"""


def _go(folder: Path, text: str, **extra: str) -> Gang:
    with rehearsing(folder, [], ranks=1, program=["-c", HEAD + text], **extra) as gang:
        gang.wait(240)
    return gang


def test_a_graph_runs_at_its_launches_and_not_before(tmp_path: Path) -> None:
    gang = _go(tmp_path, "g = capture(lambda: b.add_(a)); print(b.tolist()); g.replay(); g.replay(); print(b.tolist())")
    assert gang.ranks[0].output.splitlines() == ["[0.0, 0.0, 0.0, 0.0]", "[2.0, 2.0, 2.0, 2.0]"]
    assert gang.ranks[0].lines("LAUNCH") == ["LAUNCH nodes=1 stream=0"] * 2


BROKEN = {
    "a look at a value": ("lambda: b.add_(float(a[0]))", "cudaStreamSynchronize on a captured stream"),
    "a synchronisation": ("torch.cuda.synchronize", "cudaDeviceSynchronize while a stream is captured"),
    "a stream that does not come back": ("away", "stream 1 was not joined at the end of the capture"),
    "an event of before": (
        "lambda: torch.cuda.current_stream().wait_event(before)",
        "cudaStreamWaitEvent makes a captured stream wait for an event outside",
    ),
    "an event of the capture": (
        "lambda: torch.cuda.current_stream().record_event().query()",
        "cudaEventQuery of an event of the",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_breaks_a_capture_on_a_gpu_breaks_it_here(tmp_path: Path, what: str) -> None:
    body, violation = BROKEN[what]
    gang = _go(tmp_path, f"before = torch.cuda.Event(); before.record()\ncapture({body})")
    assert gang.ranks[0].code != 0
    assert any(violation in line for line in gang.ranks[0].lines("VIOLATION")), gang.ranks[0].lines("VIOLATION")


@pytest.mark.parametrize(
    ("waits", "late", "expected"), [(False, "newest", 1.0), (False, "oldest", 0.0), (True, "oldest", 1.0)]
)
def test_a_stream_that_does_not_wait_for_another_shows(tmp_path: Path, waits: bool, late: str, expected: float) -> None:
    """`side`, the older one, adds what `stream` writes."""
    text = f"""
with torch.cuda.stream(stream):
    b.fill_(1)
if {waits}:
    side.wait_stream(stream)
with torch.cuda.stream(side):
    a.copy_(b)
torch.cuda.synchronize()
print(a[0].item())
"""
    assert _go(tmp_path, text, STANDIN_LATE=late).output.splitlines()[-1] == str(expected)


def test_a_communicator_keeps_the_order_of_its_calls_across_streams(tmp_path: Path) -> None:
    """As NCCL's do. Each rank first waits for another of the two sums, and no rank may begin with the second one."""
    text = """
import torch.distributed as dist
dist.init_process_group("nccl")
b.fill_(10)
torch.cuda.synchronize()
for tensor, its in ((a, side), (b, stream)):
    with torch.cuda.stream(its):
        dist.all_reduce(tensor)
(side, stream)[dist.get_rank()].synchronize()
torch.cuda.synchronize()
print(a[0].item(), b[0].item())
dist.destroy_process_group()
"""
    each = [{"RANK": str(rank), "WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": str(rank)} for rank in range(2)]
    with rehearsing(tmp_path, [], each=each, program=["-c", HEAD + text], STANDIN_LATE="newest") as gang:
        assert gang.wait(240) == [0, 0], gang.output
    assert [rank.output.splitlines()[-1] for rank in gang.ranks] == ["2.0 20.0"] * 2, gang.output
