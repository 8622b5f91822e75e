"""`examples/plain.py` with Accelerate: any number of ranks, saved every 10 steps, going on in the middle of an epoch."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.head = nn.Linear(32 * 4 * 4, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return self.head(x.flatten(1))


class Cursor:
    def __init__(self):
        self.epoch, self.step, self.generator = 0, 0, torch.get_rng_state()

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


def main(saved):
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.images).float()[:, None] / 16, torch.tensor(digits.target)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    cursor = Cursor()
    accelerator.register_for_checkpointing(cursor)
    if saved.exists():
        accelerator.load_state(str(saved))
    for epoch in range(cursor.epoch, 3):
        torch.set_rng_state(cursor.generator)
        for step, batch in enumerate(torch.randperm(1500).split(60)):
            if step < cursor.step:
                continue
            own = batch.chunk(accelerator.num_processes)[accelerator.process_index]
            loss = F.cross_entropy(model(images[own]), labels[own])
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            cursor.step = step + 1
            if cursor.step % 10 == 0:
                accelerator.save_state(str(saved))
        with torch.no_grad():
            logits = model(images[1500:])
        accuracy = (logits.argmax(1) == labels[1500:]).float().mean()
        accelerator.print(
            f"epoch {epoch + 1}: loss {F.cross_entropy(logits, labels[1500:]):.5f}, accuracy {accuracy:.4f}"
        )
        cursor.epoch, cursor.step, cursor.generator = epoch + 1, 0, torch.get_rng_state()


if __name__ == "__main__":
    main(Path(sys.argv[1]) / "state")
