"""The structure of the two packages: no import circle, few files at the entrance, and no long module."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter

import pytest

from tests import product
from tests.imports import graph, imported, modules
from tests.processes import ROOT

ENTRANCE = 10
"""Modules that lie in `training/` itself."""
LINES = 400


@pytest.mark.parametrize("package", ["training", "jobs"])
def test_no_import_goes_round_in_a_circle(package: str) -> None:
    """Neither at the top of a module nor in a function."""
    found = graph(package)
    assert len(found) > 50 and sum(map(len, found.values())) > 150
    assert list(TopologicalSorter(found).static_order())  # raises CycleError, which names the circle


def test_the_entrance_of_training_is_small() -> None:
    assert len(list((ROOT / "training").glob("*.py"))) <= ENTRANCE


@pytest.mark.parametrize("package", ["training", "jobs"])
def test_no_module_is_long(package: str) -> None:
    lengths = {str(path): len(path.read_text().splitlines()) for path in modules(package).values()}
    assert {path: lines for path, lines in lengths.items() if lines > LINES} == {}


def test_nothing_rests_on_the_exercises_and_only_programs_on_an_attempt() -> None:
    for name, imports in graph("training").items():
        if not name.startswith("lockstep.training.exercises"):
            assert not [other for other in imports if other.startswith("lockstep.training.exercises")], name
            assert name == "lockstep.training.__main__" or "lockstep.training.run.recipe" not in imports, name


def test_only_one_module_of_the_tests_reaches_inside() -> None:
    """Unit tests may import what they test; the others take the public names, or `tests/product.py`."""
    known = modules("training") | modules("jobs")
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path.parts[len(ROOT.parts) + 1] not in {"unit", "product.py"}
        for name in imported(ast.parse(path.read_text()), known)
        if name.startswith(("lockstep.training", "lockstep.jobs")) and name not in product.PUBLIC
    }
    assert not found


HOP = re.compile(r"^\| (\d) \| `([\w/]+\.py):(\d+)` `(.+)` \|")


def test_the_step_in_the_documentation_is_the_step_in_the_code() -> None:
    """At most six hops over three files, and each stands at the line that is named."""
    document = (ROOT / "docs/architecture.md").read_text().splitlines()
    hops = [found.groups() for line in document if (found := HOP.match(line))]
    assert [int(number) for number, *_ in hops] == list(range(len(hops))) and 4 < len(hops) <= 7
    assert len({path for _, path, *_ in hops}) <= 3
    for _, path, line, text in hops:
        source = (ROOT / path).read_text().splitlines()
        found = [number for number, content in enumerate(source, 1) if content.strip().startswith(text)]
        assert [int(line)] == found, f"{path}: {text} stands at {found}"
