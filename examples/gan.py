"""`gan_plain.py` on a Session: two models, each with its optimizer and its step, on any number of ranks."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from lockstep import Session

EPOCHS, BATCH, NOISE, WIDTH = 20, 64, 16, 64


class G(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Linear(NOISE, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(),
            nn.Linear(2 * WIDTH, 64), nn.Sigmoid(),
        )  # fmt: skip


class D(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Linear(64, 2 * WIDTH), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(2 * WIDTH, WIDTH), nn.LeakyReLU(0.2),
            nn.Linear(WIDTH, 1),
        )  # fmt: skip


def real(logits):
    return F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits))


def fake(logits):
    return F.binary_cross_entropy_with_logits(logits, torch.zeros_like(logits))


def noise(like):
    return torch.randn(len(like), NOISE, device=like.device)


def show(images):
    """Three images [3, 64] side by side."""
    rows = images.view(-1, 8, 8).transpose(0, 1).flatten(1)
    return "\n".join("".join(" .:*#"[int(value * 4.99)] for value in row) for row in rows)


def main(run):
    torch.manual_seed(0)
    digits = TensorDataset(torch.tensor(load_digits().data, dtype=torch.float32) / 16)
    g, d = run.replicate(G(), name="g"), run.replicate(D(), name="d")
    opt_g = run.optimizer(lambda of: torch.optim.Adam(of, lr=1e-3, betas=(0.5, 0.999)), "g", g)
    opt_d = run.optimizer(lambda of: torch.optim.Adam(of, lr=1e-3, betas=(0.5, 0.999)), "d", d)
    for _ in run.epochs(EPOCHS):
        for (x,) in run.batches(digits, BATCH):
            run.step(lambda x: real(d(x)) + fake(d(g(noise(x)).detach())), x, optimizer=opt_d)
            d_loss = run.loss()
            run.step(lambda x: real(d(g(noise(x)))), x, optimizer=opt_g)
            g_loss = run.loss()
        run.log(d_loss=d_loss, g_loss=g_loss)
    with torch.no_grad():
        run.print(show(run.for_evaluation(g)(noise(x[:3]))))


if __name__ == "__main__":
    with Session("runs/gan") as run:
        main(run)
