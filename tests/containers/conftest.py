from __future__ import annotations

from pathlib import Path

import pytest

from tests.containers.jobs import jobs  # noqa: F401 - a fixture of this folder


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the folder in which a submission keeps a lock."""
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path / "home"))
