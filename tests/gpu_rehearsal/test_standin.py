"""The stand-in itself: that it refuses what CUDA and NCCL refuse, so that a run without a complaint says something."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu_rehearsal import build
from tests.gpu_rehearsal.rehearsal import Gang, rehearsing
from tests.processes import ROOT


def test_ci_installs_the_torch_that_the_stand_in_was_written_for() -> None:
    lines = [line for line in build.CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    assert lines == [f"torch=={build.WRITTEN_FOR.partition('+')[0]}"]
    ci = (ROOT / ".ci" / "run").read_text()
    assert str(build.CONSTRAINTS.relative_to(ROOT)) in ci and "PIP_CONSTRAINT=$constraints make setup" in ci


HEAD = """
import torch, torch.distributed as dist
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


def _go(folder: Path, text: str, ranks: int = 1, devices: int = 2, **extra: str) -> Gang:
    with rehearsing(folder, [], ranks, devices, program=["-c", HEAD + text], **extra) as gang:
        gang.wait(60)
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


def test_who_reads_before_the_copy_has_come_reads_what_was_there(tmp_path: Path) -> None:
    text = """
host = torch.zeros(4, pin_memory=True)
host.copy_(a.add(1), non_blocking=True)
early = host.clone()
torch.cuda.synchronize()
print(early.tolist(), host.tolist())
"""
    assert (
        _go(tmp_path, text, STANDIN_LATE="oldest").output.splitlines()[-1]
        == "[0.0, 0.0, 0.0, 0.0] [2.0, 2.0, 2.0, 2.0]"
    )


@pytest.mark.parametrize(
    ("waits", "late", "found"), [(False, "newest", 1.0), (False, "oldest", 0.0), (True, "oldest", 1.0)]
)
def test_a_stream_that_does_not_wait_for_another_shows(tmp_path: Path, waits: bool, late: str, found: float) -> None:
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
    assert _go(tmp_path, text, STANDIN_LATE=late).output.splitlines()[-1] == str(found)


JOIN = """
import os
from datetime import timedelta
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=30), device_id=torch.device("cuda", rank))
"""


GENERATORS = """
from tests import product

generators = product.generators()

one, two = torch.device("cuda", 0), torch.device("cuda", 1)
generators.seed(5)
fresh = torch.cuda.get_rng_state(two)
torch.rand(4, device="cuda")
states = generators.capture(one)
assert generators.is_sound(states)
drawn = torch.rand(4, device="cuda")
assert not torch.equal(drawn, torch.rand(4, device="cuda"))
generators.seed(9)
generators.restore(states, one)
assert torch.equal(torch.cuda.get_rng_state(one), states["cuda"])
assert torch.equal(torch.rand(4, device="cuda"), drawn)
torch.cuda.manual_seed_all(5)
assert torch.equal(torch.cuda.get_rng_state(two), fresh)
for cut in (states["cuda"][:8], states["cuda"][:15], states["cuda"].repeat(2), states["cuda"].long(), states["cuda"] | 1):
    bad = {**states, "cuda": cut}
    try:
        generators.restore(bad, one)
        print("torch takes", cut.numel())
    except (RuntimeError, TypeError):
        assert not generators.is_sound(bad), cut
print("restored")
"""


def test_a_gpus_generator_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    """torch's own generators of GPUs; what draws from them is the emulation. What torch does not take back is not sound."""
    assert _go(tmp_path, GENERATORS).output.splitlines()[-2:] == ["torch takes 8", "restored"]  # 8: without an offset


def test_two_ranks_of_one_gpu_get_no_communicator(tmp_path: Path) -> None:
    gang = _go(
        tmp_path, JOIN.replace("set_device(rank)", "set_device(0)").replace('"cuda", rank', '"cuda", 0'), ranks=2
    )
    assert [rank.code for rank in gang.ranks] == [1, 1]
    assert all("Duplicate GPU detected: rank 0 and rank 1" in rank.lines("VIOLATION")[0] for rank in gang.ranks)


CALLS = """
import ctypes

class Id(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]

lib, which, comm = ctypes.CDLL(None), Id(), ctypes.c_void_p()
lib.ncclGetUniqueId(ctypes.byref(which))
assert lib.ncclCommInitRank(ctypes.byref(comm), 1, which, 0) == 0
FLOAT, SUM = 7, 0

def call(name, tensors, *words):
    return getattr(lib, name)(*[ctypes.c_void_p(x.data_ptr()) for x in tensors], ctypes.c_size_t(4), FLOAT, *words, comm, None)

def to_itself(x, y):
    lib.ncclGroupStart()
    codes = call("ncclSend", [x], 0), call("ncclRecv", [y], 0)
    lib.ncclGroupEnd()
    return max(codes)

CALLS = [
    lambda x, y: call("ncclAllReduce", [x, y], SUM),
    lambda x, y: call("ncclReduce", [x, y], SUM, 0),
    lambda x, y: call("ncclBroadcast", [x, y], 0),
    lambda x, y: call("ncclAllGather", [x, y]),
    lambda x, y: call("ncclReduceScatter", [x, y], SUM),
    to_itself,
]
"""


@pytest.mark.parametrize("where", ["own", "pageable", "pinned", "another GPU's"])
def test_nccl_takes_buffers_of_its_own_gpu_alone(tmp_path: Path, where: str) -> None:
    """torch itself refuses the host's tensors; here NCCL is called without it."""
    buffer = {"own": "device='cuda'", "pageable": "", "pinned": "pin_memory=True", "another GPU's": "device='cuda:1'"}[
        where
    ]
    gang = _go(
        tmp_path,
        f"{CALLS}\nx, y = torch.ones(4, {buffer}), torch.ones(4, {buffer})\nprint([one(x, y) for one in CALLS])",
    )
    host = where in ("pageable", "pinned")
    assert gang.output.splitlines()[-1] == str([4 if host else 0] * 6), gang.output  # ncclInvalidArgument
    said = "of host memory" if host else "of a buffer of another device"
    names = ["all-gather", "all-reduce", "broadcast", "receive", "reduce", "reduce-scatter", "send"]
    expected = [] if where == "own" else [f"VIOLATION {name} {said}" for name in names]
    assert sorted(set(gang.ranks[0].lines("VIOLATION"))) == expected


def test_an_operator_over_two_gpus_is_refused(tmp_path: Path) -> None:
    gang = _go(tmp_path, "a.add_(torch.ones(4, device='cuda:1'))")
    assert gang.ranks[0].code == 1 and "WrongDevice: add_ of tensors on cuda:0, cuda:1" in gang.output


def test_sums_of_nccl_are_those_of_gloo(tmp_path: Path) -> None:
    text = (
        JOIN
        + """
torch.manual_seed(rank)
for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64):
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        here = (torch.randn(1000) * 100).to(dtype)
        there = here.clone().to("cuda")
        dist.all_reduce(here, op)
        dist.all_reduce(there, op)
        assert torch.equal(here, there.cpu()), (dtype, op)
    parts = [torch.full((100000,), i).to(dtype).cuda() for i in range(2)] if rank == 0 else None
    mine = torch.empty(100000, dtype=dtype, device="cuda")
    dist.scatter(mine, parts, src=0)
    assert torch.equal(mine, torch.full_like(mine, rank))
print("same")
dist.destroy_process_group()
"""
    )
    assert [rank.output for rank in _go(tmp_path, text, ranks=2).ranks] == ["same\n"] * 2
