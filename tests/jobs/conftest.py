"""Fixtures: the local backend, and an emulated API server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import product
from tests.kubernetes.conftest import server  # noqa: F401 - a fixture
from tests.processes import ROOT


@pytest.fixture
def backend(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The local backend in `tmp_path`. A job's command is the rank itself. With the parameter `launched`, a launcher starts it."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home/local").mkdir(mode=0o700, parents=True)
    local = product.local(tmp_path / "home/local", bare=getattr(request, "param", "itself") == "itself")
    yield local
    for row in local.list():
        local.cancel(row.name)


launched = pytest.mark.parametrize("backend", ["launched"], indirect=True)
