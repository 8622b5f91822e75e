"""A source of samples as a data set of torch's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from lockstep.training.data.dataset import SourceDataset
from tests.product import UserError


def test_a_source_as_a_data_set(tmp_path: Path) -> None:
    train, test = SourceDataset("digits"), SourceDataset("digits", "test", transform=lambda image: image.mean())
    assert (len(train), len(test), len(train.classes)) == (1438, 359, 10)
    images, labels = next(iter(DataLoader(train, batch_size=5)))
    assert images.shape[:2] == (5, 3) and images.dtype == torch.float32 and 0 <= images.min() <= images.max() <= 1
    assert labels.dtype == torch.int64 and test[0][0].ndim == 0
    with pytest.raises(UserError, match="CIFAR-10"):
        SourceDataset("cifar10", root=tmp_path)
    with pytest.raises(UserError, match="'cifar'.*cifar10"):
        SourceDataset("cifar")
