"""Ordinary loops that train otherwise on several ranks, or after a resume: each is named by one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.own.job import scripts

pytestmark = pytest.mark.promise("session-resume")

CODE = """
import copy, tempfile
folder, kind, steps = sys.argv[1:]
X = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
Y = X[:, :3].argmax(1)
class Around(torch.optim.Optimizer):  # as Lookahead: its state and groups are the inner one's
    state, param_groups = property(lambda self: self.inner.state), property(lambda self: self.inner.param_groups)
    def __init__(self, inner):
        self.inner, self.defaults = inner, inner.defaults
        self.step, self.state_dict, self.load_state_dict = inner.step, inner.state_dict, inner.load_state_dict
class Fading(TensorDataset):
    scale = 2.0
    def __getitem__(self, index):
        return self.tensors[0][index] * self.scale, self.tensors[1][index]
    def state_dict(self):
        return {"scale": self.scale}
    def load_state_dict(self, state):
        self.scale = state["scale"]
def tame(running):
    def hook(module, grad_input, grad_output):
        running["norm"] = 0.9 * running["norm"] + 0.1 * float(grad_output[0].norm())
        return (grad_input[0] / running["norm"],)
    return hook
def train(kind, run, steps):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    if kind == "hook":
        net[1].register_full_backward_hook(tame({"norm": 1.0}))
    model = run.replicate(net)
    inner = lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.1)
    run.optimizer((lambda parameters: Around(inner(parameters))) if kind == "around" else inner)
    fading = Fading(X, Y)
    best = f"{tempfile.mkdtemp(dir=None if kind == 'temporary' else folder)}/best.pt"
    network, unsure = run.for_evaluation() if kind == "copy" else None, Y.masked_fill(torch.arange(96) % 3 == 0, -100)
    def relabelled():
        with torch.no_grad():
            return TensorDataset(X, (4 * model(X)).softmax(1))
    def easy_first():
        with torch.no_grad():
            return F.cross_entropy(model(X), Y, reduction="none").argsort().split(12)
    def loss(x, y):
        logits, far = model(x), run.steps >= 10 if kind == "late" else run.steps % 5 == 4 and kind == "lazy"
        return F.cross_entropy(logits, y) + ((logits @ logits.T).log_softmax(1).diag().neg().mean() if far else 0.0)
    teacher = copy.deepcopy(net) if kind == "rebound" else None
    if kind in ("kept", "rebound"):
        run.keep(thing=teacher or fading)
    for epoch in run.epochs(steps=steps):
        if kind == "order":
            for ids in run.iterate(easy_first()):
                run.step(lambda i: F.cross_entropy(model(X[i]), Y[i]), run.part(ids))
            continue
        plain = TensorDataset(X, unsure if kind == "ignored" else Y)
        if kind == "counted":
            batches = run.iterate([(X[ids], unsure[ids]) for ids in torch.arange(96).view(-1, 12)[run.rank :: run.size]])
        elif kind == "lasting":
            own = TensorDataset(X[run.rank :: run.size], Y[run.rank :: run.size])
            batches = run.iterate(DataLoader(own, 6, num_workers=1, persistent_workers=True))
        else:
            split = lambda: TensorDataset(X + run.resumed, Y)
            own = {"labels": relabelled, "kept": lambda: fading, "split": split}.get(kind, lambda: plain)
            batches = run.batches(own(), 4 if kind == "late" else 12, workers=int(kind == "split"))
        for x, y in list(batches) if kind == "early" else batches:
            if kind in ("ignored", "counted"):
                run.step(F.cross_entropy(model(x), y), samples=int((y >= 0).sum()) if kind == "counted" else None)
            elif kind in ("hardest", "masked"):
                losses, mask = F.cross_entropy(model(x), y, reduction="none"), torch.arange(len(y)) % 3 > 0
                run.step(losses.topk(3).values.mean() if kind == "hardest" else (losses * mask).sum() / mask.sum())
            elif kind == "fewer":
                run.step(loss, x[y > 0], y[y > 0])
            else:
                run.step(loss, x, y, samples=len(y))
            teacher = copy.deepcopy(net) if kind == "rebound" and run.steps == 10 else teacher
            fading.scale *= 0.99 if kind == "kept" else 1.0
        torch.save(net.state_dict(), best)
        measured = network or run.for_evaluation()
        run.log(accuracy=run.evaluate(lambda x, y: (measured(x).argmax(1) == y).sum(), TensorDataset(X, Y)))
        if kind == "stop" and run.leader or kind == "agreed":
            run.stop("no better")
with Session(f"{folder}/{kind}", sync="flat") as run:
    train(kind, run, int(steps))
"""
WARNED = {
    "early": ["steps were taken after the last batch of their epoch", "steps were taken after the last batch of their epoch"],
    "copy": ["measures the model as it was after step 0", "measures the model as it was after step 0"],
    "stop": ["run.stop() was called on some ranks only, not on rank 1", "run.stop() was called on some ranks only, not on rank 1"],
    "ignored": ["leaves samples or tokens out (ignore_index", "leaves samples or tokens out (ignore_index"],
    "hardest": ["A choice among the samples", "A choice among the samples"],
    "masked": ["leaves samples or tokens out", "leaves samples or tokens out"],
    "temporary": ["the temporary file best", "the temporary file best"],
    "lasting": ["", "the loader's worker processes last for all epochs"],
    "late": ["the loss of a batch is not the mean over its samples", "the loss of a batch is not the mean over its samples"],
    "lazy": ["the loss of a batch is not the mean over its samples", "the loss of a batch is not the mean over its samples"],
    "fewer": ["of this rank's 6 samples", "of this rank's 6 samples"],
    "split": ["", "the dataset of run.batches() has other samples than when this epoch began"],
    "rebound": ["", "no checkpoint has them: teacher. "],
    "hook": ["", "no checkpoint has them: attribute 1.running"],
    "labels": ["", "the dataset of run.batches() has other samples than when this epoch began"],
    "order": ["", "the loader gives other batches now"],
    "calm": ["", ""], "kept": ["", ""], "around": ["", ""], "agreed": ["", ""], "counted": ["", ""],
}  # fmt: skip
"""Kind of loop → words of the warning at its first start, and at the start that resumes; "": there is none."""


def test_a_loop_that_trains_otherwise_on_ranks_or_after_a_resume_is_named(tmp_path: Path) -> None:
    """Batches are listed before their steps, a copy of the model is measured after the steps that follow it, one rank alone stops,
    labels are ignored, a loss takes the largest ones or a mask, a term of it comes late or is in some steps only, samples are left out
    after the batches are cut, a kept object loses its name to another one, a split is drawn otherwise, a hook carries a norm, labels
    and an order come from the weights, the best weights are in a temporary file, worker processes last for all epochs. What is right is
    not named, such as a dataset that changes and is kept."""
    for start, steps in enumerate((12, 20)):
        # A function is checked at its 16th step.
        ends = scripts(2, CODE, *((tmp_path, kind, steps + 8 * (kind == "late")) for kind in WARNED))
        for (kind, of_starts), done in zip(WARNED.items(), ends, strict=True):
            warnings = [line for line in done.output.splitlines() if "warning: " in line]
            assert done.code == 0 and len(warnings) == bool(of_starts[start]), (kind, done.output)
            assert of_starts[start] in "".join(warnings), (kind, done.output)
