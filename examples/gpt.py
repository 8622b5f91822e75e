"""`gpt_plain.py` on a Session: any number of ranks, killed and started again at will; the best weights are kept."""

import math
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from lockstep import Session

STEPS, EVERY, WARM_UP, RATE = 240, 40, 20, 3e-3
BATCH, CONTEXT, WIDTH, HEADS, LAYERS, DROPOUT = 16, 48, 64, 4, 2, 0.1


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).movedim(2, 0).transpose(2, 3)
        x = x + self.dropout(
            self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        )
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    def __init__(self, characters):
        super().__init__()
        self.token, self.place = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, characters)

    def forward(self, x, y):
        logits = self.head(self.blocks(self.token(x) + self.place.weight[: x.shape[1]]))
        return logits if y is None else F.cross_entropy(logits.flatten(0, 1), y.flatten())


def read():
    """The pages' characters as numbers, [characters], and the alphabet."""
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    alphabet = sorted(set(text))
    number = {character: index for index, character in enumerate(alphabet)}
    return torch.tensor([number[character] for character in text]), alphabet


def draw(text):
    """A batch of pieces, and what follows each of their characters."""
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1))
    pieces = text[starts + torch.arange(CONTEXT + 1)]
    return pieces[:, :-1], pieces[:, 1:]


def rate(step):
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARM_UP) / (STEPS - WARM_UP)))


def loss_of(model, pieces):
    return len(pieces) * model(pieces[:, :-1], pieces[:, 1:])  # their sum


@torch.no_grad()
def sample(model, alphabet, length=200):
    model.eval()
    text = torch.zeros(1, 1, dtype=torch.long, device=model.place.weight.device)
    for _ in range(length):
        probabilities = F.softmax(model(text[:, -CONTEXT:], None)[:, -1], dim=-1)
        text = torch.cat([text, torch.multinomial(probabilities, 1)], 1)
    return "".join(alphabet[index] for index in text[0])


def main(run):
    torch.manual_seed(0)
    text, alphabet = read()
    text = text.to(run.device)
    train, val = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    pieces = val[: 64 * (CONTEXT + 1)].view(64, -1)
    model = run.replicate(GPT(len(alphabet)))
    optimizer = run.optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.1))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    run.keep(schedule=schedule)
    for _ in run.epochs(1):
        for step in run.iterate(range(STEPS)):
            x, y = map(run.part, draw(train))  # every rank draws the same batch, and takes its part
            run.step(model, x, y, clip=1.0)
            schedule.step()
            if (step + 1) % EVERY == 0:
                val_loss = run.evaluate(partial(loss_of, run.for_evaluation()), pieces, BATCH)
                run.print(f"step {step + 1}: val_loss {val_loss:.4f}")
                run.log(val_loss=val_loss)
    run.print(sample(run.for_evaluation(), alphabet))


if __name__ == "__main__":
    with Session("runs/gpt", checkpoint={"keep_best": {"val_loss": "min"}}) as run:
        main(run)
