"""Where a page stands in the navigation. A page in a folder of docs/ is taken in without being named here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

FRONT = "index.md"
TOPICS = (
    "own-training.md",
    "data.md",
    "sync.md",
    "jobs.md",
    "containers.md",
    "kubernetes.md",
    "slurm.md",
    "metrics.md",
    "guarantees.md",
)
"""Pages in docs/ itself that describe one part of Lockstep each."""
BEHIND = ("architecture.md", "source/examples/modules.md", "source/benchmarks.md")
"""Pages from elsewhere that belong to the explanations."""
FIRST = {
    "tutorials": (
        "index.md",
        "train-in-two-minutes.md",
        "your-own-training.md",
        "to-slurm.md",
        "to-kubernetes.md",
        "watch-it.md",
    ),
    "how-to": (
        "index.md",
        "start-a-project.md",
        "resume-and-move.md",
        "preemption.md",
        "torture.md",
        "debug-a-hang.md",
        "look-inside.md",
        "choose-a-strategy.md",
        "check-your-gpus.md",
        "sweep.md",
        "rehearse-in-compose.md",
        "slurm-from-a-laptop.md",
    ),
    "explanation": ("index.md", "data-order.md", "same-bits.md", "consensus.md", "checkpoints.md", "two-workers.md"),
    "reference": (
        "index.md",
        "commands.md",
        "recipe-settings.md",
        "session-settings.md",
        "job-settings.md",
        "recipes.md",
        "exit-codes.md",
        "run-directory.md",
        "environment.md",
        "lint-rules.md",
        "metrics.md",
        "session.md",
        "api.md",
    ),
}
"""The order within a folder; what is not named comes after, by its file name."""


def _folder(name: str, pages: Iterable[str]) -> list[str]:
    first = [f"{name}/{page}" for page in FIRST.get(name, ())]
    there = sorted(page for page in pages if page.startswith(f"{name}/"))
    return [page for page in first if page in there] + [page for page in there if page not in first]


def navigation(pages: Iterable[str]) -> list[Any]:
    """MkDocs' `nav` of these pages, given as paths within the site's sources."""
    pages = list(pages)
    return [
        {"Lockstep": FRONT},
        {"Tutorials": _folder("tutorials", pages)},
        {"How-to guides": _folder("how-to", pages)},
        {"Topics": [page for page in TOPICS if page in pages]},
        {"Reference": _folder("reference", pages)},
        {"Explanation": [*_folder("explanation", pages), *(page for page in BEHIND if page in pages)]},
    ]


def unplaced(pages: Iterable[str]) -> list[str]:
    """Pages that the navigation does not show, sources excepted."""
    placed = {page for entry in navigation(pages) for value in entry.values() for page in _listed(value)}
    return sorted(page for page in pages if page.endswith(".md") and page not in placed and "source/" not in page)


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
