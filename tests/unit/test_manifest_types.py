"""A checkpoint's manifest that is sound JSON and nothing that we wrote: refused as a damaged one, whatever it holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.training.checkpoint import store
from lockstep.training.checkpoint.store import CorruptCheckpoint, Writer, newest_verified, verify
from lockstep.training.manifest import seal


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The newest of two checkpoints."""
    writer = Writer(tmp_path / "checkpoints", keep=2, keep_best=False)
    for step in (1, 2):
        newest = writer.save(step, {"w": torch.ones(3)}).result().path
    writer.wait()
    return newest


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "text", ["[]", "3", "null", '"manifest"', "{}", '{"sha256": {}}', DEEP], ids=lambda text: text[:20]
)
def test_json_of_another_kind(saved: Path, text: str) -> None:
    (saved / "manifest.json").write_text(text)
    with pytest.raises(CorruptCheckpoint, match=r"manifest\.json is malformed"):
        verify(saved)
    found = newest_verified(saved.parent)
    assert found is not None and store.step_of(found) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"files": None}, {"files": []}, {"files": {"state.json": 1, "state.safetensors": 2}}, {"format": []}, {"format": 3},
        {"format": True}, {"step": {}}, {"files": {"state.json": {"bytes": 1e999, "sha256": "x"}, "state.safetensors": {}}},
        {"files": {"state.json": {"bytes": None, "sha256": "x"}, "state.safetensors": {"bytes": 1, "sha256": "x"}}},
        {"files": {"state.json": {"bytes": "many", "sha256": "x"}, "state.safetensors": {"bytes": 1, "sha256": "x"}}},
    ],
    ids=str,
)  # fmt: skip
def test_values_of_another_kind_under_their_own_seal(saved: Path, change: dict[str, Any]) -> None:
    """As a program that is not ours, or a later version of it, might write them."""
    path = saved / "manifest.json"
    manifest = {key: value for key, value in json.loads(path.read_text()).items() if key != "sha256"} | change
    path.write_text(json.dumps({**manifest, "sha256": seal(manifest)}))
    with pytest.raises(CorruptCheckpoint, match=r"manifest\.json is malformed"):
        verify(saved)
