"""How `lockstep doctor gpu` starts its rows and what it shows: what fails, dies or hangs keeps no other row from running."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

from lockstep.tools import doctor
from tests.processes import PYTHON, run

PLAYED = """
import json, sys, time
ranks, name = int(sys.argv[sys.argv.index("--ranks") + 1]), sys.argv[-1]
assert sys.argv[3] == "launch" and sys.argv[-3:-1] == ["-m", "lockstep.tools.doctor"]
for rank in range(ranks):
    lost = name == "dies" or (name == "one dies" and rank == 1)
    values = {"result": "failed" if name == "fails" and rank == 1 else "ok", "detail": name, "rates": {"speed": 3.0}, "facts": {}}
    print(f"[{rank}] " + ("the driver is gone" if lost else json.dumps([f"rank {rank}", values])))
sys.exit(124 if name == "hangs" else 0)
"""
"""Stands for the launcher and its ranks."""


def _table(folder: Path, *rows: tuple[str, str], gpus: int = 2) -> tuple[list[dict[str, Any]], str]:
    """Returns the rows and the output, for rows of a name and its needs."""
    script = folder / "played.py"
    script.write_text(PLAYED)
    checks = [doctor.Probe(name, doctor.visible, "do this", gpus=2, needs=needs) for name, needs in rows]
    output = io.StringIO()
    return doctor.table(checks, gpus, (sys.executable, str(script)), output)["rows"], output.getvalue()


def test_what_fails_or_dies_keeps_no_other_row_from_running(tmp_path: Path) -> None:
    names = [("visible", ""), ("fails", ""), ("dies", ""), ("one dies", ""), ("behind", "fails"), ("last", "visible")]
    rows, output = _table(tmp_path, *names)
    assert [(row["name"], row["result"], row["detail"]) for row in rows] == [
        ("visible", "ok", "visible"),
        ("fails", "failed", "rank 1: fails"),
        ("dies", "failed", "[1] the driver is gone"),
        ("one dies", "failed", "[1] the driver is gone"),
        ("behind", "not tried", "see the row 'fails'"),
        ("last", "ok", "last"),
    ]
    assert [row.get("advice") for row in rows] == [None, "do this", "do this", "do this", None, None]
    assert output.count("→ do this") == 3 and "last; speed 3" in output and rows[-1]["rates"] == {"speed": 3.0}
    rows, _ = _table(tmp_path, ("visible", ""), gpus=1)
    assert [(row["result"], row["detail"]) for row in rows] == [("not tried", "one GPU")]


def test_what_it_cannot_do_is_one_line() -> None:
    for words, message in (([], "nothing to look at"), (["--only", "nothing"], "--only nothing")):
        result = run([PYTHON, "-m", "lockstep", "doctor", "gpu", *words])
        assert result.code == 2 and result.output.count("\n") == 1 and message in result.output, result
