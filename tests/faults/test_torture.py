"""`lockstep torture`: what resumes holds, and each of three scripts that do not is caught by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.processes import PYTHON, ROOT, clean_env, processes, run, started
from tests.runs import settings

pytestmark = pytest.mark.promise("torture")
SCRIPT = ROOT / "tests/faults/tortured.py"
TORTURE = [PYTHON, "-m", "lockstep", "torture"]
OURS = ["--weights", "{run}/state.json", "--steps-pattern", r"^step (\d+)"]


def tortured(*words: str, flaw: str = "") -> tuple[int, dict[str, Any]]:
    """Returns the exit code and the JSON report."""
    result = run([*TORTURE, "--json", *OURS, *words, "--", PYTHON, str(SCRIPT), "{run}", flaw, "{ranks}"], clean_env())
    assert result.output.startswith("{"), result.output
    report: dict[str, Any] = json.loads(result.output)
    return result.code, report


def test_a_script_that_resumes_holds_whatever_happens() -> None:
    code, report = tortured("--cases", "9", "--moments", "start,step,save,training")
    assert code == 0 and report["held"], report
    assert report["undisturbed"]["deterministic"] and report["undisturbed"]["steps"] == 40
    disturbed = [case for case in report["cases"] if any(case["done"])]
    assert len(disturbed) >= 3 and {case["weights"] for case in report["cases"]} == {"equal"}, report
    assert any(case["codes"][0] < 0 for case in disturbed) and all(case["codes"][-1] == 0 for case in disturbed)


def test_a_full_disk() -> None:
    code, report = tortured("--faults", "disk-full", "--moments", "step", "--cases", "1")
    assert code == 0 and report["cases"][0]["done"][0] == "no file may grow (RLIMIT_FSIZE)", report
    assert report["cases"][0]["codes"] == [1, 0], report


@pytest.mark.parametrize(
    ("flaw", "moment", "says"),
    [
        ("lost-cursor", "step", "1 of 1 tensors differ from the undisturbed run's"),
        ("not-atomic", "save", "does not end with 0 in 5 starts"),
        ("orphan", "step", "left behind: process"),
    ],
)
def test_a_script_that_does_not_is_caught(flaw: str, moment: str, says: str) -> None:
    with started(["sleep", "300"]) as bystander:
        words = ["--faults", "kill-rank", "--moments", moment, "--cases", "2", "--grace-seconds", "1", "--seed", "1"]
        code, report = tortured(*words, flaw=flaw)
        assert code == 1 and not report["held"], report
        assert any(says in problem for case in report["cases"] for problem in case["problems"]), report
        assert bystander.poll() is None  # the same program, which is not of the job
    failed = next(case for case in report["cases"] if case["problems"])
    assert f"--seed 1 --case {failed['case']} -- " in failed["repeat"]
    assert report["undisturbed"]["deterministic"]
    pids = {int(pid) for case in report["cases"] for pid in re.findall(r"process (\d+)", case["verdict"])}
    assert bool(pids) == (flaw == "orphan") and not pids & {pid for pid, state, *_ in processes() if state != "Z"}


def test_random_weights_are_not_compared() -> None:
    code, report = tortured("--faults", "kill-rank", "--moments", "step", "--cases", "1", flaw="random")
    assert code == 0 and report["cases"][0]["weights"] == "not compared", report
    assert report["cases"][0]["verdict"] == "ended, weights not compared" and report["held"], report
    assert not report["undisturbed"]["deterministic"]


@pytest.mark.promise("kill-resume")
def test_a_recipe_on_two_ranks(tmp_path: Path) -> None:
    small = settings(tmp_path / "data", model="tests.nets:Sociable")
    words = ["--json", "--cases", "1", "--faults", "kill-rank", "--moments", "step", "smoke", *small]
    result = run([*TORTURE, *words], clean_env(LOCKSTEP_TEST_PACE="0.1"), timeout=300)
    report = json.loads(result.output)
    assert result.code == 0 and report["undisturbed"]["ranks"] == 2 and report["undisturbed"]["steps"] == 24, report
    (case,) = report["cases"]
    assert any(case["done"]) and case["codes"] == [1, 0] and case["weights"] == "equal", report


@pytest.mark.promise("bad-input")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--seed", "1"], "nothing to torture"),
        (["--faults", "kill-everything", "--", "true"], "'kill-everything' is not one of kill-rank"),
        (["--steps-pattern", "step", "--", "true"], "--steps-pattern has no group"),
        (["--", "no-such-program"], "there is no program 'no-such-program'"),
        (["--", "false"], "undisturbed, the command ended with 1"),
        (["--", "true"], "the run has left no file {run}/**/checkpoints/*/state.safetensors"),
    ],
)
def test_what_cannot_be_tortured_is_a_line(words: list[str], says: str) -> None:
    result = run([*TORTURE, *words], clean_env())
    assert result.code == 2 and result.output.count("\n") == 1 and says in result.output, result.output
