"""How `lockstep doctor gpu` starts its rows: what fails, dies or hangs keeps no other row from running. Needs no GPU."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.training.doctor.outside import Program, in_processes
from tests import product
from tests.processes import processes
from tests.ranks import training

PLAYED = """
import json, os, subprocess, sys, time
folder, names = sys.argv[sys.argv.index("--inside") + 1], sys.argv[sys.argv.index("--alone") + 1:]
open(f"{folder}/starts", "a").write(names[0] + " ")
if names[0] == "unborn":
    sys.exit("no GPU answered")
open(f"{folder}/0.begun", "w")
for name in names:
    if name == "hangs":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        open(f"{folder}/child", "w").write(str(child.pid))
        time.sleep(600)
    if name == "dies":
        print("the driver is gone", flush=True)
        os.kill(os.getpid(), 9)
    facts = {"raised": True} if name == "raises" else {}
    line = {"name": name, "result": "failed" if facts else "ok", "detail": name, "rates": {}, "facts": facts, "seconds": 0}
    with open(f"{folder}/0.jsonl", "a") as file:
        file.write(json.dumps(line) + "\\n")
    if facts:
        sys.exit(1)
"""


def _rows(folder: Path, *names: str, bound: float = 30.0, left: float = 300.0) -> dict[str, Any]:
    """What becomes of these rows of one process, which plays what their names say."""
    found: dict[str, Any] = {}
    script = folder / "played.py"
    script.write_text(PLAYED)
    checks = product.doctor_rows(*names, bound=bound)
    program = Program((sys.executable, str(script)), 1, folder, folder)
    in_processes(program, checks, lambda check, told: found.update({check.name: told}), time.monotonic() + left)
    assert list(found) == list(names)
    return found


def test_what_fails_dies_or_hangs_costs_the_others_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.training.doctor.outside.START_SECONDS", 15.0)
    found = _rows(tmp_path, "one", "raises", "two", "dies", "three", "hangs", "four", bound=2.0)
    assert {name: row.result for name, row in found.items()} == {
        "one": "ok", "raises": "failed", "two": "ok", "dies": "failed", "three": "ok", "hangs": "failed", "four": "ok",
    }  # fmt: skip
    assert found["dies"].detail == "the driver is gone" and found["hangs"].detail == "no answer within 2 s"
    assert (tmp_path / "starts").read_text().split() == ["one", "two", "three", "four"]
    child = int((tmp_path / "child").read_text())
    assert child not in [pid for pid, state, *_ in processes() if state != "Z"], "what a row has started outlives it"


def test_processes_that_do_not_start_are_tried_once(tmp_path: Path) -> None:
    found = _rows(tmp_path, "unborn", "one", "two")
    assert [row.result for row in found.values()] == ["failed", "not tried", "not tried"]
    assert found["unborn"].detail == "no GPU answered" and (tmp_path / "starts").read_text().split() == ["unborn"]


def test_no_row_goes_on_when_the_time_of_all_is_over(tmp_path: Path) -> None:
    began = time.monotonic()
    found = _rows(tmp_path, "one", "hangs", "two", left=4.0)
    assert [row.result for row in found.values()] == ["ok", "not tried", "not tried"] and time.monotonic() - began < 20
    assert found["two"].detail == "the time is over" and (tmp_path / "starts").read_text().split() == ["one"]


def test_what_it_cannot_do_is_one_line() -> None:
    for words, named in (([], "nothing to look at"), (["--only", "nothing"], "--only nothing")):
        told = training("doctor", "gpu", *words)
        assert told.code == 2 and told.output.count("\n") == 1 and named in told.output, told
