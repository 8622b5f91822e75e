"""The matrix product on several ranks, sizes that do not divide included; gathering of unequal parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lockstep.training.exercises import collectives
from lockstep.training.parallel.world import World
from tests.processes import PYTHON, ROOT, run
from tests.ranks import gang, on_ranks, training

pytestmark = pytest.mark.promise("modules")

SIZES = [(7, 5, 3), (2, 9, 4), (1, 1, 1), (33, 2, 17)]


def _products(world: World) -> list[tuple[torch.Tensor | None, torch.Tensor, dict[str, int], dict[str, int]]]:
    found = []
    for m, k, n in SIZES:
        generator = torch.Generator().manual_seed(m)
        a, b = torch.randn(m, k, generator=generator), torch.randn(k, n, generator=generator)
        mine = (a, b) if world.leader else (None, None)
        row_traffic, traffic = collectives.Traffic(), collectives.Traffic()
        by_row = collectives.matmul_by_row(*mine, world, row_traffic)
        summed = collectives.matmul_by_reduction(*mine, world, traffic)
        found.append((by_row, summed, row_traffic.sent, traffic.sent))
    return found


def _gathered(world: World) -> tuple[object, list[torch.Tensor]]:
    value = {"rank": world.rank, "ids": torch.arange(world.rank), "name": ("r" * world.rank, None)}
    return collectives.gather_objects(value), collectives.all_gather(torch.full((world.rank * 2, 3), float(world.rank)))


def _all(world: World) -> tuple[object, object]:
    return _products(world), _gathered(world)


def _refused(world: World) -> str:
    """One rank alone has a value that cannot be sent."""
    try:
        collectives.gather_objects({"fine": 1} if world.rank != 1 else {"a path": Path()}, world)
    except TypeError as error:
        return str(error)
    return "went through"


@pytest.mark.parametrize("size", [1, 3])
def test_both_products_are_that_of_one_process(size: int) -> None:
    results = on_ranks(_all, size)
    for number, (m, k, n) in enumerate(SIZES):
        generator = torch.Generator().manual_seed(m)
        expected = torch.randn(m, k, generator=generator) @ torch.randn(k, n, generator=generator)
        torch.testing.assert_close(results[0][0][number][0], expected)
        for products, _ in results:
            torch.testing.assert_close(products[number][1], expected)
        assert all(products[number][0] is None for products, _ in results[1:])
        rows, inner, others = -(-m // size), -(-k // size), size - 1
        sent, reduced = results[0][0][number][2:]
        assert sent == {
            "broadcast B": 4 * k * n * others,
            "scatter A": 4 * rows * k * others,
            "gather C": 4 * rows * n * others,
        }
        assert reduced == {
            "scatter A": 4 * inner * m * others, "scatter B": 4 * inner * n * others, "all-reduce C": 8 * m * n * others,
        }  # fmt: skip
    for rank, (_, (objects, tensors)) in enumerate(results):
        assert [len(tensor) for tensor in tensors] == [2 * r for r in range(size)]
        assert all(bool((tensor == r).all()) for r, tensor in enumerate(tensors))
        if rank:
            assert objects is None
        else:
            assert [(o["rank"], o["ids"].tolist(), o["name"]) for o in objects] == [
                (r, list(range(r)), ("r" * r, None)) for r in range(size)
            ]


def test_a_value_that_one_rank_cannot_send_is_refused_on_all() -> None:
    found = on_ranks(_refused, 2)  # the collective that would wait has a minute
    assert all("rank 1" in said and "PosixPath" in said for said in found), found


def test_the_command_checks_itself_and_prints_time_and_bytes() -> None:
    done = gang(2, "collectives", "--sizes", "31", "20", "9", "--repeat", "2")
    assert done.code == 0 and "both are the product of one process" in done.output, done.output
    for name in ("by row", "by reduction"):
        line = next(line for line in done.output.splitlines() if name in line)
        assert " ms " in line and "bytes (" in line
    for sizes in (("0", "1", "1"), ("10000000", "1", "10000000"), ("2147483647",) * 3):  # also beyond the memory
        done = training("collectives", "--sizes", *sizes)
        assert done.code == 2 and done.output.count("\n") == 1 and "--sizes" in done.output, done.output


def test_the_example_gathers_predictions_to_rank_0(tmp_path: Path) -> None:
    out = tmp_path / "predictions.json"
    script = str(ROOT / "examples" / "gather_predictions.py")
    done = run([PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", script, str(out)])
    assert done.code == 0, done.output
    written = json.loads(out.read_text())
    assert len(written["predictions"]) == 359 and written["parts"] == [119, 120, 120] and written["accuracy"] > 0.85
