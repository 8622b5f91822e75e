"""Reads from the source which module imports which."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.processes import ROOT

SHARED = tuple(
    f"lockstep.training.{name}"
    for name in ("contract", "bucket", "config", "config.settings", "files", "extras", "cli")
)
"""Modules of `training` that `jobs` may import: they need no torch."""


def modules(package: str) -> dict[str, Path]:
    """Dotted name → file of each module of a package of ours."""
    folder = ROOT / "lockstep" / package  # a link, for all but `wire`
    return {
        ".".join(("lockstep", package, *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in sorted(folder.rglob("*.py"))
        if "templates" not in path.parts  # files of a project to be
    }


PACKAGES = ("training", "jobs", "tools", "torture", "wire")


def all_modules() -> dict[str, Path]:
    """Returns the modules of all our packages."""
    return {name: path for package in PACKAGES for name, path in modules(package).items()}


def imported(tree: ast.AST, known: dict[str, Path], package: str = "", types: bool = False) -> Iterator[str]:
    """Yields what is imported at run time, in functions too.

    Args:
        package: the package that relative imports start from.
        types: yields also what is imported under `if TYPE_CHECKING:`.
    """
    for node in ast.iter_child_nodes(tree):
        for_types = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        if isinstance(node, ast.If) and for_types and not types:
            for branch in node.orelse:
                yield from imported(branch, known, package)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join(filter(None, [*above, node.module]))
            for alias in node.names:
                whole = f"{module}.{alias.name}"
                yield whole if whole in known else module
        else:
            yield from imported(node, known, package, types)


def imports_of(name: str, path: Path, known: dict[str, Path], types: bool = False) -> set[str]:
    """Returns what a module of ours imports, by full names. Arguments as in `imported`."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return set(imported(ast.parse(path.read_text()), known, package, types))


def graph(types: bool = False) -> dict[str, set[str]]:
    """Each module of ours, and those of ours that it imports, in functions too. Arguments as in `imported`."""
    known = all_modules()
    return {
        name: {target for target in imports_of(name, path, known, types) if target in known and target != name}
        for name, path in known.items()
    }
