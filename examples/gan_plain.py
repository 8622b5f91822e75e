"""A GAN that draws digits of 8 × 8 pixels. `gan.py` is the same on a Session."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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


def main():
    torch.manual_seed(0)
    digits = TensorDataset(torch.tensor(load_digits().data, dtype=torch.float32) / 16)
    g, d = G(), D()
    opt_g = torch.optim.Adam(g.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(d.parameters(), lr=1e-3, betas=(0.5, 0.999))
    for epoch in range(EPOCHS):
        for (x,) in DataLoader(digits, BATCH, shuffle=True, drop_last=True):
            d_loss = real(d(x)) + fake(d(g(noise(x)).detach()))
            opt_d.zero_grad()
            d_loss.backward()
            opt_d.step()
            g_loss = real(d(g(noise(x))))
            opt_g.zero_grad()
            g_loss.backward()
            opt_g.step()
        print(f"epoch {epoch + 1}: d_loss {d_loss:.4f}, g_loss {g_loss:.4f}")
    with torch.no_grad():
        print(show(g.eval()(noise(x[:3]))))


if __name__ == "__main__":
    main()
