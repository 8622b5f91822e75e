"""The word list of `make lint` finds each of its examples, and not what to say instead."""

from __future__ import annotations

from tests import words


def test_each_example_is_found_and_what_to_say_is_not() -> None:
    rows = words.phrases()
    assert len(rows) > 20
    assert [example for pattern, say, example in rows if not pattern.search(example) or pattern.search(say)] == []
