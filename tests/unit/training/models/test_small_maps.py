"""A convolution in the form for small maps computes what `nn.Conv2d` computes, forward and back."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models import resnet18

from lockstep.training.models.resnet18 import SmallMapConv2d, convert
from tests import product

LAYOUTS = (torch.contiguous_format, torch.channels_last)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "size", "bias", "layout"),
    [
        (*case, bias, layout)
        for case, (bias, layout) in zip(
            [
                (3, 1, 1, (1, 1)), (3, 2, 1, (2, 2)), (3, 1, 1, (2, 2)), (3, 2, 1, (3, 3)), (1, 2, 0, (2, 2)), (7, 3, 3, (1, 4)),
                (3, 1, 0, (3, 4)), ((3, 5), (2, 1), (1, 2), (2, 2)), (2, 1, 1, (1, 1)), (3, 1, 1, (5, 5)), (1, 3, 2, (1, 1)),
                (2, 4, 3, (1, 3)),
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
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_the_form_is_taken_where_the_map_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nothing above would have tested it."""
    seen: list[tuple[int, ...]] = []
    whole = nn.Conv2d.forward
    monkeypatch.setattr(nn.Conv2d, "forward", lambda conv, x: (seen.append(tuple(x.shape[2:])), whole(conv, x))[1])
    conv = SmallMapConv2d(2, 2, 3, 1, 1)
    for size in (1, 2, 3):
        conv(torch.randn(1, 2, size, size))
    assert seen == [(3, 3)]
    conv(torch.randn(2, 1, 1))  # one image without a batch, which `nn.Conv2d` takes as well
    assert len(seen) == 2
    with pytest.raises(RuntimeError, match="[Kk]ernel size"):  # a map that has no output stays torch's to refuse
        SmallMapConv2d(2, 2, 3)(torch.randn(1, 2, 2, 2))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resnet18_with_the_stock_stem_is_torchvisions(layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    ours = product.model("resnet18", {"stem": "stock"}).double().to(memory_format=layout)
    torch.manual_seed(0)
    plain = resnet18(num_classes=10).double().to(memory_format=layout)
    state = {name.removeprefix("network."): value for name, value in ours.state_dict().items()}
    assert list(state) == list(plain.state_dict())
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    x = torch.randn(8, 3, 32, 32, dtype=torch.float64).contiguous(memory_format=layout)
    for network in (ours, plain):
        F.cross_entropy(network(x), torch.arange(8)).backward()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-10)
    torch.testing.assert_close(ours.eval()(x), plain.eval()(x), rtol=0, atol=1e-10)
    # Of another layout than its parameter DDP would copy a gradient once more; in float32 kernels hand layouts on.
    ours.float()(x.float()).sum().backward()
    assert all(p.grad is not None and p.grad.stride() == p.stride() for p in ours.parameters())


def test_other_convolutions_are_refused_or_left_alone() -> None:
    options: list[dict[str, object]] = [
        {"groups": 2},
        {"dilation": 2},
        {"padding": "same"},
        {"padding": 1, "padding_mode": "reflect"},
    ]
    for words in options:
        with pytest.raises(ValueError, match="use nn.Conv2d"):
            SmallMapConv2d(4, 4, 3, **words)
    left = [*(nn.Conv2d(4, 4, 3, **words) for words in options), nn.Conv2d(4, 4, 1), nn.Conv1d(4, 4, 3)]  # type: ignore[arg-type]
    network = nn.Sequential(*left, nn.Sequential(nn.Conv2d(4, 4, 3)))
    weight = network[-1][0].weight
    convert(network)
    assert list(network[:-1]) == left
    assert type(network[-1][0]) is SmallMapConv2d and network[-1][0].weight is weight
