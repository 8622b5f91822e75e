"""The recipes of the modules: the MLP's two tables, Fashion-MNIST from idx files, and ResNet-9."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests import product
from tests.events import summary_of
from tests.idx import write_fashion
from tests.processes import ROOT
from tests.ranks import gang, training

LINE = re.compile(r"step +(\d+) \| train_loss +([\d.]+) \| test_loss +([\d.]+) \| step time +([\d.]+) ms")


def _table(output: str) -> dict[int, tuple[float, float]]:
    return {int(step): (float(train), float(test)) for step, train, test, _ in LINE.findall(output)}


def test_the_mlp_in_the_exercises_form_and_in_the_honest_one(data_root: Path, tmp_path: Path) -> None:
    words = ("run", "mlp", "--set", f"data.root={data_root}", "checkpoint.every_steps=1000", "threads=1")
    exercise_words = [
        "data.split=exercise",
        "data.shuffle=none",
        "uneven=drop",
        "epochs=61",
        "data.options.redundant=2",
    ]
    done = training(
        *words, *exercise_words, "model_options.hidden=[256,256,256]", "--run-dir", str(tmp_path / "exercise")
    )
    assert done.code == 0, done.output
    exercise = _table(done.output)
    assert list(exercise) == list(range(0, 901, 100))
    assert done.output.index("lr=0.1") < done.output.index("step     0")  # the configuration stands above the table
    assert 3.6 < exercise[0][0] < 4.2 and all(0.2 < loss < 0.32 for loss in exercise[900])  # 3.78 → 0.21, 0.22
    accuracy = float(done.output.split("Final validation accuracy: ")[1])
    assert 0.955 < accuracy < 0.975  # the model memorizes 960 samples; it never trains on the other 40
    done = training(*words, "epochs=2", "--run-dir", str(tmp_path / "honest"))
    assert done.code == 0, done.output
    honest = _table(done.output)
    assert list(honest) == [0, 100, 200]
    assert honest[200][1] > 3.4 and honest[200][0] < honest[0][0]  # ln 32 = 3.47: held-out samples stay at chance
    assert "epoch     step" not in done.output


def _literal_loop(x: torch.Tensor, y: torch.Tensor, workers: int, steps: int) -> list[float]:
    """Runs the module's loop, written out. Worker r takes the batches i with `i % workers == r`, pass after pass, and DDP averages the
    gradients of the workers' steps.

    Returns the mean of the workers' losses at each step.
    """
    net = product.mlp().double()
    worker_batches = [list(zip(x.split(64), y.split(64)))[worker::workers] for worker in range(workers)]
    losses = []
    for step in range(steps):
        parts = [batches[step % len(batches)] for batches in worker_batches]
        mean = sum(F.cross_entropy(net(inputs), labels) for inputs, labels in parts) / workers
        losses.append(mean.item())
        lr = 0.1 * (1 - 0.7 * (step + 1) / 1000)
        for parameter, gradient in zip(net.parameters(), torch.autograd.grad(mean, list(net.parameters()))):
            parameter.data -= lr * gradient
    return losses


@pytest.mark.parametrize("leaves_out", [True, False])
def test_two_workers_train_what_the_modules_own_loop_trains(leaves_out: bool, data_root: Path, tmp_path: Path) -> None:
    """Of 15 batches a pass, worker 0 has 8 and worker 1 has 7, paired by step. With the last batch of 40 samples, each has 8."""
    features, labels = runpy.run_path(str(ROOT / "examples/modules/two_workers.py"))["paired"]("test", n=1111)
    x, y = torch.from_numpy(features).double() / 10, torch.from_numpy(labels)
    words = ["run", "mlp", "--run-dir", str(tmp_path / "run"), "--set", f"data.root={data_root}", "threads=1"]
    words += ["data.shuffle=none", "log.score_every=1", "precision=float64", "data.std=[10]"]
    if leaves_out:
        words += ["data.source=examples.modules.two_workers:paired", "data.options={n: 1111}", "epochs=1"]
        expected = _literal_loop(x[:960], y[:960], 2, 56)
    else:
        words += ["data.options={n: 1111, redundant: 2}", "uneven=mean", "epochs=3"]
        expected = _literal_loop(x, y, 2, 24)
    done = gang(2, *words)
    assert done.code == 0, done.output
    assert [train for train, _ in _table(done.output).values()] == pytest.approx(expected, abs=1e-4)


def test_fashion_cnn_from_idx_files_with_the_accuracy_of_each_class(tmp_path: Path) -> None:
    write_fashion(tmp_path / "data/FashionMNIST/raw", 600, 55, patterned=True)
    words = ["run", "fashion_cnn", "--run-dir", str(tmp_path / "run"), "--set", f"data.root={tmp_path / 'data'}"]
    done = gang(2, *words, "epochs=2", "checkpoint.keep=1")
    assert done.code == 0, done.output
    summary = summary_of(tmp_path / "run")
    classes = summary["class_accuracy"]
    assert len(classes) == 10 and done.output.count("Accuracy of ") == 10 and "Accuracy of ankle boot" in done.output
    sizes = {name: 6 if number < 5 else 5 for number, name in enumerate(classes)}  # 55 test images in turn
    mean = sum(classes[name] * sizes[name] for name in classes) / 55
    assert summary["accuracy"] == pytest.approx(mean) and summary["accuracy"] > 0.5
    again = training("evaluate", str(tmp_path / "run"))
    assert f"accuracy {summary['accuracy']:.4f} (" in again.output, again.output
