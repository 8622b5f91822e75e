"""A convolution in the form for small maps computes what `nn.Conv2d` computes, forward and back."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from lockstep.training.models.resnet18 import SmallMapConv2d, convert

LAYOUTS = (torch.contiguous_format, torch.channels_last)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "size", "bias", "layout"),
    [
        (*case, bias, layout)
        for case, (bias, layout) in zip(
            [
                (3, 1, 1, (1, 1)), (3, 2, 1, (2, 2)), (1, 2, 0, (2, 2)), (7, 3, 3, (1, 4)), ((3, 5), (2, 1), (1, 2), (2, 2)),
                (3, 1, 1, (5, 5)),
            ],
            itertools.cycle(itertools.product((False, True), LAYOUTS)),
        )
    ],
)  # fmt: skip
def test_it_equals_conv2d(
    kernel: int | tuple[int, int], stride: int | tuple[int, int], padding: int | tuple[int, int], size: tuple[int, int],
    bias: bool, layout: torch.memory_format,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    ours = SmallMapConv2d(6, 5, kernel, stride, padding, bias=bias).double().to(memory_format=layout)
    plain = nn.Conv2d(6, 5, kernel, stride, padding, bias=bias).double()
    plain.load_state_dict(ours.state_dict())
    plain = plain.to(memory_format=layout)
    x = torch.randn(4, 6, *size, dtype=torch.float64).contiguous(memory_format=layout)
    results = []
    for conv in (plain, ours):
        leaf = x.clone().requires_grad_()
        y = conv(leaf)
        y.backward(torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1)))
        results.append((y.detach(), leaf.grad, *(p.grad for p in conv.parameters())))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_other_convolutions_are_refused_or_left_alone() -> None:
    options: list[dict[str, object]] = [{"groups": 2}, {"dilation": 2}, {"padding": "same"}]
    for words in options:
        with pytest.raises(ValueError, match="use nn.Conv2d"):
            SmallMapConv2d(4, 4, 3, **words)
    layers = [*(nn.Conv2d(4, 4, 3, **words) for words in options), nn.Conv2d(4, 4, 1), nn.Conv1d(4, 4, 3)]  # type: ignore[arg-type]
    network = nn.Sequential(*layers, nn.Sequential(nn.Conv2d(4, 4, 3)))
    weight = network[-1][0].weight
    convert(network)
    assert list(network[:-1]) == layers
    assert type(network[-1][0]) is SmallMapConv2d and network[-1][0].weight is weight
