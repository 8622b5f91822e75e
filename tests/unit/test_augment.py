from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lockstep.training.config import Augment, Data
from lockstep.training.data.augment import augment, draw_keys, draws, normalise

N = 64
IMAGES = torch.randint(0, 256, (N, 12, 10, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
IDS = torch.arange(N) + 1000


def _settings(**augmentation: object) -> Data:
    return Data(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4), augment=Augment(**augmentation))  # type: ignore[arg-type]


@pytest.mark.parametrize("padding", ["reflect", "zero"])
@pytest.mark.parametrize("flip", ["none", "random", "alternating"])
@pytest.mark.parametrize("crop", [0, 3])
def test_crop_and_flip_equal_padding_and_slicing(padding: str, flip: str, crop: int) -> None:
    data = _settings(crop=crop, padding=padding, flip=flip)
    out = augment(IMAGES, torch.arange(N), IDS, data, draw_keys(3, 5), dtype=torch.float64)
    dy, dx, flipped = draws(draw_keys(3, 5), IDS, crop, flip)
    for i in range(N):
        image = IMAGES[i].permute(2, 0, 1)[None].double()
        padded = F.pad(image, [crop] * 4, mode="reflect" if padding == "reflect" else "constant")
        y, x = crop + int(dy[i]), crop + int(dx[i])
        expected = padded[:, :, y : y + 12, x : x + 10]
        expected = expected.flip(-1) if flipped[i] else expected
        mean, std = (torch.tensor(v, dtype=torch.float64).view(1, 3, 1, 1) for v in (data.mean, data.std))
        torch.testing.assert_close(out[i : i + 1], (expected / 255 - mean) / std)


def test_a_sample_is_augmented_the_same_in_any_batch() -> None:
    data = _settings(crop=2, flip="random", cutout=4)
    whole = augment(IMAGES, torch.arange(N), IDS, data, draw_keys(1, 2))
    order = torch.randperm(N)
    assert torch.equal(augment(IMAGES, order, IDS[order], data, draw_keys(1, 2)), whole[order])
    assert not torch.equal(augment(IMAGES, torch.arange(N), IDS, data, draw_keys(1, 3)), whole)


def test_draws_are_uniform() -> None:
    ids = torch.arange(90_000)
    dy, dx, flipped = draws(draw_keys(0, 0), ids, 4, "random")
    for shift in (dy, dx):
        counts = torch.bincount(shift + 4, minlength=9).double() / len(ids)
        assert ((counts - 1 / 9).abs() < 0.005).all()
    assert abs(flipped.double().mean() - 0.5) < 0.01
    joint = torch.stack([dy.double(), dx.double(), flipped.double()])
    assert (torch.corrcoef(joint) - torch.eye(3, dtype=torch.float64)).abs().max() < 0.02


def test_alternating_flip_turns_every_image_every_epoch() -> None:
    first, second, third = (draws(draw_keys(9, epoch), IDS, 0, "alternating")[2] for epoch in range(3))
    assert torch.equal(first, ~second) and torch.equal(first, third)
    assert 0 < int(first.sum()) < N


def test_cutout_sets_a_square_to_the_mean() -> None:
    data = _settings(cutout=4)
    plain = normalise(IMAGES, data, torch.float32, False)
    out = augment(IMAGES, torch.arange(N), IDS, data, draw_keys(0, 0))
    holes = (out != plain).any(1)
    assert (out[holes[:, None].expand_as(out)] == 0).all()
    assert 4 <= int(holes[0].sum()) <= 16 and not torch.equal(holes[0], holes[1])


def test_channels_last_holds_the_same_numbers() -> None:
    data = _settings(crop=1, flip="random")
    one = augment(IMAGES, torch.arange(N), IDS, data, draw_keys(0, 0))
    other = augment(IMAGES, torch.arange(N), IDS, data, draw_keys(0, 0), channels_last=True)
    assert torch.equal(one, other) and other.is_contiguous(memory_format=torch.channels_last)
