"""Several optimizers in a loop of one's own: a step is that of the optimizers that step; and its norm is computed once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.own.job import script
from tests.processes import Result

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


def gan(run_dir: Path, scaled: str, fate: str, *words: str) -> Result:
    return script(2, GAN, run_dir, scaled, fate, *words)


@pytest.mark.parametrize("sync", ["ddp", "flat", "bf16_compress"])
@pytest.mark.parametrize("scaled", ["scaled", "plain"])
def test_the_step_of_one_of_two_networks_has_the_length_that_clip_says(tmp_path: Path, scaled: str, sync: str) -> None:
    """The other network's gradients came from the same backward pass, and are still scaled by 65536."""
    done = gan(tmp_path / "run", scaled, "NEVER", f"sync.name={sync}")
    assert done.code == 0 and done.output.count("STEPS [8, 0]") == 2, done.output


@pytest.mark.parametrize("sync", ["ddp", "flat", "powersgd"])
@pytest.mark.parametrize("scaled", ["scaled", "plain"])
def test_an_overflow_in_the_network_that_does_not_step_ends_no_run(tmp_path: Path, scaled: str, sync: str) -> None:
    """Nor does it stay in what `powersgd` remembers: the discriminator steps again."""
    compressing = ["sync.options={start: 2, rank: 1, min_rate: 1.0}"] if sync == "powersgd" else []
    done = gan(tmp_path / "run", scaled, "INF", f"sync.name={sync}", *compressing)
    assert done.code == 0, done.output
    scale = 65536.0 if scaled == "scaled" else 1.0
    assert done.output.count(f"STEPS [7, 1] SCALE {scale}") == 2, done.output


COUNTED = """
import sys, torch, torch.nn.functional as F, torch.distributed as dist
from lockstep import Session
run_dir, *words = sys.argv[1:]
counts, reduce = [], dist.all_reduce
def counted(tensor, *args, **named):
    counts[-1] += 1
    return reduce(tensor, *args, **named)
with Session(run_dir, *words) as run:
    model = run.replicate(torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)))
    optimizer = run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.05))
    data = torch.utils.data.TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)))
    for epoch in run.epochs(1):
        for number, (x, y) in enumerate(run.batches(data, 8)):
            run.backward(F.cross_entropy(model(x), y))
            counts.append(0)
            dist.all_reduce = counted
            run.update(clip=1.0 if number % 2 else 0.0)
            dist.all_reduce = reduce
print(f"COUNTS {counts}\\n", end="")
"""


@pytest.mark.parametrize("sync", ["zero1", "fsdp"])
def test_clipping_computes_the_norm_no_second_time(tmp_path: Path, sync: str) -> None:
    """Every other step clips. The norm of gradients that the ranks share out is a collective."""
    done = script(2, COUNTED, tmp_path / "run", f"sync.name={sync}")
    assert done.code == 0 and done.output.count("COUNTS [1, 1, 1, 1, 1]") == 2, done.output
