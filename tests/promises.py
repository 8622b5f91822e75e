"""python -m tests.promises [--write | NAME]: the third column of the promises in docs/guarantees.md, from the tests; or all of one.

A test says what it holds, `@pytest.mark.promise("kill-resume")`, or a whole file does, `pytestmark = pytest.mark.promise(…)`.
Nothing is imported: the marks are read from the source. A mark that names no promise, and a promise that no test holds,
are errors.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/guarantees.md"
SHOWN = 3
"""So many of a promise's tests stand on the page."""
ROW = re.compile(r"^\| ([a-z0-9-]+) \| (.+) \|([^|]*)\|$")


def _promises(node: ast.expr) -> list[str]:
    """The names in `pytest.mark.promise("a", "b")`, alone or in a list of marks; none of another mark."""
    if isinstance(node, (ast.List, ast.Tuple)):
        return [name for element in node.elts for name in _promises(element)]
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.promise":
        return [str(ast.literal_eval(argument)) for argument in node.args]
    return []


def holders() -> dict[str, list[str]]:
    """Promise → its tests: `folder/file.py` for a file, and the function's name behind `::`."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        place = str(path.relative_to(ROOT / "tests"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            marks: list[str] = []
            name = place
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
                marks = _promises(node.value)
            elif isinstance(node, ast.FunctionDef):
                marks = [each for mark in node.decorator_list for each in _promises(mark)]
                name = f"{place}::{node.name}"
            for mark in marks:
                found.setdefault(mark, []).append(name)
    return found


def page() -> str:
    """The page as it should be. Raises `ValueError` for a mark without a promise, and a promise without a test."""
    tests = holders()
    promises, section, rest = PAGE.read_text(encoding="utf-8").partition("\n## What is not promised\n")
    lines, known = [], []
    for line in promises.split("\n"):
        if row := ROW.match(line):
            name, promise, _ = row.groups()
            if name not in tests:
                raise ValueError(f"no test holds the promise {name}: mark one with pytest.mark.promise({name!r})")
            known.append(name)
            shown = ", ".join(f"`{test}`" for test in tests[name][:SHOWN])
            more = f", {len(tests[name]) - SHOWN} more" if len(tests[name]) > SHOWN else ""
            line = f"| {name} | {promise} | {shown}{more} |"
        lines.append(line)
    if unknown := sorted(tests.keys() - set(known)):
        raise ValueError(f"{tests[unknown[0]][0]} holds {unknown[0]!r}, which docs/guarantees.md does not promise")
    return "\n".join(lines) + section + rest


def main() -> int:
    names = [word for word in sys.argv[1:] if not word.startswith("-")]
    for name in names:
        print(*holders().get(name, ["no such promise"]), sep="\n")
    if names:
        return 0
    try:
        wanted = page()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if "--write" in sys.argv[1:]:
        PAGE.write_text(wanted, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != wanted:
        print(
            "error: docs/guarantees.md names other tests than are marked: python -m tests.promises --write",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
