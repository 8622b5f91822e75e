"""The structure of the packages: which package imports which, no import circle, few files at the entrance."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter

import pytest

from tests import product
from tests.imports import SHARED, all_modules, graph, imported, imports_of, modules
from tests.processes import ROOT

BUDGET = {"training": 13403, "jobs": 5552, "tools": 668, "torture": 561, "wire": 853}
"""Lines of code of each package, at most. A change lowers a number, or says in its commit why it raises one."""
ENTRANCE = 10
"""Modules that lie in `training/` itself."""


def test_no_import_goes_round_in_a_circle() -> None:
    """Neither at the top of a module nor in a function."""
    imports = graph()
    assert len(imports) > 100 and sum(map(len, imports.values())) > 300
    assert list(TopologicalSorter(imports).static_order())  # raises CycleError, which names the circle


def test_no_import_of_training_goes_round_in_a_circle_for_types_either() -> None:
    """A reader meets a type below what uses it. In `jobs` the specification names the backends' sections for types only."""
    imports = {name: targets for name, targets in graph(types=True).items() if not name.startswith("lockstep.jobs")}
    assert list(TopologicalSorter(imports).static_order())  # raises CycleError, which names the circle


@pytest.mark.parametrize("package", ["lockstep.training.", "lockstep.jobs."])
def test_no_folder_imports_in_a_circle(package: str) -> None:
    """A folder can be read without the folders that import it."""
    folders: dict[str, set[str]] = {}
    for name, imports in graph().items():
        if name.startswith(package):
            folder, *_ = name.removeprefix(package).split(".")
            targets = {target.removeprefix(package).split(".")[0] for target in imports if target.startswith(package)}
            folders.setdefault(folder, set()).update(targets - {folder})
    assert len(folders) > 10 and list(
        TopologicalSorter(folders).static_order()
    )  # raises CycleError, which names the circle


def _code_lines(text: str) -> int:
    """Counts lines that are not blank, a comment, an import or a docstring, so that shorter docstrings save nothing."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        docstring = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and type(node.value.value) is str
        )
        if docstring or isinstance(node, (ast.Import, ast.ImportFrom)):
            assert isinstance(node, ast.stmt)
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(
        1 for number, line in lines if line.strip() and not line.strip().startswith("#") and number not in left_out
    )


@pytest.mark.parametrize("package", BUDGET)
def test_a_package_keeps_its_budget(package: str) -> None:
    code = sum(_code_lines(path.read_text()) for path in modules(package).values())
    assert code <= BUDGET[package], f"{package} has {code} lines of code"
    assert code > BUDGET[package] - 50, f"{package} has {code} lines of code: lower its budget, so that it stays small"


def test_the_entrance_of_training_is_small() -> None:
    assert len(list((ROOT / "training").glob("*.py"))) <= ENTRANCE


FORBIDDEN = {
    "contract": ("torch", "yaml", "lockstep.training."), "limits": ("lockstep.",), "config": ("torch",),
    "data.order": ("lockstep.training.config", "torch.distributed"),
    "checkpoint": ("lockstep.training.run",), "sync": ("lockstep.training.models", "lockstep.training.optim"),
    "models": ("lockstep.training.optim", "lockstep.training.sync", "lockstep.training.data"),
    "optim": ("lockstep.training.models", "lockstep.training.sync", "lockstep.training.data"),
}  # fmt: skip
"""Part of `training` → what it does not import (docs/architecture.md)."""
WIRE = tuple(f"lockstep.training.{name}" for name in ("contract", "limits", "files", "cli"))
"""Modules of `training` that `wire` may import."""

ABOVE = ("lockstep.tools", "lockstep.torture")
"""Packages that never run in a rank: they read run directories, and import no torch (`doctor` tries a GPU)."""


def test_who_may_import_whom() -> None:
    assert not (ROOT / "training/__init__.py").read_text().count("import lockstep")
    known = all_modules()
    for name, path in known.items():
        imports = imports_of(name, path, known)
        part = name.removeprefix("lockstep.training.")
        bad = [rule for place, rule in FORBIDDEN.items() if f"{part}.".startswith(f"{place}.")]
        assert not [target for target in imports for rule in bad if target.startswith(rule)], name
        ours = {target for target in imports if target.startswith("lockstep.training.")}
        if name.startswith(("lockstep.jobs", "lockstep.wire")):
            allowed = SHARED if name.startswith("lockstep.jobs") else WIRE
            assert not [target for target in ours if not target.startswith(allowed)] and "torch" not in imports, name
        if not name.startswith("lockstep.jobs"):
            assert not [target for target in imports if target.startswith("lockstep.jobs")], name
        if name.startswith(("lockstep.training", "lockstep.wire")):
            assert not [target for target in imports if target.startswith(ABOVE)], name
        if name.startswith(ABOVE) and name not in ("lockstep.tools.doctor", "lockstep.tools.export"):
            assert "torch" not in imports or name == "lockstep.torture.weights", name


@pytest.mark.parametrize("package", ["training", "jobs", "tools", "torture"])
def test_a_package_imports_its_own_modules_relatively(package: str) -> None:
    """Tools that read imports then see them, although the packages are links in `lockstep/`."""
    absolute = f"lockstep.{package}"
    absolute_imports = [
        f"{path}: {node.module}"
        for path in modules(package).values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and not node.level and f"{node.module}.".startswith(f"{absolute}.")
    ]
    assert not absolute_imports


def test_only_one_module_of_the_tests_reaches_inside() -> None:
    """Unit tests may import what they test; the others take the public names, or `tests/product`."""
    known = all_modules()
    private_imports = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path.parts[len(ROOT.parts) + 1] not in {"unit", "product"}
        for name in imported(ast.parse(path.read_text()), known)
        if name.startswith(("lockstep.training", "lockstep.jobs", "lockstep.wire", *ABOVE))
        and name not in product.PUBLIC
    }
    assert not private_imports


HOP = re.compile(r"^\| (\d) \| `([\w/]+\.py):(\d+)` `(.+)` \|")


def test_the_step_in_the_documentation_is_the_step_in_the_code() -> None:
    """At most seven hops over six files, and each stands at the line that is named."""
    document = (ROOT / "docs/architecture.md").read_text().splitlines()
    hops = [match.groups() for line in document if (match := HOP.match(line))]
    assert [int(number) for number, *_ in hops] == list(range(len(hops))) and 4 < len(hops) <= 7
    assert len({path for _, path, *_ in hops}) <= 6
    for _, path, line, text in hops:
        source = (ROOT / path).read_text().splitlines()
        numbers = [number for number, content in enumerate(source, 1) if content.strip().startswith(text)]
        assert [int(line)] == numbers, f"{path}: {text} stands at {numbers}"
