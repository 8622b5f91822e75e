"""What surrounds a step grows no faster than the number of ranks: messages, listings and file reads, counted by the kernel."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.scale import Counts, calls
from lockstep.training import config as configuration
from lockstep.training import files
from lockstep.training.parallel.world import World
from tests.ranks import on_ranks

SIZES = (2, 8)
LINEAR = 7.0
"""(8 − 1) / (2 − 1): what is sent once a rank to rank 0, or from it, grows so. Its square would be 28."""
FREE = [
    "data.source=synthetic", "data.options={n: 96, n_test: 24, size: 8, noise: 1.5}", "data.num_shards=5", "augment.crop=1",
    "model_options={width: 0.0625}", "global_batch_size=48", "uneven=weight", "schedule=[]", "log.report=false", "metrics.port=0",
]  # fmt: skip


def _counted(world: World, folder: str) -> dict[str, dict[str, float]]:
    """Of this rank: messages and bytes of each exchange; names listed by the exporter; files read to be verified."""
    from lockstep.training.observe.exporter import Exporter
    from lockstep.training.run import prepare

    root = Path(folder)
    counts = Counts(int(os.environ["MASTER_PORT"]), [root])
    config = configuration.load("smoke", [f"data.root={root / 'data'}", *FREE])
    with _verifying() as verified:
        prepared = prepare.prepare(config, world, root / "run", False)
    found: dict[str, dict[str, float]] = {"shards": dict.fromkeys(verified, 1)}
    before = counts.now()
    prepared.exporter._write_textfiles()
    second = Exporter(config.metrics, world, root / "run", {}, sweeps=False)
    second.close(0)
    found["exporter"] = {"entries": counts.now().since(before).entries}
    for name, (call, _) in calls(world, prepared.state).items():
        call()
        before = counts.now()
        call()
        spent = counts.now().since(before)
        found[name] = {"messages": spent.messages, "bytes": spent.bytes}
    prepared.exporter.close(0)
    if prepared.run is not None:
        prepared.run.close()
    return found


@contextlib.contextmanager
def _verifying() -> Iterator[list[str]]:
    """The names of the files that this rank reads to verify them."""
    verified: list[str] = []
    hashed = files.sha256
    files.sha256 = lambda path: (verified.append(path.name), hashed(path))[1]
    try:
        yield verified
    finally:
        files.sha256 = hashed


def _verified_on_two_nodes(world: World, folder: str) -> list[str]:
    from lockstep.training.run import prepare

    place = dataclasses.replace(world, local_rank=world.rank % 2, local_size=2, node=world.rank // 2, nodes=2)
    config = configuration.load("smoke", [f"data.root={Path(folder) / 'data'}", *FREE])
    with _verifying() as verified:
        prepared = prepare.prepare(config, place, Path(folder) / "run", False)
    prepared.exporter.close(0)
    if prepared.run is not None:
        prepared.run.close()
    return verified


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, dict[str, float]]]]:
    return {size: on_ranks(_counted, size, str(tmp_path_factory.mktemp("growth"))) for size in SIZES}


@pytest.mark.parametrize(
    "exchange",
    [
        "consensus, a step", "agreement, no error", "agreement, an error", "checkpoint gathered", "checkpoint sent",
        "checkpoint sent, other world size", "evaluation merged", "closeness", "whose checkpoint, alone",
    ],
)  # fmt: skip
def test_messages_and_bytes_of_all_ranks_grow_no_faster_than_ranks(
    counted: dict[int, list[dict[str, dict[str, float]]]], exchange: str
) -> None:
    for what in ("messages", "bytes"):
        few, many = (sum(rank[exchange][what] for rank in counted[size]) for size in SIZES)
        # A quarter more for acknowledgements that travel by themselves; n log n would be 1.7 times as much.
        assert few > 0 and many / few < 1.25 * LINEAR, f"{exchange}: {few:.0f} {what} of 2 ranks, {many:.0f} of 8"


def test_a_rank_lists_no_files_of_the_others(counted: dict[int, list[dict[str, dict[str, float]]]]) -> None:
    assert [rank["exporter"]["entries"] for rank in counted[8]] == [0] * 8


def test_a_node_verifies_each_shard_once(counted: dict[int, list[dict[str, dict[str, float]]]]) -> None:
    for size in SIZES:
        _assert_verified_once([list(rank["shards"]) for rank in counted[size]])


def test_each_of_two_nodes_verifies_each_shard_once(tmp_path: Path) -> None:
    """Nodes may have disks of their own."""
    verified = on_ranks(_verified_on_two_nodes, 4, str(tmp_path))
    for node in (verified[:2], verified[2:]):
        _assert_verified_once(node)


def _assert_verified_once(ranks: list[list[str]]) -> None:
    every = sorted(name for names in ranks for name in names)
    assert len(every) == len(set(every)) == 6, every  # five to train and one to test
    assert max(map(len, ranks)) <= -(-6 // len(ranks))
