"""`plain.py` with a Session: any number of ranks, killed and started again at will. 14 lines differ."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from lockstep import Session


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.head = nn.Linear(32 * 4 * 4, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return self.head(x.flatten(1))


def main(run):
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.images).float()[:, None] / 16, torch.tensor(digits.target)
    images, labels = images.to(run.device), labels.to(run.device)
    model = run.replicate(Net())
    run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
    for _ in run.epochs(3):
        for batch in run.iterate(torch.randperm(1500).split(60)):
            run.step(lambda own: F.cross_entropy(model(images[own]), labels[own]), run.part(batch))
        with torch.no_grad():
            logits = run.for_evaluation()(images[1500:])
        accuracy = (logits.argmax(1) == labels[1500:]).float().mean()
        run.log(test_loss=F.cross_entropy(logits, labels[1500:]), accuracy=accuracy)


if __name__ == "__main__":
    with Session("runs/own-loop") as run:
        main(run)
