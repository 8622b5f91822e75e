"""The documentation's site: its reference is complete, its links lead somewhere, its drawings name what exists."""

from __future__ import annotations

import importlib
import re
import subprocess
import types
from pathlib import Path

import pytest

import lockstep
import lockstep.jobs as jobs
from docsite import check, drawing, links, nav, reference, stage
from lockstep.jobs import registry, status
from lockstep.jobs.spec.model import JobSpec
from lockstep.training import contract
from lockstep.training.config import Config, OwnSettings, recipes, settings
from lockstep.training.contract import UserError
from lockstep.training.observe.metrics import TABLE
from tests.printed import PAGES
from tests.processes import ROOT

INTERNAL = {"LOCKSTEP_DOCTOR_FAULT": "lockstep doctor gpu sets it for ranks that it starts itself"}
"""Variables that no user and no script meets, each with the reason."""
OURS = r"lockstep\b[\w.]*"
BEGINS = r"(?:^[ ]*|`)"
"""What stands before an import: in code, in a docstring, or within backticks."""


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """The whole site before MkDocs."""
    return stage.pages()


def test_every_page_has_its_place(pages: dict[str, str]) -> None:
    assert nav.unplaced(pages) == []
    placed = [page for page in pages if "source/" not in page]
    assert len(placed) > 35
    for name in nav.FIRST:
        assert f"{name}/index.md" in pages
        for page in placed:  # a page that is new is listed without being named anywhere
            if page.startswith(f"{name}/") and name != "reference" and not page.endswith("index.md"):
                assert f"]({page.partition('/')[2]})" in pages[f"{name}/index.md"]


def test_every_page_begins_with_its_title(pages: dict[str, str]) -> None:
    for name, text in pages.items():
        visible = re.sub(r"^(---\n.*?\n---\n|<!--.*?-->|\s)+", "", text, flags=re.DOTALL)
        assert visible.startswith("# "), name


def test_every_command_is_on_the_page_with_its_help(pages: dict[str, str]) -> None:
    text = pages["reference/commands.md"]
    names = reference.command_names()
    assert {"run", "submit", "render", "top", "report"} <= set(names) and len(names) > 18
    for name in names:
        section = text.partition(f"## lockstep {name}\n")[2]
        assert "--help" in section.partition("## ")[0], name
    assert "## python -m lockstep.training launch\n" in text and "## lockstep bench scaling\n" in text
    for section in text.split("\n## ")[1:]:
        called, _, shown = section.partition("\n")
        assert re.search(rf"(?i)^```text\nusage: {called}\b", shown, re.MULTILINE), called
        assert called.startswith("python") or "python -m lockstep.training" not in shown, f"{called} was not called so"


@pytest.mark.parametrize(
    ("page", "model"), [("recipe-settings", Config), ("session-settings", OwnSettings), ("job-settings", JobSpec)]
)
def test_every_setting_is_on_the_page(pages: dict[str, str], page: str, model: type) -> None:
    lines = {line.split("`")[1]: line for line in pages[f"reference/{page}.md"].splitlines() if line.startswith("| `")}
    rows = list(reference.rows(model))
    assert len(rows) > 20 and {name for name, *_ in settings.documentation(model)} <= {name for name, *_ in rows}
    for name, kind, _, meaning, _ in rows:
        assert len(meaning) >= 10, f"{name} has no meaning: write a docstring below the field"
        assert lines[name].startswith(f"| `{name}` | {reference.cell(kind)} |"), name
        assert lines[name].endswith(f" | {reference.cell(meaning)} |"), name
    if model is JobSpec:
        assert {"volumes[].claim", "elastic.min_nodes", "k8s.tolerations[].key"} <= {*lines}


def test_what_may_change_is_marked(pages: dict[str, str]) -> None:
    lines = {
        line.split("`")[1]: line
        for line in pages["reference/recipe-settings.md"].splitlines()
        if line.startswith("| `")
    }
    assert (
        "| yes |" in lines["epochs"]
        and "| yes |" in lines["checkpoint.every_steps"]
        and "| yes |" not in lines["optim.lr"]
    )


def test_every_rule_metric_code_recipe_and_variable_is_on_a_page(pages: dict[str, str]) -> None:
    assert len(reference.rules()) > 40
    for rule in reference.rules():
        assert f"| `{rule.id}` | {rule.level} | {reference.cell(rule.title)} |" in pages["reference/lint-rules.md"]
    for name in TABLE:
        assert f"| `{name}`" in pages["metrics.md"]
    for module in (contract, status):
        for name in filter(lambda name: name.startswith("EXIT_"), vars(module)):
            assert f"| {getattr(module, name)} | `{name}` |" in pages["reference/exit-codes.md"], name
    for name in recipes():
        assert f"## {name}\n" in pages["reference/recipes.md"]
    for name, value in vars(contract).items():
        if name.startswith("ENV_"):
            assert f"| `{value}` |" in pages["reference/environment.md"], name
        if name.endswith("_FILE") or name in ("CHECKPOINTS", "ENDPOINTS", "METRICS"):
            assert f"| `{value}" in pages["reference/run-directory.md"], name


def test_every_public_name_is_on_the_page(pages: dict[str, str]) -> None:
    text = pages["reference/session.md"] + pages["reference/api.md"]
    for package in (lockstep, jobs):
        for name in package.__all__:
            found = getattr(package, name)
            assert f"::: {found.__module__}.{found.__qualname__}\n" in text, name


def test_every_variable_that_the_code_knows_is_on_the_page(pages: dict[str, str]) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", pages["reference/environment.md"], re.MULTILINE)
    assert all(len(meaning) > 20 for _, meaning in rows), rows
    assert [(name, text) for name, text in rows if re.search(r"\b(such|these|this one|the above)\b", text)] == []
    for package in ("training", "jobs", "lockstep"):
        for path in (ROOT / package).rglob("*.py"):
            for name in re.findall(r"\bLOCKSTEP_[A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8")):
                assert name in {*dict(rows), *INTERNAL}, (
                    f"{path.relative_to(ROOT)}: {name} (docsite/reference.py: OTHERS)"
                )


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
        and "lockstep.training.sync.horovod" in found
        and "lockstep.jobs.slurm.backend.training_task" in found
    )
    assert {name: str(path.relative_to(ROOT)) for name, path in found.items() if name not in listed} == {}


def test_a_link_that_leads_nowhere_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# x\n\n[a](docs/missing.md#b), `[c](code)`\n")
    monkeypatch.setattr(stage, "ROOT", tmp_path)
    monkeypatch.setattr(reference, "pages", dict)
    with pytest.raises(UserError, match=r"README.md links to docs/missing.md: there is no file docs/missing.md"):
        stage.pages()


def test_links_are_those_of_the_text_and_not_of_its_code() -> None:
    text = '[a](b.md#c) `[d](e)`\n\n```sh\n[f](g)\n```\n<img src="h.svg"> [i](https://j) [k](#l)\n'
    assert links.found_in(text) == ["b.md", "h.svg"]
    assert links.rewrite(text, lambda link: f"../{link}") == text.replace("(b.md", "(../b.md").replace(
        '"h.svg', '"../h.svg'
    )


def test_what_is_wrong_with_a_built_page_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#there">x</a><a href="b.html#not">x</a><a href="c.html">x</a>')
    (tmp_path / "b.html").write_text('<p id="there"><script src="https://x.example/y.js"></script>' + "x" * check.LIMIT)
    found = "\n".join(check.wrong(tmp_path))
    assert "b.html#not names no place" in found and "c.html leads nowhere" in found and "#there" not in found
    assert "fetches https://x.example" in found and "bytes; a page may have" in found and len(found.splitlines()) == 4


def test_drawings_are_current_and_name_what_exists() -> None:
    commands = set(reference.command_names())
    for path, text in drawing.drawn().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is not what make docs-pictures draws"
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "training").rglob("*.py"))
    files = {value for name, value in vars(contract).items() if isinstance(value, str)}
    for source in drawing.sources():
        names = drawing.names(drawing.read(source))
        assert len(names) > 3
        for name in names:
            first, _, rest = name.partition(" ")
            known = (ROOT / name).exists() or name in files or name in TABLE or f"def {name}(" in code
            assert known or (first in commands and rest in registry.packages()), f"{source.name}: {name}"


def _tracked() -> list[Path]:
    done = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    names = done.stdout.split() or [
        str(path.relative_to(ROOT))
        for part in ("training", "jobs", "deploy", "docker")
        for path in (ROOT / part).rglob("*")
    ]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def test_every_page_that_is_named_anywhere_exists() -> None:
    """In the code's messages, in Makefile, deploy and docker."""
    found = 0
    for path in _tracked():
        if path.suffix in (".py", ".yaml", ".sh", ".md", ".toml", "") and path.stat().st_size < 1 << 20:
            text = path.read_text(encoding="utf-8", errors="ignore")
            for name in re.findall(r"(?<![/\w.-])docs/[\w/-]+\.md", text):
                found += 1
                assert (ROOT / name).is_file() or name == "docs/missing.md", f"{path.relative_to(ROOT)} names {name}"
    assert found > 20


def test_every_test_that_a_page_names_exists() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    there = set(re.findall(r"def (test_\w+)", code)) | {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"`(tests/[\w/]+\.py)`", text):
            assert (ROOT / name).is_file(), f"{page.name} names {name}"
        for name, rest in re.findall(r"`(test_\w+)(…?)", text):
            if name == "test_labels":  # an option of a data source
                continue
            fits = any(one.startswith(name) for one in there) if rest else name in there
            assert fits, f"{page.name} names {name}{rest}"
