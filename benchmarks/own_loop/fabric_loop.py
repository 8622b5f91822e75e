"""`examples/plain.py` with Lightning Fabric: any number of ranks, saved every 10 steps, going on in the middle of an epoch."""

import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
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


def main(saved):
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.images).float()[:, None] / 16, torch.tensor(digits.target)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "epoch": 0, "step": 0, "generator": torch.get_rng_state()}
    if saved.exists():
        fabric.load(saved, state)
    for epoch in range(state["epoch"], 3):
        torch.set_rng_state(state["generator"])
        for step, batch in enumerate(torch.randperm(1500).split(60)):
            if step < state["step"]:
                continue
            own = batch.chunk(fabric.world_size)[fabric.global_rank]
            loss = F.cross_entropy(model(images[own]), labels[own])
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            state["step"] = step + 1
            if state["step"] % 10 == 0:
                fabric.save(saved, state)
        with torch.no_grad():
            logits = model(images[1500:])
        accuracy = (logits.argmax(1) == labels[1500:]).float().mean()
        fabric.print(f"epoch {epoch + 1}: loss {F.cross_entropy(logits, labels[1500:]):.5f}, accuracy {accuracy:.4f}")
        state.update(epoch=epoch + 1, step=0, generator=torch.get_rng_state())


if __name__ == "__main__":
    main(Path(sys.argv[1]) / "last.ckpt")
