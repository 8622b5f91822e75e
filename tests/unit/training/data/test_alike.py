"""The values of a sample by which ranks compare their datasets."""

from __future__ import annotations

import pytest

from lockstep.training.data.alike import digests

pytestmark = pytest.mark.promise("replicas-apart")


@pytest.mark.parametrize("kind", [list, tuple])
def test_numbers_of_a_list_are_one_value_with_its_length(kind: type) -> None:
    first = digests({"tokens": kind(range(100)), "label": 3})
    assert len(first) == 2 and first == digests({"tokens": kind(range(100)), "label": 3})
    for numbers in ([*range(99)], [*range(99), 0]):
        assert digests({"tokens": kind(numbers), "label": 3}) != first
    assert [value[0] for value in digests((1, 0.5))] == [True, False], "a label beside a number stays a whole number"
