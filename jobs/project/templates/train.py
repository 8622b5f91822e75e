"""Trains a small network on handwritten digits.

    make train                                                  two processes on this machine; again: it resumes
    make train SET="config.lr=0.01" RUN_DIR=runs/second         another run with another learning rate
    python train.py                                             one process, without Lockstep's launcher

Killed at any step and started again it ends in the same weights.
"""

from functools import partial

import torch
import torch.nn.functional as F
from net import Net
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

from lockstep import Session

CONFIG = {"epochs": 6, "batch_size": 64, "lr": 0.003, "width": 16}  # changed by config.NAME=VALUE


def digits():
    """(training data, test data): images [n, 1, 8, 8] in 0 … 1 and labels [n]. scikit-learn brings them along."""
    found = load_digits()
    images, labels = torch.tensor(found.images).float()[:, None] / 16, torch.tensor(found.target)
    return TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])


def scores(network, images, labels):
    """Sums over these samples, which the session divides by the number of all."""
    logits = network(images)
    return {
        "test_loss": F.cross_entropy(logits, labels, reduction="sum"),
        "accuracy": (logits.argmax(1) == labels).sum(),
    }


def main(run):
    config = run.config
    training, test = digits()
    model = run.replicate(Net(config["width"]))
    optimizer = run.optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=config["lr"]))
    steps = config["epochs"] * (len(training) // config["batch_size"])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    run.keep(schedule=schedule)
    for _ in run.epochs(config["epochs"]):
        for images, labels in run.batches(training, config["batch_size"]):
            run.step(lambda x, y: F.cross_entropy(model(x), y), images, labels)
            schedule.step()
        run.log(**run.evaluate(partial(scores, run.for_evaluation()), test))


if __name__ == "__main__":
    with Session("runs/@name@", config=CONFIG) as run:
        main(run)
