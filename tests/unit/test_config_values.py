"""What each text becomes, value by value and error by error: the table is config_values.txt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.training import config, sync
from lockstep.training.config import settings
from lockstep.training.contract import UserError

TABLE = (Path(__file__).parent / "config_values.txt").read_text().split("\n[")


def rows(part: str) -> list[Any]:
    """(what is written, what is read) of one part of the table."""
    text = next(text for text in TABLE if text.startswith(f"{part}]"))
    pairs = [line.split("  →  ") for line in text.strip("\n").split("\n")[1:]]
    return [pytest.param(written, read, id=written) for written, read in pairs]


def told(read: Callable[[], dict[str, Any]], before: dict[str, Any], where: str) -> str:
    try:
        found = read()
    except UserError as error:
        return f"error: {str(error).removeprefix(where)}"
    changed = [f"{name}={value!r}" for name, value in found.items() if repr(before.get(name, ...)) != repr(value)]
    return ", ".join(changed) or "as it was"


@pytest.mark.parametrize(("written", "read"), rows("words"))
def test_a_word_after_set(written: str, read: str) -> None:
    before = settings.flatten(config.load("smoke"))
    words = written.split(" && ")
    assert told(lambda: settings.flatten(config.load("smoke", words)), before, "recipe smoke with --set: ") == read


@pytest.mark.parametrize(("written", "read"), rows("files"))
def test_a_recipe_of_ones_own(written: str, read: str, tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(written.replace(r"\n", "\n"))
    before = settings.flatten(config.Config(recipe="own", batch_size=4))
    assert told(lambda: settings.flatten(config.load(str(path))), before, "recipe own: ") == read


@pytest.mark.parametrize(("written", "read"), rows("options"))
def test_options_of_a_strategy(written: str, read: str) -> None:
    def options() -> dict[str, Any]:
        made = sync.from_words(written.split(" ", 1) if "{" in written else written.split(" "))
        return settings.flatten(made.options)

    assert told(options, {}, "") == read


@pytest.mark.parametrize(("written", "read"), rows("hashes"))
def test_the_hash_of_a_config(written: str, read: str) -> None:
    recipe, *words = written.split(" && ")
    assert config.load(recipe, words).hash() == read
