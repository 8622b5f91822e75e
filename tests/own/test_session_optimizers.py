"""Several optimizers in a loop of one's own: a step is that of the optimizers that step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import product
from tests.own.job import script

pytestmark = pytest.mark.promise("session-same")

GAN = """
import sys, torch, torch.nn.functional as F
from lockstep import Session
run_dir, scaled, fate, *words = sys.argv[1:]
class Gan(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.g, self.d = torch.nn.Linear(4, 6), torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    def forward(self, z):
        return self.d(self.g(z))
def length(module, before):
    return float(sum(((p.detach() - b) ** 2).sum() for p, b in zip(module.parameters(), before)) ** 0.5)
infinite, steps = [], [0, 0]
with Session(run_dir, *words, config={"name": "gan"}) as run:
    torch.manual_seed(3)
    gan = Gan()
    model = run.replicate(gan, example=torch.ones(2, 4))
    optimizers = {
        "d": run.optimizer(lambda _: torch.optim.SGD(gan.d.parameters(), lr=1e-4), "d"),
        "g": run.optimizer(lambda _: torch.optim.SGD(gan.g.parameters(), lr=1.0), "g"),
    }
    scaler = torch.amp.GradScaler("cpu", enabled=scaled == "scaled")
    run.keep(scaler=scaler)
    gan.d[0].weight.register_hook(lambda grad: grad * float("inf") if infinite else None)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4))
    for epoch in run.epochs(1):
        for (z,) in run.batches(data, 8):
            for name in ("d", "g"):
                infinite[:] = [1] * (fate == "INF" and name == "g" and run.rank == 0 and run.steps == 3)
                struck = bool(run.sum(len(infinite))[0])
                before = {part: [p.detach().clone() for p in getattr(gan, part).parameters()] for part in "dg"}
                run.backward(100 * model(z).mean() * (1 if name == "g" else -1), scaler=scaler)
                run.update(optimizers[name], clip=0.97 if name == "g" else 0.0, scaler=scaler)
                moved = {part: length(getattr(gan, part), before[part]) for part in "dg"}
                assert moved["d" if name == "g" else "g"] == 0, moved
                if name == "g":
                    assert abs(moved["g"] - 0.97) < 1e-3, moved
                    steps[struck] += 1
    print(f"STEPS {steps} SCALE {scaler.get_scale()}\\n", end="")
"""


@pytest.mark.parametrize(("sync", "scaled"), [("flat", "plain"), (product.POWERSGD, "scaled")])
def test_the_step_of_one_of_two_networks_is_its_own(tmp_path: Path, sync: str, scaled: str) -> None:
    """One backward pass gives both networks gradients, and one network steps. `clip` scales its gradients alone. An overflow in the
    other network ends no run, and `PowerSgd` forgets it."""
    words = [
        f"sync.name={sync}",
        *(["sync.options={start: 2, rank: 1, min_rate: 1.0}"] if sync == product.POWERSGD else []),
    ]
    if sync != product.POWERSGD:  # which is not exact
        done = script(2, GAN, tmp_path / "calm", scaled, "NEVER", *words)
        assert done.code == 0 and done.output.count("STEPS [8, 0]") == 2, done.output
    done = script(2, GAN, tmp_path / "struck", scaled, "INF", *words)
    scale = 65536.0 if scaled == "scaled" else 1.0
    assert done.code == 0 and done.output.count(f"STEPS [7, 1] SCALE {scale}") == 2, done.output
