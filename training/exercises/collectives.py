"""python -m lockstep.training collectives: what scatter, broadcast, gather and all-reduce are for, on one matrix product.

C = A·B is shared out in two ways, at any number of ranks and any sizes, and checked against one process:

    by row          broadcast B, scatter the rows of A, gather the rows of C
    by reduction    scatter the columns of A and the rows of B, all-reduce the sum of the partial products

`gather_objects` and `all_gather` do the same for plain values and for tensors of unequal length.
Start it with `python -m lockstep.training launch --ranks 3 collectives --sizes 1000 300 500`, torchrun, srun or mpiexec.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from lockstep.training.cli import PROGRAM, Parser, about, positive
from lockstep.training.contract import EXIT_DONE, EXIT_FAILED, UserError
from lockstep.training.parallel.exchange import all_gather_rows, gather_trees, pack, raise_together, split, unpack
from lockstep.training.parallel.world import World, detect, joined, set_threads

_TYPES = (torch.float32, torch.float64)


@dataclass
class Traffic:
    """Bytes that each collective of a computation moves between the ranks, counted on the whole."""

    sent: dict[str, int] = field(default_factory=dict)

    def add(self, operation: str, tensor: torch.Tensor, times: int) -> None:
        self.sent[operation] = self.sent.get(operation, 0) + tensor.numel() * tensor.element_size() * times

    @property
    def total(self) -> int:
        return sum(self.sent.values())


def matmul_by_row(
    a: torch.Tensor | None, b: torch.Tensor | None, world: World | None = None, traffic: Traffic | None = None
) -> torch.Tensor | None:
    """C = A·B with the rows of A shared out. Collective, in any process group: `mp.spawn`'s, too.

    Args:
        a: [m, k] on rank 0, float32 or float64. b: [k, n] on rank 0. What other ranks give is not read; it may be None.
        world: by default that of the process group.
        traffic: counts what is sent.

    Returns:
        C [m, n] on rank 0 and None elsewhere.

    Raises:
        ValueError: on all ranks; the matrices do not fit, or are of another type.
    """
    world, traffic = _world_or_current(world), traffic or Traffic()
    (m, k, n), dtype = _sizes(a, b, world)
    shared = b.contiguous() if world.leader and b is not None else torch.empty(k, n, dtype=dtype, device=world.device)
    dist.broadcast(shared, 0)
    traffic.add("broadcast B", shared, world.size - 1)
    rank_rows = _scatter_rows(a, m, k, dtype, world)
    traffic.add("scatter A", rank_rows, world.size - 1)
    product = rank_rows @ shared
    pieces = [torch.empty_like(product) for _ in range(world.size)] if world.leader else None
    dist.gather(product, pieces, 0)
    traffic.add("gather C", product, world.size - 1)
    return torch.cat(pieces)[:m] if pieces is not None else None


def matmul_by_reduction(
    a: torch.Tensor | None, b: torch.Tensor | None, world: World | None = None, traffic: Traffic | None = None
) -> torch.Tensor:
    """C = A·B with the inner dimension shared out. Collective. Arguments and errors as `matmul_by_row`; C [m, n] on every rank."""
    world, traffic = _world_or_current(world), traffic or Traffic()
    (m, k, n), dtype = _sizes(a, b, world)
    columns = _scatter_rows(None if a is None else a.T, k, m, dtype, world)
    rows = _scatter_rows(b, k, n, dtype, world)
    traffic.add("scatter A", columns, world.size - 1)
    traffic.add("scatter B", rows, world.size - 1)
    product = columns.T @ rows  # what fills a part up is zero and adds nothing
    dist.all_reduce(product)
    traffic.add("all-reduce C", product, 2 * (world.size - 1))  # a ring passes every element on twice
    return product


def _sizes(a: torch.Tensor | None, b: torch.Tensor | None, world: World) -> tuple[tuple[int, int, int], torch.dtype]:
    """((m, k, n), the type) of rank 0's matrices, on every rank."""
    told = torch.full((5,), -1, dtype=torch.int64, device=world.device)
    if world.leader and a is not None and b is not None and a.dim() == b.dim() == 2 and a.dtype == b.dtype in _TYPES:
        told = torch.tensor([*a.shape, *b.shape, _TYPES.index(a.dtype)], device=world.device)
    dist.broadcast(told, 0)
    m, k, inner, n, number = told.tolist()
    if k != inner or number < 0:
        raise ValueError(
            f"rank 0 needs matrices [m, k] and [k, n] of float32 or float64, got [{m}, {k}] and [{inner}, {n}] (-1: neither)"
        )
    return (m, k, n), _TYPES[number]


def _scatter_rows(
    matrix: torch.Tensor | None, count: int, width: int, dtype: torch.dtype, world: World
) -> torch.Tensor:
    """This rank's [⌈count / world⌉, width] of rank 0's [count, width], filled up with zeros: scatter takes equal parts."""
    rows_per_rank = -(-count // world.size)
    rank_rows = torch.empty(rows_per_rank, width, dtype=dtype, device=world.device)
    pieces = None
    if world.leader and matrix is not None:
        padded = torch.zeros(rows_per_rank * world.size, width, dtype=dtype, device=matrix.device)
        padded[:count] = matrix
        pieces = list(padded.split(rows_per_rank))
    dist.scatter(rank_rows, pieces, 0)
    return rank_rows


def gather_objects(value: Any, world: World | None = None) -> list[Any] | None:
    """The values of all ranks on rank 0, in the order of their ranks; None elsewhere. Collective.

    A value is any nesting of dicts, lists, tuples and sets of tensors, numpy's arrays and numbers, numbers, texts, bytes,
    booleans and None, of another size on each rank if need be. Unlike torch's `gather_object`, nothing is pickled, so no
    rank can run code on rank 0. Every value is a copy of the same types, rank 0's own, too; tensors arrive on the CPU.

    Raises:
        TypeError: some rank has a value of another type; raised on all of them.
    """
    world = _world_or_current(world)
    refused: TypeError | None = None
    try:
        split(value)
    except (TypeError, ValueError) as error:
        refused = TypeError(str(error))
    try:
        raise_together(refused, world)
    except RuntimeError as error:
        raise TypeError(str(error)) from refused
    values = gather_trees(value, world)
    if values is not None:
        values[0] = unpack(pack(value))
    return values


def all_gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all ranks on every rank; their first dimensions may differ, the others may not. Collective."""
    return all_gather_rows(tensor)


def _world_or_current(world: World | None) -> World:
    return world or World(rank=dist.get_rank(), size=dist.get_world_size(), local_size=dist.get_world_size())


def main(argv: list[str]) -> int:
    """Runs both forms, prints time and bytes, and returns 1 where a product is wrong. Raises `UserError` for wrong arguments."""
    parser = Parser(prog=f"{PROGRAM} collectives", description=about(__doc__))
    parser.add_argument("--sizes", nargs=3, type=positive, default=[1024, 1024, 1024], metavar=("M", "K", "N"),
                        help="rows of A, columns of A (rows of B), columns of B; default: 1024 each")  # fmt: skip
    parser.add_argument("--repeat", type=positive, default=5, help="how often to run each; the median is printed")
    args = parser.parse_args(argv)
    with joined(detect(os.environ)) as world:
        threads = set_threads(world, 0, os.environ)
        right = _compare(tuple(args.sizes), args.repeat, world, threads)
    return EXIT_DONE if right else EXIT_FAILED


def _compare(sizes: tuple[int, int, int], repeat: int, world: World, threads: str) -> bool:
    m, k, n = sizes
    a, b = _inputs(sizes, world)
    if world.leader:
        print(
            f"C [{m}, {n}] = A [{m}, {k}] · B [{k}, {n}] on {world.size} ranks, {world.device.type}, {threads}",
            flush=True,
        )
    forms: dict[str, Callable[..., Any]] = {"by row": matmul_by_row, "by reduction": matmul_by_reduction}
    single_process = (lambda: a @ b) if a is not None and b is not None else None
    expected, seconds = _timed(single_process, repeat) if single_process else (None, 0.0)
    if single_process:
        print(f"one process     {1000 * seconds:9.2f} ms", flush=True)
    right = True
    for name, form in forms.items():
        dist.barrier()
        form(a, b, world, traffic := Traffic())
        product, seconds = _timed(functools.partial(form, a, b, world), repeat)
        if expected is not None:
            error = float((product - expected).abs().max() / expected.abs().max())
            right &= error < 1e-4
            detail = ", ".join(f"{operation} {count:,}" for operation, count in traffic.sent.items())
            print(
                f"{name:13}   {1000 * seconds:9.2f} ms   {traffic.total:>12,} bytes ({detail}); error {error:.1e}",
                flush=True,
            )
    verdict = gather_objects({"rank": world.rank, "right": right}, world)
    if verdict is not None:
        print(
            "both are the product of one process" if right else "the products differ: see the errors above", flush=True
        )
    flag = torch.tensor(int(right))
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def _inputs(sizes: tuple[int, int, int], world: World) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """A and B on rank 0, None elsewhere. Collective. Raises `UserError` on all ranks where one has too little memory."""
    m, k, n = sizes
    a = b = None
    error: UserError | None = None
    # All that a rank holds at once, in one piece: Linux refuses what is beyond the machine, and does not touch the rest.
    rows, inner = -(-m // world.size), -(-k // world.size)
    elements = max(rows * (k + n) + k * n, inner * (m + n) + m * n)
    elements += 2 * (m * k + k * n + m * n) if world.leader else 0
    try:
        for device in {torch.device("cpu"), world.device}:
            torch.empty(elements, device=device)
        if world.leader:
            generator = torch.Generator().manual_seed(0)
            a = torch.randn(m, k, generator=generator).to(world.device)
            b = torch.randn(k, n, generator=generator).to(world.device)
    except (
        RuntimeError,
        TypeError,
    ):  # TypeError: not even a 64-bit number of elements; an allocator has no error type of its own
        error = UserError(
            f"--sizes {m} {k} {n} needs {4 * elements / 1e9:,.0f} GB on a rank, more than it has: use smaller sizes"
        )
    raise_together(error, world)
    return a, b


def _timed(form: Callable[[], Any], repeat: int) -> tuple[Any, float]:
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        result = form()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return result, sorted(times)[len(times) // 2]
