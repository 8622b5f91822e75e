"""Who imports whom, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.processes import ROOT

SHARED = tuple(
    f"lockstep.training.{name}"
    for name in ("contract", "bucket", "config", "config.settings", "files", "extras", "cli")
)
"""What `jobs` may import of `training`: the part that needs no torch."""


def modules(package: str) -> dict[str, Path]:
    """Dotted name → file of each module of a package of ours: `training`, `jobs`, or `wire`."""
    folder = ROOT / "lockstep" / package  # a link, for all but `wire`
    return {
        ".".join(("lockstep", package, *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in sorted(folder.rglob("*.py"))
        if "templates" not in path.parts  # files of a project to be
    }


def imported(tree: ast.AST, known: dict[str, Path]) -> Iterator[str]:
    """What is imported at run time, in functions too; `if TYPE_CHECKING:` is not."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for other in node.orelse:
                yield from imported(other, known)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in known else str(node.module)
        else:
            yield from imported(node, known)


def graph() -> dict[str, set[str]]:
    """Each module of ours, and those of ours that it imports, in functions too."""
    known = modules("training") | modules("jobs") | modules("wire")
    return {
        name: {other for other in imported(ast.parse(path.read_text()), known) if other in known and other != name}
        for name, path in known.items()
    }
