from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.faults.harness import Job, final_tensors


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.faults)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, data_root: Path) -> dict[int, dict[str, torch.Tensor]]:
    """The final state of a run that nothing happened to, on 1 and 2 ranks."""
    found = {}
    for ranks in (1, 2):
        job = Job(tmp_path_factory.mktemp("undisturbed") / "run", data_root, ranks)
        # One rank of one: the same number of threads as under the launcher, which bit-identity asks for.
        done = job.go(LOCKSTEP_THREADS="1")
        assert done.code == 0, done.output
        found[ranks] = final_tensors(job.run_dir)
    return found


@pytest.fixture
def job(tmp_path: Path, data_root: Path) -> Job:
    return Job(tmp_path / "run", data_root, 2)
