"""Starts a job of `loop.py`, or a script that a test has as text, and reads checkpoints."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests import product
from tests.processes import ROOT, Result, clean_env
from tests.runs import Job
from tests.warm.gang import running

SCRIPT = str(ROOT / "tests/own/loop.py")


class OwnJob(Job):
    """A job of `loop.py`. `variables` go into the environment of every start."""

    program = (SCRIPT,)

    def __init__(self, run_dir: Path, ranks: int, kind: str = "batches", *words: str, **variables: str) -> None:
        self.run_dir, self.ranks, self.variables = run_dir, ranks, variables
        self.words = [str(run_dir), kind, "sync.name=flat", "checkpoint.every_steps=4", "checkpoint.keep=50", *words]

    def env(self, **extra: str) -> dict[str, str]:
        return super().env(**{**self.variables, **extra})


HEAD = """
import functools, json, os, pathlib, random, signal, sys, time, types, numpy as np, torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
from lockstep import Session
def replicated(run, net=None):
    model = run.replicate(nn.Linear(4, 2) if net is None else net)
    run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    return model
DATA = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)), torch.arange(32) % 3)
def make(run):
    model = run.replicate(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    return model, run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
def step(run, model, batch, **more):
    run.step(F.cross_entropy(model(batch[0]), batch[1]), **more)
"""
"""What every script begins with: `script` and `scripts` put it before the text."""


def script(ranks: int, code: str, run_dir: Path, *words: str, **variables: str) -> Result:
    """Runs a script, given as text, on forked ranks."""
    program = ["-c", HEAD + code, str(run_dir), *words]
    with running([program] * ranks, {"LOCKSTEP_THREADS": "1", **variables}) as started:
        return started.wait(240)


def scripts(ranks: int, code: str, *cases: tuple[object, ...]) -> list[Result]:
    """Runs a script on forked ranks once for each list of words, one after the other in the same processes."""
    with tempfile.TemporaryDirectory() as folder:
        texts = json.dumps([[str(word) for word in words] for words in cases])
        program = ["-m", "tests.own.several", folder, HEAD + code, texts]
        with running([program] * ranks, clean_env(LOCKSTEP_THREADS="1")) as started:
            done = started.wait(240)
        assert done.code == 0, done.output
        results = []
        for number in range(len(cases)):
            codes = {int((Path(folder) / f"{number}-{rank}").read_text()) for rank in range(ranks)}
            code_of_all = next((each for each in (2, 75, 1) if each in codes), 0)
            results.append(Result(code_of_all, (Path(folder) / str(number)).read_text()))
        return results


def shared(run_dir: Path) -> dict[str, Any]:
    """Returns what the ranks share in the newest checkpoint, verified: `model`, `average`, `optimizer`, …"""
    newest = product.checkpoint(run_dir / f"checkpoints/step-{product.checkpoint_steps(run_dir)[0]:08d}")
    state: dict[str, Any] = newest["shared"]
    return state


def assert_weights(run_dir: Path, expected: dict[str, torch.Tensor], kind: str = "model", atol: float = 1e-10) -> None:
    """Asserts that the newest checkpoint's weights are near `expected`."""
    weights = shared(run_dir)[kind]
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=atol, msg=f"{run_dir}: {kind}: {name}")
