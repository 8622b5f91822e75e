"""`folders_plain.py` on a Session: any number of ranks, killed and started again at will; the best weights are kept."""

from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import nn
from torch.utils.data import DataLoader, Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder

from lockstep import Session

EPOCHS, PATIENCE, BATCH, SHAPES = 12, 3, 32, ("circle", "cross", "square")
TO_TENSOR = [transforms.ToTensor(), transforms.Normalize(0.5, 0.5)]
AUGMENTED = transforms.Compose([transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), *TO_TENSOR])


def paint(folder, count):
    """Writes `count` noisy images of each shape to `folder`/SHAPE."""
    draws = torch.Generator().manual_seed(count)
    for shape in SHAPES:
        (folder / shape).mkdir(parents=True)
        for number in range(count):
            image = Image.fromarray(torch.randint(256, (32, 32, 3), generator=draws).byte().numpy())
            pen, (x, y, size) = ImageDraw.Draw(image), torch.randint(8, 13, (3,), generator=draws).tolist()
            if shape == "circle":
                pen.ellipse((x, y, x + size, y + size), outline="white", width=2)
            elif shape == "square":
                pen.rectangle((x, y, x + size, y + size), outline="white", width=2)
            else:
                pen.line((x, y, x + size, y + size), "white", 2)
                pen.line((x, y + size, x + size, y), "white", 2)
            image.save(folder / shape / f"{number}.png")


class Residual(nn.Module):
    def __init__(self, fan_in, fan_out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(fan_out), nn.BatchNorm2d(fan_out)
        self.short = nn.Conv2d(fan_in, fan_out, 1, stride, bias=False)

    def forward(self, x):
        return F.relu(self.short(x) + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class ResNet(nn.Module):
    def __init__(self, classes, width=8):
        super().__init__()
        blocks = [Residual(3, width, 2), Residual(width, 2 * width, 2), Residual(2 * width, 4 * width, 2)]
        self.body, self.head = nn.Sequential(*blocks), nn.Linear(4 * width, classes)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


def right(model, x, y):
    return (model(x).argmax(1) == y).sum()


@torch.no_grad()
def predict(model, images):
    model.eval()
    logits = torch.cat([model(x.to(model.head.weight.device)) for x, _ in DataLoader(images, BATCH)])
    model.train()
    return logits.argmax(1).cpu()


def main(run):
    torch.manual_seed(0)
    if run.leader and not Path("shapes").exists():
        paint(Path("shapes/train"), 160)
        paint(Path("shapes/val"), 50)
    run.gather(None)  # the others wait here for rank 0's images
    train = ImageFolder("shapes/train", AUGMENTED)
    val = ImageFolder("shapes/val", transforms.Compose(TO_TENSOR))
    mine = torch.arange(len(val)).tensor_split(run.size)[run.rank].tolist()  # this rank's share
    model = run.replicate(ResNet(len(train.classes)))
    run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-4))
    for _ in run.epochs(EPOCHS):
        for x, y in run.batches(train, BATCH, workers=2):
            run.step(lambda x, y: F.cross_entropy(model(x), y, label_smoothing=0.1), x, y)
        accuracy = run.evaluate(partial(right, run.for_evaluation()), val, BATCH)
        improved = run.best is None or accuracy > run.best
        run.values["since"] = 0 if improved else run.values["since"] + 1
        run.log(accuracy=accuracy)
        if run.values["since"] == PATIENCE:
            run.stop(f"no better for {PATIENCE} epochs")
    predictions = run.gather(predict(run.for_evaluation(), Subset(val, mine)))
    if run.leader:
        torch.save(torch.cat(predictions), run.path("predictions.pt"))


if __name__ == "__main__":
    with Session("runs/folders") as run:
        main(run)
