"""Messages, listings and file reads around a step grow no faster than the number of ranks. The kernel counts them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.scale import Counts, calls
from lockstep.training.parallel.world import World
from tests import product
from tests.product import RunBegun, verified_files
from tests.ranks import on_ranks

SIZES = (2, 8)
LINEAR = 7.0
"""(8 − 1) / (2 − 1): one message a rank, to or from rank 0, grows so. Messages between all pairs grow 28 times."""
FREE = [
    "augment.crop=1", "model_options={width: 0.0625}", "global_batch_size=48", "uneven=weight", "schedule=[]",
]  # fmt: skip


def _counted(world: World, folder: str) -> dict[str, Any]:
    """Returns this rank's messages and bytes of each exchange, names that its exporter lists, and shards that it verifies."""
    root = Path(folder)
    counts = Counts(int(os.environ["MASTER_PORT"]), [root])
    with (
        verified_files() as verified,
        RunBegun(world, root / "run", f"data.shards={root.parent / 'shards'}", *FREE) as run,
    ):
        counted: dict[str, Any] = {"verified": verified}
        dist.barrier()  # all of them have written
        before = counts.now()
        run.write_metrics()
        counted["listed"] = counts.now().since(before).entries
        for name, (call, _) in calls(world, run.state).items():
            call()
            before = counts.now()
            call()
            counted[name] = counts.now().since(before)
    return counted


@pytest.mark.promise("growth", "data-memory")
def test_messages_bytes_and_listings_of_all_ranks_grow_no_faster_than_ranks(tmp_path: Path) -> None:
    made = product.source("synthetic", tmp_path, n=96, n_test=24, size=8, noise=1.5)
    product.sharded(tmp_path / "shards", made.train, made.test, made.classes, 5)
    counted = {size: on_ranks(_counted, size, str(tmp_path / str(size))) for size in SIZES}
    for size in SIZES:
        verified = [name for rank in counted[size] for name in rank["verified"]]
        assert len(verified) == len(set(verified)) == 6, verified  # five to train and one to test
        assert max(len(rank["verified"]) for rank in counted[size]) <= -(-6 // size)
        assert [rank["listed"] for rank in counted[size]] == [0] * size, "a rank lists no files of the others"
    exchanges = counted[2][0].keys() - {"verified", "listed"}
    assert len(exchanges) == 8
    for exchange in exchanges:
        for what in ("messages", "bytes"):
            few, many = (sum(getattr(rank[exchange], what) for rank in counted[size]) for size in SIZES)
            # A quarter more for acknowledgements that travel by themselves; n log n would be 1.7 times as much.
            assert few > 0 and many / few < 1.25 * LINEAR, f"{exchange}: {few} {what} of 2 ranks, {many} of 8"
