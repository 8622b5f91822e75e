"""The name by which a node is found."""

from __future__ import annotations

import pytest

from lockstep.training.launch.agent import node_address


@pytest.mark.parametrize(
    ("master", "expected"), [("", "n-1"), ("job-master-0", "n-1"), ("job-node-0-0.job", "n-1.job"), ("10.0.0.5", "n-1")]
)
def test_the_address_is_in_the_masters_domain(master: str, expected: str) -> None:
    assert node_address({"PET_MASTER_ADDR": master} if master else {}, "n-1") == expected
