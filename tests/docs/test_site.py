"""The documentation's site: its reference is complete, and every name on a page exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import yaml

from docsite import ROOT, reference, stage
from tests import product
from tests.checkout import copy_to, sources
from tests.environments import tomllib
from tests.processes import PYTHON, clean_env, require, run


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """Page of the site → the text that Zensical gets. `make docs` writes the pages."""
    if not stage.OUT.exists():
        stage.main()
    files = {str(path.relative_to(stage.OUT)): path for path in stage.OUT.rglob("*.md")}
    return {name: path.read_text(encoding="utf-8") for name, path in files.items() if not name.startswith("files/")}


def test_every_page_is_in_the_navigation_and_begins_with_its_title(pages: dict[str, str]) -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    nav_pages = [
        page for entry in nav for value in entry.values() for page in ([value] if isinstance(value, str) else value)
    ]
    assert sorted(nav_pages) == sorted(pages)
    for name, text in pages.items():
        assert re.sub(r"\A(<!--.*?-->|\s)+", "", text, flags=re.DOTALL).startswith("# "), name


def test_no_link_of_the_checkout_is_dead() -> None:
    """Anchors exist, too: GitHub makes them of a heading's words."""
    names = [name for name in sources() if name.endswith(".md") and "/templates/" not in name]
    anchors = {}
    for name in names:
        headings = re.findall(r"^#+ (.+)$", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
        anchors[name] = {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
    count = 0
    for name in names:
        for path, anchor in re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", (ROOT / name).read_text(encoding="utf-8")):
            target = stage.resolve(name, path) if path else name
            assert (ROOT / target).is_file(), f"{name} links to {path}"
            assert not anchor or anchor in anchors.get(target, ()), f"{name} links to {path}#{anchor}"
            count += 1
    assert count > 150


def test_a_code_block_fits_a_phone_and_has_its_comments_on_separate_lines() -> None:
    for name in (name for name in sources() if name.endswith(".md") and "/templates/" not in name):
        text = (ROOT / name).read_text(encoding="utf-8")
        for language, block in re.findall(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE):
            for line in block.splitlines():
                assert len(line) <= 88, f"{name}: {line}"
                assert language not in ("sh", "python", "yaml") or not re.search(r"\S\s+# ", line), f"{name}: {line}"


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
    page = (ROOT / "docs/reference/session-settings.md").read_text(encoding="utf-8")
    assert page == reference.session_settings() + reference.FOOTER, "make generate"


def test_every_rule_metric_code_recipe_variable_and_name_is_on_a_page(pages: dict[str, str]) -> None:
    assert len(reference.rules()) > 10
    for rule in reference.rules():
        assert f"| `{rule.id}` | {rule.level} | {reference.cell(rule.title)} |" in pages["reference/lint-rules.md"]
    table = (ROOT / "training/observe/metrics.py").read_text(encoding="utf-8")
    metrics = re.findall(r'^    "(\w+)": \w+\(\s*"(\w+)"', table, re.MULTILINE)
    assert len(metrics) > 25
    for name, kind in metrics:
        assert f"| `{name}` | {kind} |" in pages["reference/metrics.md"], name
    for name, value in product.contract_names().items():
        if name.startswith("EXIT_") and isinstance(value, int):
            assert f"| {value} | `{name}` |" in pages["reference/exit-codes.md"], name
        if name.startswith("ENV_"):
            assert f"| `{value}` |" in pages["reference/environment.md"], name
        if name.endswith("_FILE") or name in ("CHECKPOINTS", "METRICS"):
            assert f"| `{value}" in pages["reference/run-directory.md"], name
    for path in (ROOT / "training/recipes").glob("*.yaml"):
        assert f"## {path.stem}\n" in pages["reference/recipes.md"]
    text = pages["reference/session.md"] + pages["reference/api.md"]
    for package in map(importlib.import_module, ("lockstep", "lockstep.jobs")):
        for member in (getattr(package, name) for name in package.__all__):
            assert f"::: {member.__module__}.{member.__qualname__}\n" in text, member


def test_every_variable_that_the_code_knows_is_on_the_page(pages: dict[str, str]) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", pages["reference/environment.md"], re.MULTILINE)
    assert all(len(meaning) > 20 for _, meaning in rows), rows
    for path in (path for package in ("training", "jobs", "lockstep") for path in (ROOT / package).rglob("*.py")):
        for name in re.findall(r"\bLOCKSTEP_[A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8")):
            assert name in dict(rows), f"{path.relative_to(ROOT)}: {name} (docsite/reference.py: OTHERS)"


def test_every_page_test_and_command_that_is_named_exists() -> None:
    """Pages named in messages, Makefile, deploy and docker; tests named in pages; commands in the changelog."""
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    test_names = set(re.findall(r"def (test_\w+)", code)) | {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    count = 0
    for path in map(ROOT.joinpath, sources()):
        if path.suffix not in (".py", ".yaml", ".sh", ".md", ".toml", "") or not path.is_file():
            continue
        text, where = path.read_text(encoding="utf-8", errors="ignore"), path.relative_to(ROOT)
        for name in re.findall(r"(?<![/\w.-])docs/[\w/-]+\.md", text):
            count += 1
            assert (ROOT / name).is_file(), f"{where} names {name}"
        if path.suffix == ".md" and "templates" not in where.parts:
            for name in re.findall(r"`(tests/[\w/]+\.py)`", text):
                assert (ROOT / name).is_file(), f"{where} names {name}"
            for name, rest in re.findall(r"`(test_\w+)(…?)", text):
                fits = any(test_name.startswith(name) for test_name in test_names) if rest else name in test_names
                assert fits or name == "test_labels", f"{where} names {name}{rest}"  # an option of a data source
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert [name for name in reference.command_names() if not re.search(rf"`(lockstep )?{name}\b", changes)] == []
    assert count > 10


def test_the_built_site_fetches_nothing_from_a_network() -> None:
    pages = sorted((ROOT / "build/site").rglob("*.html"))
    require(pages, "`make docs` builds the site")
    for path in pages:
        tags = re.findall(r"<(?:script|img|link|iframe)\b[^>]*", path.read_text(encoding="utf-8"))
        assert not [tag for tag in tags if re.search(r"(?:src|href)=\"?(?:https?:)?//", tag)], path


def test_a_package_index_has_the_address_and_no_relative_link(tmp_path: Path) -> None:
    copy, address = copy_to(tmp_path / "lockstep"), "https://host.example/team/lockstep"
    done = run([PYTHON, "-m", "docsite.published", address, "v1.2.3"], clean_env(PYTHONPATH=""), cwd=copy)
    assert done.code == 0, done.output
    assert tomllib.loads((copy / "pyproject.toml").read_text())["project"]["urls"] == {"Repository": address}
    relative_links: dict[str, list[str]] = {"before": [], "after": []}
    for when, folder in (("before", ROOT), ("after", copy)):
        stage.rewrite(
            (folder / "README.md").read_text(encoding="utf-8"),
            lambda link, w=when: relative_links[w].append(link) or link,
        )
    links = re.findall(rf"{address}/(raw|blob)/v1.2.3/([^\s)\"#]+)", (copy / "README.md").read_text(encoding="utf-8"))
    assert relative_links["after"] == [] and len(links) == len(relative_links["before"]) > 20
    for kind, file in links:
        assert (ROOT / file).exists() and (kind == "raw") == file.endswith((".svg", ".png")), file
