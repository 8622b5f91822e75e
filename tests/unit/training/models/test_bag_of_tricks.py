from __future__ import annotations

import torch
import torch.nn.functional as F

from lockstep.training.models.bag_of_tricks import BagOfTricks, whitening_filters


def _images(n: int) -> torch.Tensor:
    return torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(0)).double()


def test_ghost_norm_is_plain_batch_norm_of_each_contiguous_block_of_32() -> None:
    model = BagOfTricks(width=0.125).double()
    x = _images(96)
    model.prepare(x)
    whole = model(x)
    running = {name: buffer.clone() for name, buffer in model.named_buffers()}
    blocks = []
    fresh = BagOfTricks(width=0.125).double()
    statistics = []
    for block in x.split(32):
        fresh.load_state_dict({**model.state_dict(), **_zeroed(fresh)})
        blocks.append(fresh(block))
        statistics.append({name: buffer.clone() for name, buffer in fresh.named_buffers()})
    torch.testing.assert_close(whole, torch.cat(blocks))
    for name, buffer in running.items():  # each block's update, averaged
        torch.testing.assert_close(buffer, torch.stack([s[name] for s in statistics]).mean(0))


def _zeroed(model: BagOfTricks) -> dict[str, torch.Tensor]:
    return {n: torch.ones_like(b) if n.endswith("var") else torch.zeros_like(b) for n, b in model.named_buffers()}


def test_whitened_patches_are_uncorrelated_and_of_unit_power() -> None:
    images = F.avg_pool2d(_images(400), 3, 1, 1)  # neighbouring pixels are correlated
    filters = whitening_filters(images, eps=1e-12)
    patches = F.conv2d(images, filters).transpose(0, 1).flatten(1)
    covariance = patches @ patches.T / patches.shape[1]
    assert (covariance - torch.eye(27, dtype=torch.float64)).abs().max() < 1e-3
    assert torch.equal(filters, whitening_filters(images.clone(), eps=1e-12))
