"""A loop of one's own that does what a recipe says ends in the recipe's weights: the two have a step each (run/own_step.py, trainer.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.nets import SmallConv
from tests.own.job import assert_weights, script, shared
from tests.ranks import gang, training

SETTINGS = [
    "data.source=synthetic", "data.options={n: 190, n_test: 50, size: 8, noise: 1.5}", "data.num_shards=3", "augment.crop=1",
    "augment.flip=random", "model=tests.nets:SmallConv", "model_options={}", "global_batch_size=41", "uneven=weight",
    "epochs=3", "seed=5", "precision=float64", "loss.reduction=mean", "loss.smoothing=0", "optim.name=sgd", "lr=0.05",
    "momentum=0.9", "bias_lr_factor=1", "weight_decay=0", "schedule=[]", "optim.clip=1", "ema.decay=0.9", "ema.every=3",
]  # fmt: skip
LOOP = """
import sys
from pathlib import Path
import torch
import torch.nn.functional as F
from lockstep import Session
from tests.nets import SmallConv
from tests import product

run_dir, shards, start, rate, sync, *settings = sys.argv[1:]
labels, augmented = product.augmented(Path(shards), settings)
torch.set_default_dtype(torch.float64)

with Session(run_dir, sync=sync, seed=5) as run:
    model = SmallConv()
    model.load_state_dict(torch.load(start, weights_only=True))
    network = run.replicate(model)
    run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=float(rate), momentum=0.9))
    run.average(0.9, every=3)
    for epoch in run.epochs(3):
        for ids in run.batches(range(190), 41, uneven="weight"):
            run.step(F.cross_entropy(network(augmented(epoch, ids)), labels[ids]), clip=1.0)
"""


@pytest.mark.promise("session-same")
@pytest.mark.parametrize(("sync", "ranks"), [("flat", 1), ("ddp", 2), ("zero1", 3)])
def test_a_loop_that_does_what_a_recipe_says_ends_in_its_weights(tmp_path: Path, sync: str, ranks: int) -> None:
    """The same samples in the same order, augmented alike; batches that the ranks cannot divide, clipping, an average."""
    shards, start = str(tmp_path / "shards"), str(tmp_path / "start.pth")
    torch.manual_seed(1)
    torch.save({name: value.double() for name, value in SmallConv().state_dict().items()}, start)
    assert training("shard", "smoke", "--out", shards, "--set", *SETTINGS, f"data.root={tmp_path}").code == 0
    words = ["--set", *SETTINGS, f"data.shards={shards}", f"init_from={start}", f"sync.name={sync}"]
    done = gang(ranks, "run", "smoke", "--run-dir", str(tmp_path / "recipe"), *words)
    assert done.code == 0, done.output
    recipe = shared(tmp_path / "recipe")
    (rate,) = {group["lr"] for group in recipe["optimizer"]["param_groups"]}
    done = script(ranks, LOOP, tmp_path / "own", shards, start, repr(rate), sync, *SETTINGS)
    assert done.code == 0, done.output
    begun = torch.load(start, weights_only=True)
    for kind in ("model", "average"):
        assert_weights(tmp_path / "own", recipe[kind], kind, atol=1e-12)
        assert all(float((tensor - begun[name]).abs().max()) > 1e-3 for name, tensor in recipe[kind].items()), (
            "untrained"
        )
