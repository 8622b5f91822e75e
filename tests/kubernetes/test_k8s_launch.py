"""What the launcher does for Kubernetes: counting restarts across pods, exit codes, the address the others resolve."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.training.contract import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, EXIT_USAGE, UserError
from lockstep.training.launch.agent import own_address
from lockstep.training.launch.attempts import Attempts
from lockstep.training.launch.codes import cluster_code


def live(folder: Path, code: int | None, restarts: int = 0, node: str = "n-0") -> tuple[bool, int]:
    """One pod's life: (did it start its ranks, the code the cluster sees). `code` None: it was killed."""
    attempts = Attempts(folder, node, limit=2)
    if not attempts.begin():
        return False, EXIT_FAILED
    attempts.restarted(0)
    attempts.restarted(restarts)
    if code is None:
        return True, 137
    attempts.end(code)
    return True, cluster_code(code, "kubernetes", attempts.used, attempts.limit)


def test_a_pod_that_is_killed_again_and_again_is_given_up(tmp_path: Path) -> None:
    assert [live(tmp_path, None) for _ in range(4)] == [(True, 137)] * 3 + [(False, 1)]
    assert live(tmp_path, EXIT_DONE) == (True, 0), "the next job begins with a fresh count"


def test_failures_within_and_between_pods_add_up(tmp_path: Path) -> None:
    assert live(tmp_path, EXIT_FAILED, restarts=1) == (True, 138)  # one restart within the pod, one by its replacement
    assert live(tmp_path, EXIT_FAILED) == (True, EXIT_FAILED)
    assert not list(tmp_path.glob("*.json"))


def test_preemptions_are_free(tmp_path: Path) -> None:
    assert [live(tmp_path, EXIT_PREEMPTED) for _ in range(9)] == [(True, 143)] * 9
    assert live(tmp_path, None) == (True, 137)
    assert live(tmp_path, EXIT_PREEMPTED) == (True, 143)


def test_wrong_usage_is_final_and_clears_the_counts_of_all_nodes(tmp_path: Path) -> None:
    other = Attempts(tmp_path, "n-1", limit=2)
    assert other.begin()
    assert live(tmp_path, EXIT_USAGE) == (True, EXIT_USAGE)
    other.end(EXIT_PREEMPTED)
    assert not list(tmp_path.glob("*.json")), "a node that ends later must not bring its count back"


def test_a_count_cut_off_by_a_kill_counts_as_one(tmp_path: Path) -> None:
    (tmp_path / "lockstep-restarts-n-0.json").write_text('{"used": ')
    attempts = Attempts(tmp_path, "n-0", limit=2)
    assert attempts.begin() and attempts.used == 1


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot count restarts in"):
        Attempts(tmp_path / "file/restarts", "n", limit=1).begin()


def test_without_a_folder_the_restarts_within_the_pod_count() -> None:
    attempts = Attempts(None, "n", limit=1)
    assert attempts.begin()
    attempts.restarted(1)
    attempts.end(EXIT_FAILED)
    assert cluster_code(EXIT_FAILED, "kubernetes", attempts.used, attempts.limit) == EXIT_FAILED


@pytest.mark.parametrize(
    ("master", "expected"),
    [("", "n-1"), ("job-master-0", "n-1"), ("job-node-0-0.job", "n-1.job"), ("10.0.0.5", "n-1"), ("127.0.0.2", "n-1")],
)
def test_the_address_is_in_the_masters_domain(master: str, expected: str) -> None:
    assert own_address({"PET_MASTER_ADDR": master} if master else {}, "n-1") == expected
