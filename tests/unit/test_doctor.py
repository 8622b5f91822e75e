"""How `lockstep doctor gpu` starts its rows: what fails, dies or hangs keeps no other row from running. Needs no GPU."""

from __future__ import annotations

import importlib
import io
import sys
import time
from pathlib import Path

import pytest

from tests.jobs.helpers import lockstep
from tests.jobs.test_inside_commands import LOCKSTEP
from tests.processes import clean_env, processes, run
from training.contract import UserError
from training.doctor.command import Table, main
from training.doctor.outside import Program, in_processes
from training.doctor.table import REHEARSAL, ROWS, Check, Found

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


def _rows(folder: Path, *names: str, bound: float = 30.0, left: float = 300.0) -> dict[str, Found]:
    """What becomes of these rows of one process, which plays what their names say."""
    found: dict[str, Found] = {}
    script = folder / "played.py"
    script.write_text(PLAYED)
    program = Program((sys.executable, str(script)), 1, folder, folder)
    checks = [Check(name, "alone", "none:none", "…", bound=bound) for name in names]
    in_processes(program, checks, lambda check, told: found.update({check.name: told}), time.monotonic() + left)
    assert list(found) == list(names)
    return found


def test_what_fails_dies_or_hangs_costs_the_others_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.doctor.outside.START_SECONDS", 15.0)
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


def test_without_a_gpu_it_is_one_line(tmp_path: Path) -> None:
    told = run([*LOCKSTEP, "doctor", "gpu", "--only", "strategy"], clean_env(CUDA_VISIBLE_DEVICES=""), 60, tmp_path)
    assert told.code == 2 and told.output.count("\n") == 1, told.output
    assert told.output.startswith("error: nothing to look at: ")


def test_a_row_that_is_none_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--only nothing: there is no such row; known: visible, "):
        main(["gpu", "--only", "speed", "--only", "nothing"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("doctor gpu job.yaml", "FILE belongs to a cluster"),
        ("doctor gpu --namespace x", "--namespace belongs to a cluster"),
        ("doctor k8s --only strategy", "--only belongs to doctor gpu"),
    ],
)
def test_words_that_mean_nothing_are_said(tmp_path: Path, words: str, said: str) -> None:
    (tmp_path / "job.yaml").write_text("name: mine\nrecipe: smoke\n")
    told = lockstep(tmp_path, *words.split())
    assert told.returncode == 2 and said in told.stderr and told.stderr.startswith("error: "), told


def test_every_row_has_its_function_and_its_advice() -> None:
    names = [check.name for check in ROWS]
    assert len(set(names)) == len(names)
    for check in ROWS:
        module, _, function = check.function.partition(":")
        assert callable(getattr(importlib.import_module(f"training.doctor.{module}"), function))
        assert check.advice and 0 < check.bound <= 300


def _told(folder: Path, name: str, out: Path | None) -> Table:
    """A table whose first row has found a GPU of that name, and measured something."""
    table = Table(Program((), 1, folder, folder), ROWS[:1], out, 300, io.StringIO())
    gpu = {"name": name, "capability": "9.0", "bytes": 1}
    table.tell(ROWS[0], Found("ok", "seen", {"speed, GB/s": 3.0}, {"gpus": [gpu]}, 7.0))
    return table


def test_a_rehearsal_is_no_result_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "benchmarks" / "results"
    for out in (
        results,
        results / "mine.json",
        results / "deeper" / "mine.json",
        tmp_path / "x" / ".." / "benchmarks" / "results",
    ):
        with pytest.raises(UserError, match="a rehearsal is no result of a GPU"):
            _told(tmp_path, REHEARSAL, out)
    assert (
        _told(tmp_path, "NVIDIA H100", results).out
        == results / f"doctor-1x-nvidia-h100-{time.strftime('%Y-%m-%d')}.json"
    )
    monkeypatch.chdir(tmp_path)
    assert _told(tmp_path, REHEARSAL, Path("benchmarks/results")).out is None  # where nobody asked for a file


def test_only_what_a_gpu_did_has_rates(tmp_path: Path) -> None:
    for name, expected in ((REHEARSAL, None), ("NVIDIA H100", {"speed, GB/s": 3.0})):
        table = _told(tmp_path, name, None)
        value = table.value()
        assert value.get("rehearsal") == (True if expected is None else None)
        (row,) = value["rows"]
        assert row.get("rates") == expected and ("seconds" in row) == (expected is not None)
        assert isinstance(table.stream, io.StringIO) and ("GB/s" in table.stream.getvalue()) == (expected is not None)
