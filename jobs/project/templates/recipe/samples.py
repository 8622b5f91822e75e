"""The data: `data.source: samples:shapes` in recipe.yaml. Replace it by what reads yours."""

import numpy as np

CLASSES = ["square", "disc", "cross"]
SIZE, PIECE = 16, 500


def shapes(split, count=2000):
    """Noisy drawings of CLASSES, in pieces: (uint8 images [n, SIZE, SIZE, 3], labels [n]).

    Args:
        split: "train" or "test", which has a fifth as many.
        count: how many, from `data.options`.
    """
    generator = np.random.default_rng(0 if split == "train" else 1)
    left = count if split == "train" else count // 5
    y, x = np.mgrid[:SIZE, :SIZE]
    while left:
        n = min(PIECE, left)
        left -= n
        labels = generator.integers(0, len(CLASSES), n)
        centre, radius = generator.integers(6, 10, (2, n, 1, 1)), generator.integers(3, 6, (n, 1, 1))
        dy, dx = np.abs(y - centre[0]), np.abs(x - centre[1])
        square, disc = np.maximum(dy, dx) <= radius, dy**2 + dx**2 <= radius**2
        cross = (np.minimum(dy, dx) <= 1) & square
        drawn = np.choose(labels[:, None, None], [square, disc, cross])
        images = drawn[..., None] * generator.integers(120, 256, (n, 1, 1, 3)) + generator.integers(
            0, 40, (n, SIZE, SIZE, 3)
        )
        yield images.clip(0, 255).astype(np.uint8), labels
