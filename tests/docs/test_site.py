"""The documentation's site: its reference is complete, its drawings name what exists, and no page waits for a number."""

from __future__ import annotations

import importlib
import re
import types

import pytest

from docsite import drawing, nav, reference, stage
from tests import product
from tests.environments import sources
from tests.printed import PAGES
from tests.processes import ROOT

FILES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "benchmarks/README.md"]
OURS = r"lockstep\b[\w.]*"
BEGINS = r"(?:^[ ]*|`)"
"""What stands before an import: in code, in a docstring, or within backticks."""
PLACEHOLDER = re.compile(r"\b(?:[A-Z]+_(?:CUDA|CPU|GPU|TABLE|HERE)|TODO|TBD|FIXME|XXX+)\b")


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """The whole site before MkDocs. Raises where a link leads nowhere."""
    return stage.pages()


def test_every_page_has_its_place(pages: dict[str, str]) -> None:
    assert nav.unplaced(pages) == []
    placed = [page for page in pages if "source/" not in page]
    assert len(placed) > 35
    for name, text in pages.items():
        visible = re.sub(r"^(---\n.*?\n---\n|<!--.*?-->|\s)+", "", text, flags=re.DOTALL)
        assert visible.startswith("# "), f"{name} does not begin with its title"
    for name in nav.FIRST:
        assert f"{name}/index.md" in pages
        for page in placed:  # a page that is new is listed without being named anywhere
            if page.startswith(f"{name}/") and name != "reference" and not page.endswith("index.md"):
                assert f"]({page.partition('/')[2]})" in pages[f"{name}/index.md"]


def test_every_command_is_on_the_page_with_its_help(pages: dict[str, str]) -> None:
    text = pages["reference/commands.md"]
    names = reference.command_names()
    assert {"run", "submit", "render", "top", "report"} <= set(names) and len(names) > 18
    for name in names:
        section = text.partition(f"## lockstep {name}\n")[2]
        assert "--help" in section.partition("## ")[0], name
    assert "## python -m lockstep.training launch\n" in text and "## lockstep bench\n" in text
    for section in text.split("\n## ")[1:]:
        called, _, shown = section.partition("\n")
        assert re.search(rf"(?i)^```text\nusage: {called}\b", shown, re.MULTILINE), called
        assert called.startswith("python") or "python -m lockstep.training" not in shown, f"{called} was not called so"


@pytest.mark.parametrize("page", product.settings_pages())
def test_every_setting_is_on_the_page(pages: dict[str, str], page: str) -> None:
    lines = {line.split("`")[1]: line for line in pages[f"reference/{page}.md"].splitlines() if line.startswith("| `")}
    rows = list(reference.rows(product.settings_pages()[page]))
    assert len(rows) > 20
    for name, kind, _, meaning, _ in rows:
        assert len(meaning) >= 10, f"{name} has no meaning: write a docstring below the field"
        assert lines[name].startswith(f"| `{name}` | {reference.cell(kind)} |"), name
        assert lines[name].endswith(f" | {reference.cell(meaning)} |"), name


def test_the_settings_of_a_session_have_a_page_in_the_checkout() -> None:
    page = "reference/session-settings.md"
    assert (ROOT / "docs" / page).read_text(encoding="utf-8") == reference.pages()[page], "make generate"


def test_every_rule_metric_code_recipe_variable_and_name_is_on_a_page(pages: dict[str, str]) -> None:
    assert len(reference.rules()) > 40
    for rule in reference.rules():
        assert f"| `{rule.id}` | {rule.level} | {reference.cell(rule.title)} |" in pages["reference/lint-rules.md"]
    for name, value in product.contract_names().items():
        if name.startswith("EXIT_"):
            assert f"| {value} | `{name}` |" in pages["reference/exit-codes.md"], name
        if name.startswith("ENV_"):
            assert f"| `{value}` |" in pages["reference/environment.md"], name
        if name.endswith("_FILE") or name in ("CHECKPOINTS", "ENDPOINTS", "METRICS"):
            assert f"| `{value}" in pages["reference/run-directory.md"], name
    for path in (ROOT / "training/recipes").glob("*.yaml"):
        assert f"## {path.stem}\n" in pages["reference/recipes.md"]
    text = pages["reference/session.md"] + pages["reference/api.md"]
    for package in map(importlib.import_module, ("lockstep", "lockstep.jobs")):
        for found in (getattr(package, name) for name in package.__all__):
            assert f"::: {found.__module__}.{found.__qualname__}\n" in text, found


def test_every_variable_that_the_code_knows_is_on_the_page(pages: dict[str, str]) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", pages["reference/environment.md"], re.MULTILINE)
    assert all(len(meaning) > 20 for _, meaning in rows), rows
    for path in (path for package in ("training", "jobs", "lockstep") for path in (ROOT / package).rglob("*.py")):
        for name in re.findall(r"\bLOCKSTEP_[A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8")):
            assert name in dict(rows), f"{path.relative_to(ROOT)}: {name} (docsite/reference.py: OTHERS)"


def _imported(text: str) -> set[str]:
    """What a text imports from the packages, by the names under which it is defined; of a module what it uses of it."""
    found = set(re.findall(rf"{BEGINS}import ({OURS})", text, re.MULTILINE))
    for module, names in re.findall(rf"{BEGINS}from ({OURS}) import (\([^)]*\)|[^\n#`]*)", text, re.MULTILINE):
        for part in filter(None, (part.strip() for part in names.strip("()").split(","))):
            name, _, alias = part.partition(" as ")
            thing = getattr(importlib.import_module(module), name, None) or importlib.import_module(f"{module}.{name}")
            used = [thing]
            if isinstance(thing, types.ModuleType):
                uses = re.findall(rf"\b{alias or name}\.(\w+)", text)
                used = [getattr(thing, use) for use in uses if hasattr(thing, use)] or [thing]
            found |= {
                f"{one.__module__}.{one.__qualname__}" if hasattr(one, "__qualname__") else one.__name__ for one in used
            }
    return found


def test_what_pages_and_examples_import_is_on_the_page(pages: dict[str, str]) -> None:
    """For the page says that nothing else is meant to be imported."""
    listed = set(re.findall(r"^::: (\S+)$", pages["reference/session.md"] + pages["reference/api.md"], re.MULTILINE))
    listed |= {f"{module}.{name}" for module in listed for name in reference.members(module)}
    files = [ROOT / page for page in PAGES]
    files += [path for folder in ("examples", "jobs/project/templates") for path in (ROOT / folder).rglob("*.py")]
    found = {name: path for path in files for name in _imported(path.read_text(encoding="utf-8"))}
    assert (
        len(found) > 20
        and "lockstep.training.sync.teaching.horovod" in found
        and "lockstep.jobs.slurm.render.training_task" in found
    )
    assert {name: str(path.relative_to(ROOT)) for name, path in found.items() if name not in listed} == {}


def test_drawings_are_current_and_name_what_exists() -> None:
    commands = set(reference.command_names())
    for path, text in drawing.drawn().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is not what make docs-pictures draws"
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "training").rglob("*.py"))
    known = {value for value in product.contract_names().values() if isinstance(value, str)} | product.series()
    for source in drawing.sources():
        names = drawing.names(drawing.read(source))
        assert len(names) > 3
        for name in names:
            there = (ROOT / name).exists() or {name, f"training_{name}"} & known or f"def {name}(" in code
            assert there or name.partition(" ")[0] in commands, f"{source.name}: {name}"


def test_what_is_named_anywhere_exists() -> None:
    """Pages, in messages, in Makefile, deploy and docker; tests, in pages; commands, in the changelog."""
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    there = set(re.findall(r"def (test_\w+)", code)) | {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    found = 0
    for path in map(ROOT.joinpath, sources()):
        if path.suffix not in (".py", ".yaml", ".sh", ".md", ".toml", "") or not path.is_file():
            continue
        text, where = path.read_text(encoding="utf-8", errors="ignore"), path.relative_to(ROOT)
        for name in re.findall(r"(?<![/\w.-])docs/[\w/-]+\.md", text):
            found += 1
            assert (ROOT / name).is_file(), f"{where} names {name}"
        if path.suffix == ".md" and where.parts[0] in ("docs", "README.md", "CONTRIBUTING.md"):
            for name in re.findall(r"`(tests/[\w/]+\.py)`", text):
                assert (ROOT / name).is_file(), f"{where} names {name}"
            for name, rest in re.findall(r"`(test_\w+)(…?)", text):
                fits = any(one.startswith(name) for one in there) if rest else name in there
                assert fits or name == "test_labels", f"{where} names {name}{rest}"  # an option of a data source
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert [name for name in reference.command_names() if not re.search(rf"`(lockstep )?{name}\b", changes)] == []
    assert found > 20


def test_no_document_waits_for_a_number() -> None:
    for file in FILES:
        code = re.sub(r"^```.*?^```$", "", file.read_text(), flags=re.DOTALL | re.MULTILINE)
        assert not PLACEHOLDER.findall(re.sub(r"`[^`\n]*`", "", code)), (
            f"{file.name}: where a number or a table belongs"
        )


def test_what_is_unproven_is_one_table_that_says_what_why_and_how_to_try_it() -> None:
    section = (ROOT / "docs/guarantees.md").read_text(encoding="utf-8").partition("\n## Not shown yet\n")[2]
    head, _, *rows = [line for line in section.splitlines() if line.startswith("|")]
    assert head == "| what | why it is unproven | how to try it | what is tested in its place |"
    assert len(rows) > 15 and "\n## " not in section
    for row in rows:
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        assert len(cells) == 4 and all(cells[:3]), row
