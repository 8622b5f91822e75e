"""The function of a step is checked once in a start. A loss that is no mean over samples gives other weights on several ranks or after a
resume. So does a state that is carried from batch to batch."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from tests.events import summary_of
from tests.own.job import script, scripts

CODE = """
run_dir, kind, sync, looks = sys.argv[1:]
if looks == "0":
    from lockstep.training.run import batch_mean
    batch_mean.CALL = 0
X, Y = torch.randn(96, 6, generator=torch.Generator().manual_seed(1)), torch.arange(96) % 3
DATA = TensorDataset(X, Y)
class Holder:
    n = 0
class Table(dict):
    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__
class Rows(list):
    pass
SPACE, TABLE, ROWS, ARRAY = types.SimpleNamespace(n=0), Table(n=0), Rows(), np.zeros(3_000_000)
class Trainer:
    def __init__(self, model):
        self.model, self.calls, self.last = model, 0, None
    def counted(self, x, y):
        self.calls += 1
        return F.cross_entropy(self.model(x), y)
    def hidden(self, x, y):
        out = self.model(x) if self.last is None else self.model(x) + self.last.mean(0)
        self.last = out.detach()
        return F.cross_entropy(out, y)
def main(kind):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(8, 3))
    if kind in ("aux", "surrogate"):  # a batch norm is not looked at in training mode
        net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2 if kind == "surrogate" else 0.0), nn.Linear(8, 3))
    with Session(run_dir, "metrics.enabled=false", sync=sync) as run:
        model = run.replicate(net)
        run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
        trainer, seen, totals, printed, others = Trainer(model), [], torch.zeros(2), [], iter(torch.randn(99, 24, 6))
        compiled = torch.compile(net, backend="eager") if kind == "compiled" else None
        def each(x, y):
            return F.cross_entropy(model(x), y, reduction="none")
        def tokens(x, y):
            return F.cross_entropy(model(x), torch.where(x[:, 0] > 0.3, -100, y))
        def floats(x, y):
            loss = F.cross_entropy(model(x) * (1 + sum(seen)), y)
            seen[:] = [0.1 * float(loss.detach())]
            return loss
        def written(x, y):
            loss = each(x + totals[0], y).mean()
            totals[0].add_(0.1)
            return loss
        def metrics(x, y):
            net.train()
            loss = each(x, y).mean()
            seen.append(loss.item())
            totals.add_(1.0)
            print("in the function")
            return loss
        def places(x, y):
            for one in (SPACE, TABLE, Holder, places):
                one.n += 1
            ROWS.append(1)
            ARRAY[0] += 1
            return each(x, y).mean()
        places.n = 0
        def popped(batch):
            y = batch.pop("y")
            return each(batch["x"].mul_(0.5).requires_grad_(), y).mean()
        def halved(x, y):
            with torch.autocast("cpu", torch.bfloat16):
                return F.cross_entropy(model(x), y, label_smoothing=0.1)
        def mixed(x, y):
            order = torch.randperm(len(x))
            return each(0.7 * x + 0.3 * x[order], y).mean()
        def penalized(x, y):
            loss = each(x.requires_grad_(), y)
            (slope,) = torch.autograd.grad(loss.sum(), x, create_graph=True)
            return (loss + slope.square().sum(1)).mean()
        def aux(x, y):
            shares = F.softmax(model(x), 1).mean(0)
            return each(x, y).mean() + (shares.square().sum() if net.training else 0)
        def scaled(x, y):
            losses = each(x, y)
            return sum(loss / loss.detach() for loss in (losses.mean(), losses.square().mean()))
        def whitened(x, y):
            losses = each(x, y)
            advantages = (losses.detach() - losses.detach().mean()) / losses.detach().std()
            return (advantages * (losses.detach() - losses).exp()).mean()
        def pairs(x, y):  # of two views that follow one another in a batch
            first, second = F.normalize(model(x), dim=1).chunk(2)
            return -(first * second.detach()).sum(1).mean()
        def tamed(x, y):  # a layer's gradient is clamped
            out = model(x)
            out.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
            return F.cross_entropy(out, y)
        def surrogate(x, y):  # its value does not depend on what dropout draws, and its gradient does
            losses = each(x, y)
            return (y * (losses.detach() - losses).exp()).mean()
        functions = {
            "surrogate": surrogate, "pairs": pairs, "views": pairs, "tamed": tamed, "aux": aux, "scaled": scaled, "whitened": whitened,
            "outside": lambda x, y: F.cross_entropy(x, y),
            "steep": lambda x, y: each(x, y).mean() * torch.autograd.grad(each(x, y).mean(), net[4].weight)[0].norm(),
            "penalized": penalized,
            "top": lambda x, y: each(x, y).topk(len(x) // 3).values.mean(),
            "constant": lambda x, y: each(x, y).sum() / 24,
            "root": lambda x, y: each(x, y).mean().sqrt(),
            "across": lambda x, y: F.cross_entropy(F.normalize(model(x), dim=0), y),
            "tokens": tokens, "hidden": trainer.hidden, "floats": floats, "written": written,
            "plain": lambda x, y: each(x, y).mean(), "metrics": metrics, "counted": trainer.counted, "halved": halved, "mixed": mixed,
            "places": places, "popped": popped,
            "compiled": lambda x, y: F.cross_entropy(compiled(x), y),
            "drawn": lambda x, y: each(next(others)[:len(x)], y).mean(),
        }
        for epoch in run.epochs(1):
            for x, y in run.iterate(DataLoader(DATA, 24)) if kind == "views" else run.batches(DATA, 24):
                x = model(x) if kind == "outside" else x  # a graph that the step needs again
                run.step(functions[kind], *([{"x": x, "y": y}] if kind == "popped" else (x, y)), samples=len(y))
        calls = {"metrics": len(seen), "counted": trainer.calls}.get(kind, 4)
        assert calls == 4 and totals[1] in (0.0, 4.0), "the look leaves nothing"
        counts = {SPACE.n, TABLE["n"], Holder.n, places.n, len(ROWS), int(ARRAY[0])}
        assert kind != "places" or counts == {4}, counts
        assert kind != "drawn" or len([*others]) == 95
main(kind)
"""
NO_MEAN, STATE = "the loss of a batch is not the mean over its samples", "the function of a step carries a state"
NO_MEAN_GRADIENT = "the gradient of a batch is not the mean over its samples"
NAMED = {
    **dict.fromkeys(("top", "constant", "root", "across", "tokens", "steep", "aux", "pairs"), NO_MEAN),
    **dict.fromkeys(("hidden", "floats", "written"), STATE), **dict.fromkeys(("scaled", "whitened"), NO_MEAN_GRADIENT),
}  # fmt: skip
RIGHT = (
    "outside",
    "surrogate",
    "tamed",
    "views",
    "plain",
    "penalized",
    "metrics",
    "counted",
    "halved",
    "mixed",
    "compiled",
    "places",
    "popped",
    "drawn",
)
"""The last one cannot be looked at, since the look would use up batches of another loader."""


def warnings(ranks: int, code: str, kinds: Collection[str], folder: Path, *words: object) -> dict[str, list[str]]:
    """Trains each kind in a folder of its name, and returns its warnings."""
    named = {}
    for kind, done in zip(kinds, scripts(ranks, code, *((folder / kind, kind, *words) for kind in kinds)), strict=True):
        assert done.code == 0, (kind, done.output)
        assert done.output.count("in the function") == 4 * ranks * (kind == "metrics"), "the look prints nothing"
        kinds_of_loss = [] if code != LOSSES or kind == "later" else ["sum"] if kind in ("own", "total") else ["mean"]
        assert re.findall(r"a function is not checked: it must be the (\w+)", done.output) == kinds_of_loss, done.output
        named[kind] = [line for line in done.output.splitlines() if "warning: " in line]
    return named


def test_a_loss_that_is_no_mean_and_a_state_that_is_carried_are_named(tmp_path: Path) -> None:
    named = warnings(2, CODE, NAMED, tmp_path, "ddp", 1)
    for kind, text in NAMED.items():
        assert len([line for line in named[kind] if text in line]) == 1, (kind, named)
    assert "It is a sum" in named["constant"][0] and "tokens, class weights" in named["tokens"][0]


def test_ordinary_functions_are_not_named_and_the_look_changes_nothing(tmp_path: Path) -> None:
    named = warnings(1, CODE, (*RIGHT, "root"), tmp_path / "looked", "flat", 1)
    assert len(named.pop("root")) == 1, "another number of ranks would train otherwise"
    wrong = NO_MEAN, STATE, NO_MEAN_GRADIENT
    assert not [line for lines in named.values() for line in lines if any(words in line for words in wrong)], named
    warnings(1, CODE, RIGHT, tmp_path / "plain", "flat", 0)
    for kind in RIGHT:
        mine, other = (summary_of(tmp_path / one / kind) for one in ("looked", "plain"))
        assert mine["weights_sha256"] == other["weights_sha256"], kind


LOSSES = """
run_dir, kind = sys.argv[1:]
def losses(o, y, weight):
    each, target = F.cross_entropy(o, y, reduction="none"), F.one_hot(y, 3).float()
    yield "reduction", F.cross_entropy(o, y, reduction="sum")
    yield "by hand", -(F.log_softmax(o, 1) * target).sum()
    yield "two terms", F.mse_loss(o, target, reduction="sum") - 0.5 * (1 + o - o.exp()).sum()
    yield "mean", F.cross_entropy(o, y)
    yield "divided", each.sum() / len(y)
    yield "scaled", each.sum() * (1 / len(y))
    yield "penalty", each.mean() + 0.1 * weight.square().sum() + weight.abs().sum()
    yield "features", (o - target).square().mean(0).sum()
    yield "shares", (each / len(each)).sum()
    yield "stack", torch.stack([one / 16 for one in each]).sum()
    twice = each.sum()
    for _ in range(60):
        twice = (twice + twice) / 2
    yield "twice", twice / 16
    yield "deep", sum(each.sum() / 32000 for _ in range(2000))
with Session(run_dir, sync="flat") as run:
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(32, 4), torch.randint(0, 3, (32,)))
    net = torch.nn.Linear(4, 3)
    model = run.replicate(net)
    run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    def later(x, y):
        each = F.cross_entropy(model(x), y, reduction="none")
        return each.topk(2).values.mean() if epoch else each.mean()
    for epoch in run.epochs(1 + (kind == "later")):
        loader = DataLoader(data, 2, sampler=DistributedSampler(data, 2, run.rank))
        for batches in run.iterate(loader, accumulate=4) if kind in ("parts", "whole") else ():
            for x, y in run.accumulate(batches):
                run.backward(F.cross_entropy(model(x), y) / (4 if kind == "parts" else 1), samples=len(y))
            run.update()
        for x, y in run.batches(data, 16) if kind not in ("parts", "whole") else ():
            if kind == "later":
                run.step(later, x, y)
            elif kind in ("own", "total"):
                run.step(F.cross_entropy(model(x), y, reduction="sum"), divisor=len(y) if kind == "own" else run.batch.total)
            else:
                run.step(dict(losses(model(x), y, net.weight))[kind])
"""
DIVIDED = "mean", "divided", "scaled", "penalty", "features", "total", "shares", "stack", "twice", "deep", "whole"
"""Losses that are right on several ranks."""


def test_a_loss_that_ranks_would_divide_otherwise_is_named(tmp_path: Path) -> None:
    """Two ranks would step by half of a sum's gradient, by twice of what is divided by a rank's own samples, by a quarter of what
    `accumulate` weighs already, and by other samples where the loss takes the largest ones from its second epoch on. A sum that is divided,
    a penalty of weights and a sum over features are right, and so is a graph of thousands of operations. A run that hands in no
    function prints once that its loss is not checked."""
    sums = dict.fromkeys(("reduction", "by hand", "two terms"), "the loss is a sum over the samples of this rank")
    others = {
        "own": "the divisor is 8, as many as this rank's samples, and the batch has 16",
        "later": "is not the mean over its samples",
        "parts": "the loss is divided by 4, as many as the batches of a step",
    }
    named = warnings(2, LOSSES, (*sums, *others, *DIVIDED), tmp_path)
    assert {kind for kind, lines in named.items() if lines} == {*sums, *others}, named
    for kind, words in {**sums, **others}.items():
        assert len(named[kind]) == 1 and words in named[kind][0], named[kind]


EPOCHS = """
with Session(sys.argv[1], sync="ddp") as run:
    model = replicated(run)
    for epoch in run.epochs(int(sys.argv[2])):
        for x in run.batches(torch.ones(32, 4), 16):
            run.step(lambda x: model(x).square().mean(), x)
"""


def test_a_start_may_begin_with_a_step_that_is_checked(tmp_path: Path) -> None:
    """The start resumes at epoch 2. The first step is checked before DDP has run a backward pass."""
    for epochs in ("1", "2"):
        done = script(2, EPOCHS, tmp_path / "run", epochs)
        assert done.code == 0, done.output
