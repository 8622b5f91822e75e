"""Every message that a failed collective can have counts as one: also of those that fail because another one did."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep.training.parallel.world import World
from lockstep.training.resilience.hang import is_collective
from tests.ranks import on_ranks


def _several_at_once(world: World) -> list[str]:
    """Rank 0's errors of four collectives that rank 1 takes no part in."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    errors: list[str] = []
    for work in [dist.all_reduce(torch.ones(4), group=group, async_op=True) for _ in range(4) if world.leader]:
        try:
            work.wait()
        except RuntimeError as error:
            assert is_collective(error), f"not known as a failed collective: {error}"
            errors.append(str(error))
    dist.barrier()  # of the default group
    return errors


def test_collectives_that_fail_together() -> None:
    errors, _ = on_ranks(_several_at_once, 2)
    assert len(errors) == 4 and any("pair closure" in error for error in errors), errors
