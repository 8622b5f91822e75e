"""What the documents say is complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.processes import ROOT

FILES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "benchmarks/README.md"]
PLACEHOLDER = re.compile(r"\b(?:[A-Z]+_(?:CUDA|CPU|GPU|TABLE|HERE)|TODO|TBD|FIXME|XXX+)\b")


def prose(text: str) -> str:
    """The text without code: names of variables stand there rightly."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_document_waits_for_a_number(file: Path) -> None:
    found = PLACEHOLDER.findall(prose(file.read_text()))
    assert not found, f"{file.name} has {found[0]} where a number or a table belongs"


def test_a_placeholder_is_seen_in_a_table_and_not_in_code() -> None:
    text = "| size | SIZE_CUDA | 1 GB |\n\nSTRATEGY_TABLE\n\n`WHEELS_CUDA`\n\n```\nTEST_TABLE=1\n```\n"
    assert PLACEHOLDER.findall(prose(text)) == ["SIZE_CUDA", "STRATEGY_TABLE"]
