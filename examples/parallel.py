"""`plain.py` with data parallelism: torchrun --nproc-per-node 2 examples/parallel.py STRATEGY [OPTION=VALUE …] (or mpiexec, srun).

At the end it prints what each rank has sent, and trains `plain.py` for the error: how far the weights are from those of one process.
"""

import sys

import plain
import torch
import torch.nn.functional as F
import yaml
from sklearn.datasets import load_digits
from torch import nn

from lockstep.training import sync
from lockstep.training.parallel import world


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.head = nn.Linear(32 * 4 * 4, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return self.head(x.flatten(1))


def main(me):
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.images).float()[:, None] / 16, torch.tensor(digits.target)
    model = Net()
    name, *words = sys.argv[1:]
    options = {option: yaml.safe_load(value) for option, value in (word.split("=", 1) for word in words)}
    strategy = sync.build({"name": name, "options": options})
    net = strategy.wrap(model, me, images[:2])
    optimizer = strategy.make_optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
    for epoch in range(3):
        for batch in torch.randperm(1500).split(60):
            own = batch[me.rank :: me.size]
            loss = F.cross_entropy(net(images[own]), labels[own], reduction="sum") * strategy.loss_factor / len(batch)
            strategy.zero_grad()
            loss.backward()
            strategy.synchronize()
            optimizer.step()
        whole = strategy.full_module(model)
        with torch.no_grad():
            logits = whole(images[1500:])
        accuracy = (logits.argmax(1) == labels[1500:]).float().mean()
        if me.leader:
            print(f"epoch {epoch + 1}: loss {F.cross_entropy(logits, labels[1500:]):.5f}, accuracy {accuracy:.4f}")
    return whole, strategy.bytes_sent


def compare(trained, sent):
    """Trains in one process, and prints the bytes and the error."""
    print(f"{sent:,} bytes sent by each rank. One process, for comparison:")
    weights, expected = (nn.utils.parameters_to_vector(model.parameters()) for model in (trained, plain.main()))
    print(f"error of the weights: {(weights - expected).norm() / expected.norm():.1e} of their norm")


if __name__ == "__main__":
    with world.script() as me:
        trained, sent = main(me)
        if me.leader:
            compare(trained, sent)
