"""How the flat buffer is cut into what is sent together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.training.sync.flat import cut


def sizes(counts: list[int], min_bytes: float) -> list[int]:
    """The elements of each bucket, of parameters of so many float32 elements."""
    params = [nn.Parameter(torch.zeros(count)) for count in counts]
    flat = torch.arange(float(sum(counts)))
    buckets = cut(flat, params, min_bytes)
    assert [parameter for bucket in buckets for parameter in bucket.params] == params
    assert torch.equal(torch.cat([view.flatten() for bucket in buckets for view in bucket.views or ()]), flat)
    return [bucket.payload.numel() for bucket in buckets]


@pytest.mark.parametrize(
    ("counts", "min_bytes", "expected"),
    [
        ([100, 50, 20], 25e6, [170]),  # smaller than the last bucket may be
        ([500_000, 500_000, 100_000, 50_000], 25e6, [1_000_000, 150_000]),  # 4 MB would wait for the first layer
        ([500_000] * 4, 4e6, [1_000_000, 500_000, 500_000]),  # no parameter is that small: one is the last bucket
        ([500_000, 600_000, 300_000, 200_000, 10], 4e6, [1_100_000, 300_000, 200_010]),  # the rest goes before it
        ([40, 40, 40, 40], 320.0, [80, 80]),  # buckets that are smaller than 1 MB
        ([1_000_000], 25e6, [1_000_000]),
    ],
)
def test_the_last_bucket_is_small_and_the_others_are_not(
    counts: list[int], min_bytes: float, expected: list[int]
) -> None:
    assert sizes(counts, min_bytes) == expected
