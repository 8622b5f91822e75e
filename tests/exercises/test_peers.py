"""benchmarks/peers.py as a program: every peer takes its steps, and its numbers reach the table and the file."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.processes import ROOT, clean_env
from tests.warm.gang import python


@pytest.mark.parametrize("peer", ["plain DDP", "Lightning", "Accelerate"])
def test_a_peer_and_lockstep_train_the_same_images_in_turn(peer: str, tmp_path: Path) -> None:
    if peer != "plain DDP" and importlib.util.find_spec(peer.lower()) is None:
        pytest.skip(f"{peer} is not installed: pip install -e '.[peers]'")
    out = tmp_path / "peers.json"
    words = ["--peers", peer, "Lockstep", "--stem", "small", "--rounds", "1", "--steps", "2", "--warm-up", "1"]
    words += ["--batch", "2", "--timeout", "120", "--out", str(out)]
    # Lightning and Accelerate warn of what is none of our business.
    env = clean_env(PYTHONWARNINGS="ignore", OMP_NUM_THREADS="1")
    done = python(str(ROOT / "benchmarks" / "peers.py"), *words, env=env, timeout=300)
    assert done.code == 0, done.output
    rows = json.loads(out.read_text())["stems"]["small"]
    assert list(rows) == [peer, "Lockstep"]
    for name, row in rows.items():
        assert row["images_per_second"] > 0 and row["start_up"] > 0 and row["peak_mb"] > 50
        assert f"{name:28} {row['images_per_second']:9.1f}" in done.output
    ratio = rows["Lockstep"]["images_per_second"] / rows[peer]["images_per_second"]
    assert rows[peer]["lockstep_over_it"] == pytest.approx(ratio) and f"{ratio:9.2f} × as fast" in done.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch", "0"], "must be a whole number from 1, got '0'"),
        (["--data-root", "/nowhere"], "error: no CIFAR-10 below /nowhere"),
    ],
)
def test_wrong_words_are_told_before_anything_is_measured(words: list[str], message: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = python(str(ROOT / "benchmarks" / "peers.py"), "--peers", "plain DDP", *words, "--out", str(out))
    assert done.code == 2 and message in done.output and "Traceback" not in done.output and not out.exists(), (
        done.output
    )
