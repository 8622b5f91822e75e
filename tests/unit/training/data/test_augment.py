from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lockstep.training.data.augment import augment, check_settings, draw_keys, draws
from tests import product

N = 64
IMAGES = torch.randint(0, 256, (N, 12, 10, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
ROWS, IDS = torch.arange(N), torch.arange(N) + 1000


def _settings(**augmentation: object) -> Any:
    return product.data(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4), augment=augmentation)


@pytest.mark.parametrize(
    ("crop", "padding", "flip"), [(0, "zero", "alternating"), (3, "reflect", "random"), (3, "zero", "none")]
)
def test_crop_and_flip_equal_padding_and_slicing(padding: str, flip: str, crop: int) -> None:
    data = _settings(crop=crop, padding=padding, flip=flip)
    out = augment(IMAGES, ROWS, IDS, data, draw_keys(3, 5), dtype=torch.float64)
    dy, dx, flipped = draws(draw_keys(3, 5), IDS, crop, flip)
    for i in range(N):
        image = IMAGES[i].permute(2, 0, 1)[None].double()
        padded = F.pad(image, [crop] * 4, mode="reflect" if padding == "reflect" else "constant")
        y, x = crop + int(dy[i]), crop + int(dx[i])
        expected = padded[:, :, y : y + 12, x : x + 10]
        expected = expected.flip(-1) if flipped[i] else expected
        mean, std = (torch.tensor(v, dtype=torch.float64).view(1, 3, 1, 1) for v in (data.mean, data.std))
        torch.testing.assert_close(out[i : i + 1], (expected / 255 - mean) / std)


def test_a_sample_is_augmented_the_same_in_any_batch_and_layout() -> None:
    data = _settings(crop=2, flip="random")
    whole = augment(IMAGES, ROWS, IDS, data, draw_keys(1, 2))
    order = torch.randperm(N)
    assert torch.equal(augment(IMAGES, order, IDS[order], data, draw_keys(1, 2)), whole[order])
    assert not torch.equal(augment(IMAGES, ROWS, IDS, data, draw_keys(1, 3)), whole)
    channels_last_batch = augment(IMAGES, ROWS, IDS, data, draw_keys(1, 2), channels_last=True)
    assert torch.equal(whole, channels_last_batch) and channels_last_batch.is_contiguous(
        memory_format=torch.channels_last
    )


def test_draws_are_uniform() -> None:
    ids = torch.arange(90_000)
    dy, dx, flipped = draws(draw_keys(0, 0), ids, 4, "random")
    for shift in (dy, dx):
        counts = torch.bincount(shift + 4, minlength=9).double() / len(ids)
        assert ((counts - 1 / 9).abs() < 0.005).all()
    assert abs(flipped.double().mean() - 0.5) < 0.01
    joint = torch.stack([dy.double(), dx.double(), flipped.double()])
    assert (torch.corrcoef(joint) - torch.eye(3, dtype=torch.float64)).abs().max() < 0.02


@pytest.mark.parametrize(
    ("recipe", "words", "shape", "named"),
    [
        ("resnet9", [], (28, 28, 1), "data.mean"),
        ("mlp", ["data.std=[1,2]"], (1024,), "data.std"),
        ("mlp", ["augment.flip=random"], (1024,), "flip=none"),
        ("mlp", ["tta=flip"], (1024,), "tta=none"),
    ],
)
def test_settings_that_do_not_fit_the_samples(
    recipe: str, words: list[str], shape: tuple[int, ...], named: str
) -> None:
    with pytest.raises(product.UserError, match=named):
        check_settings(product.recipe(recipe, *words), shape)
    check_settings(product.recipe("resnet9"), (32, 32, 3))
    check_settings(product.recipe("fashion_cnn"), (28, 28, 1))
