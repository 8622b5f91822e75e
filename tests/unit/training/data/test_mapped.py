"""What a rank has read of its shards does not stay its memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lockstep.training.data import mapped
from tests import product

pytestmark = pytest.mark.promise("data-memory")


def _resident(folder: Path) -> int:
    """Bytes of the files below a folder that this process has in its memory."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            inside = str(folder) in line
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) << 10
    return found


def test_what_was_read_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MB in 4 files, under a bound of 8 MB."""
    monkeypatch.setattr(mapped, "BOUND", 8 << 20)
    images = np.random.default_rng(0).integers(0, 256, (512, 209, 209, 3), dtype=np.uint8)
    labels = np.arange(512) % 10
    made = product.sharded(tmp_path / "made", (images, labels), (images[:8], labels[:8]), list("0123456789"), 4)
    before, after, look = [0], [0], mapped.Kept.look

    def looked(kept: mapped.Kept) -> None:
        before.append(_resident(made.directory))  # afterwards it may be nothing, where the kernel read far ahead
        look(kept)
        after.append(_resident(made.directory))

    monkeypatch.setattr(mapped.Kept, "look", looked)
    for batch, _ in product.batches(made, 16, resident="never").epoch(0):
        assert np.array_equal(batch.images[batch.rows], images[batch.ids]) and np.array_equal(
            batch.labels, labels[batch.ids]
        )
    most, left = max(before) >> 20, max(after) >> 20
    assert 0 < most < 48 and left < 32, (most, left)  # the bound, and what one batch brings in
