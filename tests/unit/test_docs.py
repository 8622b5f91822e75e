"""What the documents say is complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docsite import reference
from tests.processes import ROOT

FILES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "benchmarks/README.md"]
PLACEHOLDER = re.compile(r"\b(?:[A-Z]+_(?:CUDA|CPU|GPU|TABLE|HERE)|TODO|TBD|FIXME|XXX+)\b")


def prose(text: str) -> str:
    """The text without code: names of variables stand there rightly."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_document_waits_for_a_number(file: Path) -> None:
    found = PLACEHOLDER.findall(prose(file.read_text()))
    assert not found, f"{file.name} has {found[0]} where a number or a table belongs"


def test_every_command_is_named_in_the_changelog() -> None:
    """A command that is new is what a user reads it for."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert [name for name in reference.command_names() if not re.search(rf"`(lockstep )?{name}\b", text)] == []


def test_a_placeholder_is_seen_in_a_table_and_not_in_code() -> None:
    text = "| size | SIZE_CUDA | 1 GB |\n\nSTRATEGY_TABLE\n\n`WHEELS_CUDA`\n\n```\nTEST_TABLE=1\n```\n"
    assert PLACEHOLDER.findall(prose(text)) == ["SIZE_CUDA", "STRATEGY_TABLE"]


def test_what_is_unproven_is_one_table_that_says_what_why_and_how_to_try_it() -> None:
    section = (ROOT / "docs/guarantees.md").read_text(encoding="utf-8").partition("\n## Not shown yet\n")[2]
    head, _, *rows = [line for line in section.splitlines() if line.startswith("|")]
    assert head == "| what | why it is unproven | how to try it | what is tested in its place |"
    assert len(rows) > 15 and "\n## " not in section
    for row in rows:
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        assert len(cells) == 4 and all(cells[:3]), row
    outside = re.sub(r"^\|.*\n", "", section, flags=re.MULTILINE).strip()
    assert len(outside) < 400, "what is unproven belongs in the table"
