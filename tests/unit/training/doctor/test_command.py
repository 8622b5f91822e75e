"""What `lockstep doctor gpu` writes: a rehearsal on a stand-in is no result of a GPU."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pytest

from lockstep.training.doctor.command import ROWS, Outcome, Program, Table
from lockstep.training.doctor.table import REHEARSAL
from tests.product import UserError


def _told(folder: Path, name: str, out: Path | None, result: str = "ok") -> Table:
    """A table whose first row has found a GPU of that name, and measured something; where it failed, it says nothing."""
    table = Table(Program((), 1, folder, folder), ROWS[:1], out, 300, io.StringIO())
    gpu = {"name": name, "capability": "9.0", "bytes": 1}
    table.tell(ROWS[0], Outcome(result, "seen", {"speed, GB/s": 3.0}, {"gpus": [gpu]} if result == "ok" else {}, 7.0))
    return table


def test_a_rehearsal_is_no_result_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "benchmarks/results"
    for out in (results, results / "mine.json", results / "deeper/mine.json", tmp_path / "x/../benchmarks/results"):
        with pytest.raises(UserError, match="rehearsal"):
            _told(tmp_path, REHEARSAL, out)
    name = f"doctor-1x-nvidia-h100-{time.strftime('%Y-%m-%d')}.json"
    assert _told(tmp_path, "NVIDIA H100", results).out == results / name
    said = f"print('a warning'); print({json.dumps([REHEARSAL])!r})"
    monkeypatch.setattr("lockstep.training.doctor.outside._NAMES", said)  # what is asked where the first row failed
    with pytest.raises(UserError, match="rehearsal"):
        _told(tmp_path, "", results, "failed")


@pytest.mark.parametrize(("name", "rates"), [(REHEARSAL, None), ("NVIDIA H100", {"speed, GB/s": 3.0})])
def test_only_what_a_gpu_did_has_rates(tmp_path: Path, name: str, rates: object) -> None:
    table = _told(tmp_path, name, None)
    (row,) = table.value()["rows"]
    assert row.get("rates") == rates and ("seconds" in row) == (rates is not None)
    assert isinstance(table.stream, io.StringIO) and ("GB/s" in table.stream.getvalue()) == (rates is not None)
