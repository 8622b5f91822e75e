"""The table of mutants is whole: every promise has one, and every one still fits the code and the tests."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest
import yaml

from tests.mutants.runner import judge
from tests.mutants.table import GUARANTEES, NEEDS, ROOT, Mutant, lines_of, load, promises

MUTANTS = load()
LINES = promises((ROOT / GUARANTEES).read_text(encoding="utf-8"))
by_name = pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.name)


@functools.cache
def _tests_of(file: str) -> set[str]:
    """The test functions of a file, those that it takes from another one, too, without running it."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    taken = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    return {name for name in own | taken if name.startswith("test_")}


def test_every_promise_has_a_mutant() -> None:
    assert len(LINES) > 70, "the table in the guarantees was not read"
    broken = {line for mutant in MUTANTS for line in lines_of(mutant, LINES)}
    assert [line for line in LINES if line not in broken] == []


def test_names_are_their_own() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert sorted(set(names)) == sorted(names)


@by_name
def test_a_mutant_breaks_lines_that_exist(mutant: Mutant) -> None:
    assert lines_of(mutant, LINES)
    assert mutant.needs in NEEDS


@by_name
def test_the_place_is_there_once_and_what_stands_there_then_can_be_read(mutant: Mutant) -> None:
    """Code that cannot be parsed would be noticed by any test, and so by none in particular."""
    assert mutant.file.split("/")[0] in ("training", "jobs", "docker", "deploy"), "the mistake is in the product"
    text = mutant.applied((ROOT / mutant.file).read_text(encoding="utf-8"))
    if mutant.file.endswith(".py"):
        ast.parse(text)
    if mutant.file.endswith(".yaml"):
        list(yaml.safe_load_all(text))


@by_name
def test_the_selected_tests_exist(mutant: Mutant) -> None:
    for selected in mutant.tests:
        file, _, name = selected.partition("::")
        assert name.partition("[")[0] in _tests_of(file), selected


REPORT = "<testsuites><testsuite>{}</testsuite></testsuites>"
CASE = '<testcase classname="tests.unit.test_x" name="test_y">{}</testcase>'


@pytest.mark.parametrize(
    ("inside", "code", "verdict", "by"),
    [
        (
            '<failure message="m">E   assert 1 == 2\nE    +  where</failure>',
            1,
            "caught",
            "tests/unit/test_x.py::test_y",
        ),
        ('<error message="failed on setup with &quot;x&quot;">E   assert 0</error>', 1, "caught", "a fixture of it"),
        ('<error message="collection failure">E   ImportError: x</error>', 2, "invalid", "ImportError: x"),
        ('<skipped message="s"/>', 0, "invalid", "all 1 tests were skipped"),
        ("", 0, "survived", "1 passed"),
        ("", 3, "invalid", "pytest ended with 3"),
    ],
)
def test_what_pytest_reports_is_told_apart(tmp_path: Path, inside: str, code: int, verdict: str, by: str) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT.format(CASE.format(inside)))
    found = judge(report, code, "")
    assert found[0] == verdict and by in found[1]
    if "1 == 2" in inside:
        assert found[2] == "assert 1 == 2"


def test_nothing_selected_and_no_report_prove_nothing(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT.format(""))
    assert judge(tmp_path / "report.xml", 5, "")[:2] == ("invalid", "no test was selected")
    assert judge(tmp_path / "missing.xml", 4, "ImportError\nin conftest")[0] == "invalid"
