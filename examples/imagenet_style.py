"""A loop of realistic size on a Session: mixed precision, accumulation, warm-up and cosine, an average of the weights,
label smoothing, validation shared by the ranks.

    lockstep run --ranks 2 -- python examples/imagenet_style.py runs/imagenet-style checkpoint.every_steps=20

Images are generated, so that it runs anywhere; put a dataset of your own in place of `Generated`.
"""

import math
import sys
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from lockstep import Session

EPOCHS, BATCH, MICRO, CLASSES, SIZE = 4, 64, 2, 10, 32


class Generated(Dataset):
    """Noisy patterns, one a class. Training images are shifted and mirrored at random."""

    def __init__(self, count, training):
        self.count, self.training = count, training
        self.patterns = torch.randn(CLASSES, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        noise = torch.Generator().manual_seed(index + (0 if self.training else 1_000_000))
        image = self.patterns[index % CLASSES] + 2 * torch.randn(3, SIZE, SIZE, generator=noise)
        if self.training:
            image = image.roll(tuple(torch.randint(-2, 3, (2,)).tolist()), (1, 2))
            image = image.flip(2) if torch.rand(()) < 0.5 else image
        return image, index % CLASSES


class Network(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        widths = (3, width, 2 * width, 4 * width)
        self.body = nn.Sequential(*(self.block(a, b) for a, b in pairwise(widths)))
        self.head = nn.Linear(4 * width, CLASSES)

    @staticmethod
    def block(fan_in, fan_out):
        return nn.Sequential(
            nn.Conv2d(fan_in, fan_out, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(fan_out), nn.ReLU()
        )

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


def warm_up_and_cosine(step, steps, warm=20):
    return (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def decayed(model):
    """Weights decay; biases and norms do not."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]


@torch.no_grad()
def validate(run, dataset, batch=64):
    """Each rank scores its share; all see the sums. A signal does not wait for the end."""
    model, right, loss = run.for_evaluation(), 0.0, 0.0
    own = range(len(dataset))[run.rank :: run.size]
    for low in range(0, len(dataset), batch * run.size):
        chosen = own[low // run.size : low // run.size + batch]
        if chosen:
            images, labels = zip(*(dataset[index] for index in chosen), strict=True)
            logits = model(torch.stack(images).to(run.device))
            target = torch.tensor(labels, device=run.device)
            right += float((logits.argmax(1) == target).sum())
            loss += float(F.cross_entropy(logits, target, reduction="sum"))
        run.boundary()
    right, loss = run.sum(right, loss)
    return right / len(dataset), loss / len(dataset)


def main(run):
    training, validation = Generated(1024, True), Generated(250, False)
    model = run.replicate(Network())
    optimizer = run.optimizer(lambda _: torch.optim.AdamW(decayed(model), lr=3e-3))
    steps = EPOCHS * (len(training) // BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_up_and_cosine(step, steps))
    run.average(0.9)
    run.keep(schedule=schedule)
    for _ in run.epochs(EPOCHS):
        for images, labels in run.batches(training, BATCH, workers=1):
            for x, y in run.accumulate(zip(images.chunk(MICRO), labels.chunk(MICRO), strict=True)):
                with torch.autocast(run.device.type, torch.bfloat16):
                    logits = model(x)
                run.backward(F.cross_entropy(logits.float(), y, label_smoothing=0.1), samples=len(y))
            run.update(clip=1.0)
            schedule.step()
        accuracy, loss = validate(run, validation)
        run.log(accuracy=accuracy, test_loss=loss)


if __name__ == "__main__":
    run_dir, *words = sys.argv[1:] or ["runs/imagenet-style"]
    with Session(run_dir, *words, config={"batch": BATCH, "epochs": EPOCHS}) as run:
        main(run)
