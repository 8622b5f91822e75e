"""The CIFAR-10 speedrun on one GPU, where its data is there."""

from __future__ import annotations

import json

from lockstep.training.contract import EXIT_DONE, SUMMARY_FILE
from lockstep.training.data.sources.builtin import cifar10_files
from lockstep.training.doctor.outside import Program
from lockstep.training.doctor.table import Outcome

LEAST = 0.93
"""Test accuracy of one training; published is a mean of 0.9401, and single ones scatter by some 0.0015."""
ON_A_GPU = ("precision=float16", "capture=auto", "nonfinite=ignore")


def train(program: Program, bound: float) -> Outcome:
    if program.rehearsal:
        return Outcome("not tried", "takes a GPU that computes")
    if not cifar10_files(program.data_root):
        return Outcome("not tried", f"no CIFAR-10 below {program.data_root} (--data-root)")
    run = program.folder / "speedrun"
    arguments = [
        "run",
        "speedrun",
        "--run-dir",
        str(run),
        "--set",
        f"data.root={program.data_root}",
        *ON_A_GPU,
        "device=cuda",
    ]
    ended = program.run(program.launch(1, [*arguments, "log.report=false", "metrics.enabled=false"]), bound)
    if ended.code != EXIT_DONE:
        return Outcome(
            "failed", "it had to be ended" if ended.code is None else f"it ended with {ended.code}: {ended.last}"
        )
    summary = json.loads((run / SUMMARY_FILE).read_text(encoding="utf-8"))
    rates = {"training, s": summary["trained_seconds"], "accuracy": summary["accuracy"]}
    enough = summary["accuracy"] >= LEAST
    return Outcome("ok" if enough else "failed", f"accuracy {summary['accuracy']:.4f}, at least {LEAST}", rates)
