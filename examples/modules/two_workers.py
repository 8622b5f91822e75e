"""The samples of the MLP's module in the order in which its two workers train them: `data.source`, for two ranks.

Of the 15 full batches worker 0 takes the 8 with even numbers, worker 1 the 7 with odd ones. DDP pairs their steps, and each worker
starts its next pass when its own ends. After 56 steps the pairs repeat: that is an epoch here.
"""

from itertools import cycle, islice

import numpy as np
from sklearn.datasets import make_classification


def paired(split, n=10_000):
    """Trains on those pairs, and tests on the first tenth of the samples, as the module does."""
    x, y = make_classification(n, 1024, n_informative=512, n_classes=32, n_clusters_per_class=10, random_state=0)
    x, y = x[:1000].astype(np.float32), y[:1000]
    if split == "test":
        return x, y
    batches = np.arange(960).reshape(15, 64)  # the last 40 samples are in none
    steps = zip(*(islice(cycle(batches[worker::2]), 56) for worker in (0, 1)))
    order = np.concatenate([np.concatenate(pair) for pair in steps])
    return x[order], y[order]
