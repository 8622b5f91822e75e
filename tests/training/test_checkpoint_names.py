"""The safetensors library alone opens a run's checkpoint, and each tensor's name tells its owner."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests import product
from tests.nets import NormedConv
from tests.product import checkpoint
from tests.ranks import training
from tests.runs import FINAL, LOSSY_START, Job
from tests.warm.gang import python

pytestmark = pytest.mark.promise("open-format")

PARAMETERS = {f"{layer}.{kind}" for layer in ("conv1", "conv2", "head", "norm") for kind in ("weight", "bias")}
BUFFERS = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


@pytest.mark.parametrize("strategy", [product.FSDP, product.POWERSGD])
def test_each_parameter_is_stored_under_its_name(strategy: str, tmp_path: Path, data_root: Path) -> None:
    changes = {"sync.name": strategy, "optim.momentum": 0.9, "epochs": 1, **LOSSY_START.get(strategy, {})}
    job = Job(tmp_path / "run", data_root, 2, **changes)
    assert job.go().code == 0
    path = job.run_dir / "checkpoints/step-00000008"
    with safe_open(path / "state.safetensors", framework="pt") as file:
        names = set(file.keys())
        for name, parameter in NormedConv().named_parameters():
            for place in (f"model/{name}", f"average/{name}", f"optim/{name}/momentum_buffer"):
                assert file.get_tensor(place).shape == parameter.shape
    expected = {f"{of}/{n}" for of in ("model", "average") for n in PARAMETERS}
    expected |= {f"optim/{n}/momentum_buffer" for n in PARAMETERS}
    for rank in (0, 1):
        expected |= {f"ranks/{rank}/{part}/{n}" for part in ("buffers", "average_buffers") for n in BUFFERS}
        expected |= {f"ranks/{rank}/{part}" for part in ("rng/python/1", "rng/torch", "losses", "last")}
    assert {name for name in names if "/sync/" not in name} == expected
    assert [name for name in names if "/sync/errors/" in name] != [] or strategy != product.POWERSGD
    groups = json.loads((path / "state.json").read_bytes())["shared"]["optimizer"]["param_groups"]
    assert {name for group in groups for name in group["params"]} == PARAMETERS and groups[0]["momentum"] == 0.9


def test_a_weight_of_two_modules_is_kept_once(tmp_path: Path, data_root: Path) -> None:
    job = Job(tmp_path / "run", data_root, 2, **{"sync.name": product.FSDP, "model": "tests.nets:Tied"})
    done = job.go()
    assert done.code == 0, done.output
    shared = checkpoint(job.run_dir / f"checkpoints/step-{FINAL:08d}")["shared"]
    assert shared["model"].keys() == PARAMETERS | {"twin.bias"}
    assert shared["aliases"] == {"twin.weight": "head.weight"}
    out = tmp_path / "weights.pth"
    assert python("-m", "lockstep", "export", str(job.run_dir), str(out)).code == 0
    weights = torch.load(out, weights_only=True)
    assert torch.equal(weights["twin.weight"], weights["head.weight"])
    done = training("evaluate", str(job.run_dir), "--trust-model", env=job.env())
    assert done.code == 0, "it puts the weights into the model, which asks for all its names"
