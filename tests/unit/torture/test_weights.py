"""Weights that cannot be read are one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.torture import weights
from lockstep.training.contract import UserError


def test_an_error_without_a_text_is_named_by_its_type(tmp_path: Path) -> None:
    (tmp_path / "cut_off.pt").touch()
    with pytest.raises(UserError, match=r"cut_off\.pt cannot be read as weights: EOFError$"):
        weights.of_file(tmp_path / "cut_off.pt")
