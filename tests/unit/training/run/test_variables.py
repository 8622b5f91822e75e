"""What a save reads of the variables of a script: little of a large one, and no file."""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.training.run.bytecode import spaces
from lockstep.training.run.variables import _contents, _print

NUMBERS = list(range(100_000))


def printed(value: Any) -> str:
    return repr(_print(value, set(), _contents))


@pytest.mark.parametrize(
    "value",
    [
        NUMBERS, deque(NUMBERS), tuple(NUMBERS), set(NUMBERS), dict.fromkeys(NUMBERS), OrderedDict.fromkeys(NUMBERS),
        "x" * 10_000_000, [[[1.5] * 300] * 300] * 300, [dict.fromkeys(range(300))] * 300,
    ],
)  # fmt: skip
def test_a_large_variable_is_read_at_its_ends(value: Any) -> None:
    """Each save reads every variable while the training waits."""
    assert len(printed(value)) < 200_000


def test_both_ends_and_the_length_count() -> None:
    numbers = dict.fromkeys(NUMBERS, 0)
    assert len({printed(value) for value in (numbers, numbers | {0: 1}, numbers | {99_999: 1}, numbers | {-1: 0})}) == 4
    assert printed(set(NUMBERS)) != printed({*NUMBERS, -1})
    assert printed("x" * 5000) != printed("x" * 5001)


def test_a_file_is_not_read(tmp_path: Path) -> None:
    """Its samples may lie on a disk of another machine."""
    np.arange(10.0).tofile(tmp_path / "data")
    data = np.memmap(tmp_path / "data", dtype="float64", mode="r")
    for value in (data, data[3:], np.asarray(data).reshape(2, 5)):
        assert _print(value, set(), _contents) is None
    assert _print(np.array(data), set(), _contents) is not None


def test_a_look_keeps_no_variable_and_empties_no_dictionary() -> None:
    """Before Python 3.13 a frame keeps the copy of its variables, and `locals()` returns the same copy."""

    def script(with_locals: bool) -> None:
        mine = locals() if with_locals else {"with_locals": False}
        big = torch.zeros(1)
        alive = weakref.ref(big)
        looks = [*spaces()]
        assert "big" in looks[0]
        del big, looks
        assert mine["with_locals"] is with_locals and (with_locals or alive() is None)

    script(False)
    script(True)
