"""python -m tests.promises [NAME]: prints the promises of docs/guarantees.md, and the tests that are marked with each.

A test has the mark `@pytest.mark.promise("kill-resume")`, or a file has `pytestmark = pytest.mark.promise(…)`.
Nothing is imported: the marks are read from the source. A mark without a promise, and a promise without a mark, are errors.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/guarantees.md"


def _promises(node: ast.expr) -> list[str]:
    """Returns the names in `pytest.mark.promise("a", "b")`, alone or in a list of marks; none of another mark."""
    if isinstance(node, (ast.List, ast.Tuple)):
        return [name for element in node.elts for name in _promises(element)]
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.promise":
        return [str(ast.literal_eval(argument)) for argument in node.args]
    return []


def holders() -> dict[str, list[str]]:
    """Returns promise → its tests: `folder/file.py` for a file, `folder/file.py::test_name` for a function."""
    tests: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        place = str(path.relative_to(ROOT / "tests"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
                marks, name = _promises(node.value), place
            elif isinstance(node, ast.FunctionDef):
                marks = [each for mark in node.decorator_list for each in _promises(mark)]
                name = f"{place}::{node.name}"
            else:
                continue
            for mark in marks:
                tests.setdefault(mark, []).append(name)
    return tests


def promised() -> dict[str, str]:
    """Returns promise → its sentence on the page. A line of the list begins with its names, each in backquotes."""
    page = PAGE.read_text(encoding="utf-8").partition("\n## Promised\n")[2].partition("\n## ")[0]
    sentences = {}
    for names, sentence in re.findall(
        r"^- ((?:`[a-z0-9-]+`[,;]\s+)*`[a-z0-9-]+`):\s+(.+?)(?=\n- |\n\n|\Z)", page, re.M | re.S
    ):
        sentences |= dict.fromkeys(re.findall(r"`(.+?)`", names), " ".join(sentence.split()))
    return sentences


def main(names: list[str]) -> int:
    tests, page = holders(), promised()
    for name in names or page:
        print(f"{name}: {page.get(name, 'not promised')}", *(f"  {test}" for test in tests.get(name, [])), sep="\n")
    wrong = [f"no test is marked with the promise {name}" for name in page if name not in tests]
    wrong += [
        f"{tests[name][0]} is marked with {name}, which docs/guarantees.md lacks" for name in tests if name not in page
    ]
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
