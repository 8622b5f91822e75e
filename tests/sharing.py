"""pytest -p tests.sharing: how `make test` shares its tests out among processes (pytest-xdist).

A file whose tests share a fixture is one unit of work, so that the fixture is made once. Each other test is a separate
unit. Long ones come first, so that no process has one left when the others are done.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.processes import ROOT


@cache
def _shares(file: str) -> bool:
    """Returns whether the file, by its path from the root of the project, has a fixture for all its tests."""
    return 'scope="module"' in (ROOT / file).read_text(encoding="utf-8")


class _Scheduling(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if _shares(file) else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    config.option.loadscopereorder = False  # the order is ours
    return _Scheduling(config, log)


def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    """A sign of life: the first result comes when the longest files are done."""
    if node.gateway.id == "gw0":
        print(f"{len(ids)} tests are found", flush=True)


@pytest.hookimpl(trylast=True)  # after pytest-randomly
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that are a unit, then the tests that start processes, then the unit tests."""

    def place(item: pytest.Item) -> tuple[bool, bool]:
        file = item.nodeid.partition("::")[0]
        return not _shares(file), file.startswith("tests/unit/")

    items.sort(key=place)
