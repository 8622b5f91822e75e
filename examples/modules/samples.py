"""A data source of Lockstep's by its name, as a torch data set of images [c, h, w] in 0 … 1 and labels.

`lockstep shard resnet9 --set data.root=data` downloads CIFAR-10 to data/.
"""

from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from lockstep.training.data import sources


class Images(TensorDataset):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image.permute(2, 0, 1) / 255, label


def dataset(source, split="train", root="data"):
    raw = sources.load(source, Path(root), {})
    return Images(*map(torch.from_numpy, raw.train if split == "train" else raw.test))
