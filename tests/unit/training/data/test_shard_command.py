"""`shard` says what it made."""

from __future__ import annotations

import json
from pathlib import Path

from tests.pictures import write_pictures
from tests.ranks import training


def test_shard_shows_counts_size_and_statistics(tmp_path: Path) -> None:
    write_pictures(tmp_path / "train", 31)
    write_pictures(tmp_path / "val", 4)
    (tmp_path / "train/cat/bad.png").write_bytes(b"x")
    words = ["shard", "smoke", "--set", "data.source=images", f"data.root={tmp_path}", "data.workers=1"]
    words += ["data.options={size: 16, test: val, max_broken: 0.1}", "data.num_shards=2"]
    told = training(*words)
    assert told.code == 0 and "31 training and 4 test images" in told.output, told.output
    lines = told.output.splitlines()
    table = [line.split() for line in lines]
    assert all(
        [name, *counts] in table for name, *counts in (["bird", "11", "2"], ["cat", "10", "1"], ["dog", "10", "1"])
    )
    assert any("cat/bad.png" in line for line in lines)
    (folder,) = (tmp_path / "shards").glob("images-*/")
    mean = json.loads((folder / "manifest.json").read_text())["mean"]
    advice = next(line for line in lines if f"data.mean=[{','.join(f'{x:.4f}' for x in mean)}]" in line)
    again = training(*words, *(word.partition(" ")[0] for word in advice.split(": set ")[1].split()))
    assert again.code == 0 and "set data.mean" not in again.output, "the words fit, and the shards are found again"
