"""Whole trainings that lose a rank: one is killed and its run goes on, one stands still and is named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from lockstep.training.checkpoint import weights
from lockstep.training.contract import EXIT_DONE, EXIT_FAILED, STATUS_FILE
from lockstep.training.doctor.nets import ENV_FAULT
from lockstep.training.doctor.outside import Ended, Program
from lockstep.training.doctor.table import Outcome

AT = 6
"""The training pass in which the last rank is struck; there is a checkpoint every two steps."""
SAME = 1e-3
"""Largest distance of the resumed run's way from the undisturbed one's, relative to its weights (L2)."""
_TIMEOUT, _REHEARSED = 20, 5
"""Seconds of `collective_timeout`: enough for NCCL to open its communicators."""


def _arguments(program: Program, run: Path, *changes: str) -> list[str]:
    settings = [
        "model=lockstep.training.doctor.nets:Faulty", "data.source=synthetic", "data.options={n: 1024, n_test: 16, size: 16}",
        "data.num_shards=2", f"data.root={program.folder / 'data'}", f"global_batch_size={8 * program.gpus}", "uneven=drop",
        "epochs=1", "schedule=[]", "optim.lr=1.0e-3", "ema.decay=0", "evaluate.every=100", "checkpoint.every_steps=2",
        "device=cuda", "log.report=false", "metrics.enabled=false",
    ]  # fmt: skip
    return ["run", "smoke", "--run-dir", str(run), "--set", *settings, *changes]


def _struck(program: Program, arguments: Sequence[str], name: str, restarts: int, bound: float) -> Ended:
    """The run, whose last rank gets that signal, once."""
    fault = f"{program.gpus - 1}:{AT}:{name}:{program.folder / f'struck-{name}'}"
    return program.run(program.launch(program.gpus, arguments, restarts), bound, **{ENV_FAULT: fault})


def kill_and_resume(program: Program, bound: float) -> Outcome:
    """A rank is killed; the launcher starts all again, and they end in the weights of a run that nothing happened to."""
    calm, killed = program.folder / "calm", program.folder / "killed"
    steps = f"data.options={{n: {8 * program.gpus * 12}, n_test: 16, size: 16}}"
    undisturbed = program.run(program.launch(program.gpus, _arguments(program, calm, steps)), bound / 2)
    if undisturbed.code != EXIT_DONE:
        return Outcome("failed", f"a run without any fault {_how(undisturbed)}")
    ended = _struck(program, _arguments(program, killed, steps), "KILL", 1, bound / 2)
    if ended.code != EXIT_DONE:
        return Outcome("failed", f"the run of which a rank was killed {_how(ended)}")
    if "Resuming at step" not in ended.output:
        return Outcome("failed", "the run began anew after a rank was killed: it found no checkpoint")
    (expected, last), (actual, _) = weights.from_run(calm), weights.from_run(killed)
    away = _norm([actual[name] - expected[name] for name in expected]) / _norm(list(expected.values()))
    how = "the same bits" if away == 0 else f"{away:.1e} apart, at most {SAME:g}"
    return Outcome(
        "ok" if away <= SAME else "failed", f"{how} as without the kill, after {last} steps", facts={"distance": away}
    )


def _norm(tensors: list[torch.Tensor]) -> float:
    return float(torch.cat([tensor.double().reshape(-1) for tensor in tensors]).norm())


def hang(program: Program, bound: float) -> Outcome:
    """A rank stands still; the others say which one, end with 1, and leave that in status.json."""
    run, last = program.folder / "hung", program.gpus - 1
    timeout = _REHEARSED if program.rehearsal else _TIMEOUT
    ended = _struck(program, _arguments(program, run, f"collective_timeout={timeout}"), "STOP", 0, bound)
    if ended.code is None:
        return Outcome("failed", f"the run still stood after {bound:.0f} s, with collective_timeout={timeout}")
    named = f"rank {last} did not arrive"
    if ended.code != EXIT_FAILED or named not in ended.output:
        return Outcome("failed", f"nobody said that rank {last} stood still: the run {_how(ended)}")
    status = json.loads((run / STATUS_FILE).read_text(encoding="utf-8"))
    if status["code"] != EXIT_FAILED or named not in str(status["reason"]):
        return Outcome("failed", f"{STATUS_FILE} says {status['reason']!r}, expected {named!r}")
    return Outcome("ok", f"{named}: said, and in {STATUS_FILE}")


def _how(ended: Ended) -> str:
    return "had to be ended" if ended.code is None else f"ended with {ended.code}: {ended.last}"
