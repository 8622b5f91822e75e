"""A character-level GPT that learns the prose of this repository's pages. `gpt.py` is the same on a Session."""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

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


@torch.no_grad()
def evaluate(model, text):
    model.eval()
    pieces = text[: 64 * (CONTEXT + 1)].view(64, -1)
    loss = model(pieces[:, :-1], pieces[:, 1:])
    model.train()
    return float(loss)


@torch.no_grad()
def sample(model, alphabet, length=200):
    model.eval()
    text = torch.zeros(1, 1, dtype=torch.long, device=model.place.weight.device)
    for _ in range(length):
        probabilities = F.softmax(model(text[:, -CONTEXT:], None)[:, -1], dim=-1)
        text = torch.cat([text, torch.multinomial(probabilities, 1)], 1)
    return "".join(alphabet[index] for index in text[0])


def main():
    torch.manual_seed(0)
    text, alphabet = read()
    train, val = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    model = GPT(len(alphabet))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    best = math.inf
    for step in range(STEPS):
        x, y = draw(train)
        loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % EVERY == 0:
            val_loss = evaluate(model, val)
            print(f"step {step + 1}: val_loss {val_loss:.4f}")
            if val_loss < best:
                best = val_loss
                torch.save(model.state_dict(), "gpt.pt")
    print(sample(model, alphabet))


if __name__ == "__main__":
    main()
