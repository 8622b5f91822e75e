"""What send and receive, broadcast, scatter, gather, reduce, all-reduce and all-gather do, and what they are for.

    lockstep run --ranks 3 -- python examples/modules/collectives.py --sizes 1000 300 500
    mpiexec -np 3 python examples/modules/collectives.py      # so do torchrun, srun, and python alone for one rank

First each of them on one number a rank. Then C = A·B is shared out in two ways, at any sizes, and checked against one process:

    by row          broadcast B, scatter the rows of A, gather the rows of C
    by reduction    scatter the columns of A and the rows of B, all-reduce the sum of the partial products
"""

import argparse
import sys
import time

import torch
import torch.distributed as dist

from lockstep.training.parallel import world


def one_number_each(me):
    """Rank r has the number r + 1. Each collective is checked on every rank; rank 0 says what it did."""
    mine = torch.tensor([float(me.rank + 1)], device=me.device)
    everyone = [float(rank + 1) for rank in range(me.size)]
    pieces = [torch.empty_like(mine) for _ in range(me.size)]
    on_first = pieces if me.rank == 0 else None

    # A token goes round: each rank receives it from the one before, adds its number, and sends it on.
    token = torch.zeros_like(mine)
    if me.rank > 0:
        dist.recv(token, me.rank - 1)
    token += mine
    if me.rank < me.size - 1:
        dist.send(token, me.rank + 1)
    tell(me, "send, recv", "a running sum from rank to rank", token, sum(everyone[: me.rank + 1]))

    value = mine.clone()
    dist.broadcast(value, src=0)
    tell(me, "broadcast", "rank 0's number, on every rank", value, 1)

    dist.scatter(value, [torch.full_like(mine, 10 * number) for number in everyone] if me.rank == 0 else None, src=0)
    tell(me, "scatter", "of rank 0's list to each rank one", value, 10 * everyone[me.rank])

    dist.gather(mine, on_first, dst=0)
    if me.rank == 0:
        tell(me, "gather", "the numbers of all, on rank 0", torch.cat(pieces), everyone)

    value = mine.clone()
    dist.reduce(value, dst=0)
    if me.rank == 0:  # what the others then have is undefined
        tell(me, "reduce", "their sum, on rank 0", value, sum(everyone))

    value = mine.clone()
    dist.all_reduce(value)
    tell(me, "all_reduce", "their sum, on every rank", value, sum(everyone))

    dist.all_gather(pieces, mine)
    tell(me, "all_gather", "the numbers of all, on every rank", torch.cat(pieces), everyone)


def tell(me, name, meaning, value, expected):
    expected = torch.tensor(expected, device=me.device).reshape(-1)
    assert torch.equal(value, expected.float()), f"{name} on rank {me.rank}: {value.tolist()}, not {expected.tolist()}"
    if me.rank == 0:
        print(f"{name:12} {meaning}: {value.tolist()}", flush=True)


def matmul_by_row(a, b, sizes, me, sent):
    """C [m, n] on rank 0, None elsewhere; so are A [m, k] and B [k, n]. `sent` gets the bytes that each collective moves."""
    m, k, n = sizes
    b = b.clone() if me.rank == 0 else torch.empty(k, n, device=me.device)
    dist.broadcast(b, src=0)
    sent["broadcast B"] = b.nbytes * (me.size - 1)
    rows = scatter_rows(a, m, k, me)
    sent["scatter A"] = rows.nbytes * (me.size - 1)
    product = rows @ b
    pieces = [torch.empty_like(product) for _ in range(me.size)] if me.rank == 0 else None
    dist.gather(product, pieces, dst=0)
    sent["gather C"] = product.nbytes * (me.size - 1)
    return torch.cat(pieces)[:m] if me.rank == 0 else None


def matmul_by_reduction(a, b, sizes, me, sent):
    """C [m, n] on every rank; A and B on rank 0."""
    m, k, n = sizes
    columns = scatter_rows(a.T if me.rank == 0 else None, k, m, me)
    rows = scatter_rows(b, k, n, me)
    sent["scatter A"], sent["scatter B"] = columns.nbytes * (me.size - 1), rows.nbytes * (me.size - 1)
    product = columns.T @ rows  # what fills a part up is zero and adds nothing
    dist.all_reduce(product)
    sent["all-reduce C"] = 2 * product.nbytes * (me.size - 1)  # a ring passes every element on twice
    return product


def scatter_rows(matrix, count, width, me):
    """This rank's [⌈count / ranks⌉, width] of rank 0's [count, width], filled up with zeros: scatter takes equal parts."""
    rows = -(-count // me.size)
    mine = torch.empty(rows, width, device=me.device)
    pieces = None
    if me.rank == 0:
        padded = torch.zeros(rows * me.size, width, device=me.device)
        padded[:count] = matrix
        pieces = list(padded.split(rows))
    dist.scatter(mine, pieces, src=0)
    return mine


def timed(function, *arguments, repeat=5):
    """(what it returns, its median seconds)."""
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        result = function(*arguments)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return result, sorted(times)[repeat // 2]


def main(sizes, me):
    """Whether both products are right; known on rank 0, and True elsewhere."""
    one_number_each(me)
    m, k, n = sizes
    a = b = None
    if me.rank == 0:
        torch.manual_seed(0)
        a, b = torch.randn(m, k, device=me.device), torch.randn(k, n, device=me.device)
        expected, seconds = timed(torch.matmul, a, b)
        print(f"\nC [{m}, {n}] = A [{m}, {k}] · B [{k}, {n}] on {me.size} ranks\none process  {1000 * seconds:9.2f} ms")
    right = True
    for name, form in (("by row", matmul_by_row), ("by reduction", matmul_by_reduction)):
        dist.barrier()  # all begin together: rank 0 has been busy
        sent = {}
        product, seconds = timed(form, a, b, sizes, me, sent)
        if me.rank == 0:
            error = float((product - expected).abs().max() / expected.abs().max())
            right = right and error < 1e-4
            detail = ", ".join(f"{operation} {count:,}" for operation, count in sent.items())
            print(f"{name:12} {1000 * seconds:9.2f} ms  {sum(sent.values()):,} bytes ({detail}); error {error:.1e}")
    if me.rank == 0:
        print(
            "both are the product of one process" if right else "the products differ: see the errors above", flush=True
        )
    return right


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs=3, type=int, default=[1024, 1024, 1024], metavar=("M", "K", "N"))
    with world.script() as me:
        right = main(parser.parse_args().sizes, me)
    sys.exit(0 if right else 1)
