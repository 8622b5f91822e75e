"""`lockstep report` of real runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.events import summary_of
from tests.processes import PYTHON, run
from tests.ranks import training
from tests.report.test_page import Tree

pytestmark = pytest.mark.promise("report")


def test_real_runs_are_compared_with_the_numbers_of_their_files(tiny: list[str], tmp_path: Path) -> None:
    runs = [tmp_path / "first", tmp_path / "second"]
    for path, lr in zip(runs, ("0.05", "0.01")):
        result = training("run", "smoke", "--run-dir", str(path), "--set", *tiny, f"lr={lr}", "log.every=4")
        assert result.code == 0, result.output
        assert not (path / "report.html").exists()
    words = [PYTHON, "-m", "lockstep", "report"]
    result = run([*words, *map(str, runs), "--out", str(tmp_path / "both.html")])
    assert result.code == 0 and result.output.strip() == str(tmp_path / "both.html")
    tree = Tree((tmp_path / "both.html").read_text())
    summary = summary_of(runs[1])
    for text in (f"{summary['accuracy']:.6g}", f"{summary['train_loss']:.6g}", "complete: complete", "optim.lr (differs)",
                 "versions.torch", "start", "images_per_second", "train_loss", f"{runs[0]}: 7 values"):  # fmt: skip
        assert text in tree.texts, text
    result = run([*words, str(runs[0])])
    assert result.code == 0 and result.output.strip() == str(runs[0] / "report.html")
    assert run([*words, str(runs[0])]).code == 0, "a report may be replaced"
