"""What a rank has read of its shards does not stay its memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.training import config
from lockstep.training.data import mapped, shards, sources
from lockstep.training.data.loader import Loader
from lockstep.training.data.shards import Manifest, Samples
from lockstep.training.parallel.world import World


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """64 MB in 4 files."""
    images = np.random.default_rng(0).integers(0, 256, (512, 209, 209, 3), dtype=np.uint8)
    labels = np.arange(512) % 10
    raw = sources.Raw((images, labels), (images[:8], labels[:8]), [str(n) for n in range(10)])
    return shards.write(raw, tmp_path_factory.mktemp("bound") / "shards", "array", 4)


def _resident(folder: Path) -> int:
    """Bytes of the files below a folder that this process has in its memory."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            inside = str(folder) in line
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) << 10
    return found


@pytest.mark.parametrize("resident", ["never", "always"])
def test_what_was_read_is_given_back(made: Manifest, monkeypatch: pytest.MonkeyPatch, resident: str) -> None:
    monkeypatch.setattr(mapped, "BOUND", 8 << 20)
    settings = config.Config(global_batch_size=16, data=config.Data(resident=resident))  # type: ignore[arg-type]
    loader = Loader(settings, World(), made, 16, 1)
    whole, labels = Samples.open(made, "train", 0, 512).all()
    whole = whole.clone()
    before, after, look = [0], [0], mapped.Kept.look

    def looked(kept: mapped.Kept) -> None:
        before.append(_resident(made.directory))  # afterwards it may be nothing, where the kernel read far ahead
        look(kept)
        after.append(_resident(made.directory))

    monkeypatch.setattr(mapped.Kept, "look", looked)
    for batch in loader.epoch(0):
        assert torch.equal(batch.images[batch.rows], whole[batch.ids]) and torch.equal(batch.labels, labels[batch.ids])
    if resident == "never":
        most = max(before)
        assert 0 < most < 48 << 20 and max(after) < 32 << 20, (
            most >> 20,
            max(after) >> 20,
        )  # the bound, and what one batch brings in


def test_one_file_and_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "BOUND", 1)
    vectors = np.random.default_rng(0).normal(size=(50, 33)).astype(np.float32)
    raw = sources.Raw((vectors, np.arange(50)), (vectors[:3], np.arange(3)), [str(n) for n in range(50)])
    samples = Samples.open(shards.write(raw, tmp_path / "out", "array", 1), "train", 0, 50)
    for _ in range(3):
        ids = torch.randperm(50)
        taken, labels = samples.take(ids)
        assert np.array_equal(taken.numpy(), vectors[ids]) and torch.equal(labels, ids)
