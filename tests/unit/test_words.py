"""The word list of `make lint`: it finds what it is for, and nothing in ordinary English."""

from __future__ import annotations

import pytest

from tests import words

ORDINARY = """
There is no run in this folder. There is no need to stop, and there is no image yet. The run is no longer active.
Nobody else can read the file. It is the same on every rank. The job goes on after the restart, and the run goes on.
The table stands in the README. A rank that stands still is named. He looks at the log. It is none of these.
The path lies on a volume of its own. The rank holds no lock. One of our own images. It leaves the loop and leaves
the folder as it is. The container was stopped; the node was lost. Put it aside. Move it aside first. Wait at most 60 s.
It comes to the same result. No one knows. The engine is well tested. The value is given twice. It is cut at the end.
The model is whole on every rank. A digest is best. Best of all: a digest. The word stands at the beginning of the line.
"""


@pytest.mark.parametrize("row", words.phrases(), ids=lambda row: row[2])
def test_its_example_is_found_and_what_to_say_is_not(row: tuple[object, str, str]) -> None:
    pattern, say, example = row
    assert pattern.search(example), example  # type: ignore[attr-defined]
    assert not pattern.search(say), say  # type: ignore[attr-defined]


def test_ordinary_english_is_left_alone() -> None:
    assert list(words.found(ORDINARY)) == []


def test_a_phrase_is_found_over_the_end_of_a_line() -> None:
    assert [line for line, *_ in words.found("x\n# a namespace and closed\n# doors")] == [2]


def test_every_page_is_read() -> None:
    found = words.pages()
    assert {
        "CONTRIBUTING.md",
        "training/session.py",
        "job.yaml",
        "deploy/k8s/base/kustomization.yaml",
        "tests/README.md",
    } <= {*found}
    assert words.main([]) == 0
