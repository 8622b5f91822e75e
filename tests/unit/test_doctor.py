"""How `lockstep doctor gpu` starts its rows: what fails, dies or hangs keeps no other row from running. Needs no GPU."""

from __future__ import annotations

import importlib
import io
import json
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from lockstep.training import config
from lockstep.training.contract import EXIT_DONE, SUMMARY_FILE, UserError
from lockstep.training.doctor import devices, speedrun
from lockstep.training.doctor.command import Table, main
from lockstep.training.doctor.outside import Ended, Program, in_processes
from lockstep.training.doctor.table import REHEARSAL, ROWS, Check, Outcome, Place
from lockstep.training.parallel.world import World
from tests.jobs.helpers import lockstep
from tests.jobs.test_inside_commands import LOCKSTEP
from tests.processes import clean_env, processes, run

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


def _rows(folder: Path, *names: str, bound: float = 30.0, left: float = 300.0) -> dict[str, Outcome]:
    """What becomes of these rows of one process, which plays what their names say."""
    found: dict[str, Outcome] = {}
    script = folder / "played.py"
    script.write_text(PLAYED)
    program = Program((sys.executable, str(script)), 1, folder, folder)
    checks = [Check(name, "alone", "none:none", "…", bound=bound) for name in names]
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
        assert callable(getattr(importlib.import_module(f"lockstep.training.doctor.{module}"), function))
        assert check.advice and 0 < check.bound <= 300


def _told(folder: Path, name: str, out: Path | None) -> Table:
    """A table whose first row has found a GPU of that name, and measured something."""
    table = Table(Program((), 1, folder, folder), ROWS[:1], out, 300, io.StringIO())
    gpu = {"name": name, "capability": "9.0", "bytes": 1}
    table.tell(ROWS[0], Outcome("ok", "seen", {"speed, GB/s": 3.0}, {"gpus": [gpu]}, 7.0))
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


@pytest.mark.parametrize(("names", "file"), [(["NVIDIA H100"] * 2, "2x-nvidia-h100"), ([], "2x-unknown")])
def test_a_first_row_that_failed_without_a_word_keeps_the_gpus_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], file: str
) -> None:
    _call_gpus(monkeypatch, names)
    table = Table(Program((), 2, tmp_path, tmp_path), ROWS[:1], tmp_path, 300, io.StringIO())
    table.tell(ROWS[0], Outcome("failed", "the driver is gone"))
    assert table.out == tmp_path / f"doctor-{file}-{time.strftime('%Y-%m-%d')}.json"


def _call_gpus(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    """What the process says that is asked for their names; it ends badly where there are none."""
    said = f"import sys; print('a warning'); print({json.dumps(names)!r}); sys.exit({int(not names)})"
    monkeypatch.setattr("lockstep.training.doctor.outside._NAMES", said)


def test_a_rehearsal_is_known_where_its_first_row_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _call_gpus(monkeypatch, [REHEARSAL] * 2)
    results = tmp_path / "benchmarks" / "results"
    table = Table(Program((), 2, tmp_path, tmp_path), ROWS[:1], results, 300, io.StringIO())
    with pytest.raises(UserError, match="a rehearsal is no result of a GPU"):
        table.tell(ROWS[0], Outcome("failed", "it wrote nothing"))


@pytest.mark.parametrize(
    ("arch", "said"), [("sm_90", "GPU 0 (Mine) is sm_80, and this torch has sm_90"), ("sm_80", "multiplies wrongly")]
)
def test_a_gpu_that_fails_is_in_the_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, said: str
) -> None:
    gpu = types.SimpleNamespace(name="Mine", major=8, minor=0, total_memory=1)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: [arch])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 0))
    monkeypatch.setattr(torch, "ones", lambda *size, device: torch.zeros(*size))
    found = devices.visible(Place(World(), {}, str(tmp_path)))
    assert found.result == "failed" and said in found.detail
    assert found.facts["gpus"] == [{"name": "Mine", "capability": "8.0", "bytes": 1}]


class _Played(Program):
    """A speedrun that ends as the test wants."""

    ended = Ended(EXIT_DONE, "")
    accuracy = 0.94
    asked: ClassVar[list[str]] = []

    def run(self, command: Sequence[str], bound: float, **env: str) -> Ended:
        self.asked[:] = command
        if self.ended.code == EXIT_DONE:
            run = Path(command[command.index("--run-dir") + 1])
            run.mkdir()
            (run / SUMMARY_FILE).write_text(json.dumps({"trained_seconds": 2.5, "accuracy": self.accuracy}))
        return self.ended


def _speedrun(folder: Path, rehearsal: bool = False, **played: object) -> Outcome:
    kind = type("Played", (_Played,), played)
    return speedrun.train(kind(("python", "-m", "lockstep.training"), 4, folder, folder / "data", rehearsal), 100)


def test_a_speedrun_is_judged_by_its_accuracy(tmp_path: Path) -> None:
    data = tmp_path / "data" / "cifar-10-batches-bin"
    assert _speedrun(tmp_path) == Outcome("not tried", f"no CIFAR-10 below {tmp_path / 'data'} (--data-root)")
    data.mkdir(parents=True)
    (data / "test_batch.bin").touch()
    assert _speedrun(tmp_path, rehearsal=True).result == "not tried"
    good = _speedrun(tmp_path)
    assert good == Outcome("ok", "accuracy 0.9400, at least 0.93", {"training, s": 2.5, "accuracy": 0.94})
    (tmp_path / "speedrun" / SUMMARY_FILE).unlink()
    (tmp_path / "speedrun").rmdir()
    bad = _speedrun(tmp_path, accuracy=0.9299)
    assert bad.result == "failed" and bad.detail == "accuracy 0.9299, at least 0.93" and bad.rates["accuracy"] == 0.9299


def test_a_speedrun_that_ends_badly_says_how(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "test_batch.bin").touch()
    assert _speedrun(tmp_path, ended=Ended(None, "step 3")) == Outcome("failed", "it had to be ended")
    assert _speedrun(tmp_path, ended=Ended(1, "a\nout of memory\n")).detail == "it ended with 1: out of memory"


def test_the_speedrun_is_the_recipe_on_one_gpu_with_settings_that_there_are(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "test_batch.bin").touch()
    _speedrun(tmp_path)
    words = _Played.asked
    assert words[:8] == ["python", "-m", "lockstep.training", "launch", "--ranks", "1", "--max-restarts", "0"]
    assert words[words.index("run") :][:3] == ["run", "speedrun", "--run-dir"]
    settings = config.load("speedrun", words[words.index("--set") + 1 :])
    assert (settings.precision, settings.capture, settings.device) == ("float16", "auto", "cuda")
    assert Path(settings.data.root) == tmp_path / "data"


def test_only_what_a_gpu_did_has_rates(tmp_path: Path) -> None:
    for name, expected in ((REHEARSAL, None), ("NVIDIA H100", {"speed, GB/s": 3.0})):
        table = _told(tmp_path, name, None)
        value = table.value()
        assert value.get("rehearsal") == (True if expected is None else None)
        (row,) = value["rows"]
        assert row.get("rates") == expected and ("seconds" in row) == (expected is not None)
        assert isinstance(table.stream, io.StringIO) and ("GB/s" in table.stream.getvalue()) == (expected is not None)
