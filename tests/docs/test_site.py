"""The documentation's site: its reference is complete, and what is named exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from docsite import links, nav, reference, stage
from tests import product
from tests.checkout import copy_to, sources
from tests.environments import tomllib
from tests.processes import PYTHON, ROOT, clean_env, run


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


def test_no_link_of_the_checkout_is_dead() -> None:
    """Nor its place on a page: GitHub makes an anchor of a heading's words."""
    pages = [name for name in sources() if name.endswith(".md") and "/templates/" not in name]
    anchors = {}
    for name in pages:
        headings = re.findall(r"^#+ (.+)$", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
        anchors[name] = {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
    count = 0
    for name in pages:
        for path, anchor in re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", (ROOT / name).read_text(encoding="utf-8")):
            target = links.resolve(name, path) if path else name
            assert (ROOT / target).exists(), f"{name} links to {path}"
            assert not anchor or anchor in anchors.get(target, ()), f"{name} links to {path}#{anchor}"
            count += 1
    assert count > 150


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
    assert len(reference.rules()) > 10
    for rule in reference.rules():
        assert f"| `{rule.id}` | {rule.level} | {reference.cell(rule.title)} |" in pages["reference/lint-rules.md"]
    table = (ROOT / "training/observe/metrics.py").read_text(encoding="utf-8")
    metrics = re.findall(r'^    "(\w+)": Row\(\s*"(\w+)"', table, re.MULTILINE)
    assert len(metrics) > 30
    for name, kind in metrics:
        assert f"| `{name}` | {kind} |" in pages["reference/metrics.md"], name
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


def test_a_package_index_has_the_address_and_no_relative_link(tmp_path: Path) -> None:
    copy, address = copy_to(tmp_path / "lockstep"), "https://host.example/team/lockstep"
    done = run([PYTHON, "-m", "docsite.published", address, "v1.2.3"], clean_env(PYTHONPATH=""), cwd=copy)
    assert done.code == 0, done.output
    assert tomllib.loads((copy / "pyproject.toml").read_text())["project"]["urls"] == {"Repository": address}
    before, after = ((folder / "README.md").read_text(encoding="utf-8") for folder in (ROOT, copy))
    assert links.found_in(after) == [] and len(links.found_in(before)) > 20
    found = re.findall(rf"{address}/(raw|blob)/v1.2.3/([^\s)\"#]+)", after)
    assert len(found) == len(links.found_in(before))
    for kind, file in found:
        assert (ROOT / file).exists() and (kind == "raw") == file.endswith((".svg", ".png")), file
