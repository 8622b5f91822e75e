from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import Job


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.faults)


@pytest.fixture
def job(tmp_path: Path, data_root: Path) -> Job:
    return Job(tmp_path / "run", data_root, 2)
