"""Several models or optimizers in one run: each step trains what its optimizers have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import product
from tests.own.job import script, scripts, shared

pytestmark = pytest.mark.promise("session-same")

CODE = """
import weakref
from lockstep.training.contract import UserError
run_dir, first, *words = sys.argv[1:]
DATA = TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(1)), torch.arange(64) % 3)
with Session(run_dir, *words) as run:
    torch.manual_seed(3)
    net = torch.nn.Linear(4, 8)
    body = run.replicate(net, name="body")
    shadow = {name: p.detach().clone() for name, p in net.named_parameters()}
    head = run.replicate(torch.nn.Linear(8, 3), name="head")
    held = torch.nn.ModuleDict({"head": head, "average": torch.optim.swa_utils.AveragedModel(head)})
    names = [name for name, _ in head.named_parameters()]
    assert names == ["weight", "bias"], names  # those that the script knows
    missing = held.load_state_dict(held.state_dict())
    assert not missing.missing_keys and not missing.unexpected_keys
    zeros = {name: torch.zeros_like(p) for name, p in head.named_parameters()}
    try:
        assert not torch.func.functional_call(head, zeros, torch.ones(1, 8)).any()
    except UserError as error:  # under ddp
        assert "functional_call" in str(error), error
    del held
    of_body, of_head = (run.optimizer(lambda of: torch.optim.SGD(of, lr=0.1), str(n), m) for n, m in enumerate((body, head)))
    calls = 0
    def loss(x, y):
        global calls
        calls += 1
        if calls == 2:
            raise ArithmeticError("that is caught")
        return F.cross_entropy(head(body(x).relu()), y)
    order = [of_head, of_body, [of_body, of_head]]
    for _ in run.epochs(1):
        for x, y in run.batches(DATA, 16):
            first = weakref.ref(shadow["bias"])
            shadow["bias"] = shadow["bias"].lerp(net.bias.detach(), 0.1)
            assert first() is None, "what is replaced is freed"
            for optimizer in order if first == "head" else reversed(order):
                try:
                    run.step(loss, x, y, optimizer=optimizer)
                except ArithmeticError:
                    run.step(loss, x, y, optimizer=optimizer)
"""


STATEFUL = """
from examples.strategies.allreduce import AllReduce
class Mine(AllReduce):
    def state_dict(self): return {"error": torch.ones(1)}
sys.modules["mine"] = types.SimpleNamespace(Mine=Mine, Parts=type("Parts", (AllReduce,), {"shards_gradients": True}))
with Session(*sys.argv[1:]) as run:
    for name in ("body", "head"):
        run.replicate(torch.nn.Linear(4, 8), name=name)
"""


@pytest.mark.parametrize("strategy", ["Mine", "Parts"])
def test_a_strategy_whose_state_several_models_would_lose_takes_one(tmp_path: Path, strategy: str) -> None:
    done = script(1, STATEFUL, tmp_path / "run", f"sync.name=mine:{strategy}")
    assert done.code == 2 and f"sync.name=mine:{strategy} takes one model" in done.output, done.output


def test_models_that_learn_in_turn_and_together_are_the_same_under_ddp(tmp_path: Path) -> None:
    """A network's first pass may be one without learning, or through another network. A step whose function failed in its second
    micro-batch, and is called again, leaves no trace."""
    cases = [(first, sync, micro) for first in ("head", "both") for sync, micro in (("flat", 0), ("ddp", 4))]
    words = (
        (tmp_path / f"{first}-{sync}", first, f"sync.name={sync}", f"micro_batch_size={micro}")
        for first, sync, micro in cases
    )
    for done in scripts(2, CODE, *words):
        assert done.code == 0 and "warning" not in done.output, done.output
    for first in ("head", "both"):
        flat, ddp = (shared(tmp_path / f"{first}-{sync}")["model"] for sync in ("flat", "ddp"))
        assert flat.keys() == {f"{of}.{kind}" for of in ("body", "head") for kind in ("weight", "bias")}
        torch.testing.assert_close(ddp, flat)


GAN = """
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
    data = TensorDataset(torch.randn(64, 4))
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


def test_a_step_of_one_of_two_networks_moves_that_network_alone(tmp_path: Path) -> None:
    """One backward pass gives both networks gradients, and one network steps. `clip` scales its gradients alone. An overflow in the
    other network ends no run, and `PowerSgd` forgets it."""
    options = "sync.options={start: 2, rank: 1, min_rate: 1.0}"
    calm, plain, scaled = scripts(
        2, GAN, (tmp_path / "calm", "plain", "NEVER", "sync.name=flat"), (tmp_path / "plain", "plain", "INF", "sync.name=flat"),
        (tmp_path / "scaled", "scaled", "INF", f"sync.name={product.POWERSGD}", options),
    )  # fmt: skip
    assert calm.code == 0 and calm.output.count("STEPS [8, 0]") == 2, calm.output
    for done, scale in ((plain, 1.0), (scaled, 65536.0)):
        assert done.code == 0 and done.output.count(f"STEPS [7, 1] SCALE {scale}") == 2, done.output
