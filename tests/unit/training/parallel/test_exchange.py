from __future__ import annotations

from typing import Any

from lockstep.training.parallel.exchange import raise_together
from tests.product import UserError
from tests.ranks import on_ranks


def _agreeing(world: Any) -> list[str]:
    raise_together(None, world)
    said = []
    for error in (UserError("no data") if world.rank == 1 else None, ValueError("a bug") if world.leader else None):
        try:
            raise_together(error, world)
        except (UserError, RuntimeError) as caught:
            said.append(f"{type(caught).__name__}: {caught}")
    return said


def test_an_error_on_one_rank_stops_all_with_its_name() -> None:
    assert on_ranks(_agreeing, 2) == [["UserError: rank 1: no data", "RuntimeError: rank 0: a bug"]] * 2
