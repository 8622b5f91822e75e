"""`lockstep bench`: what it prints adds up, and it runs to its files. No test here looks at a speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.training import config
from lockstep.training.exercises.bench.gang import PHASES, Job, Measured, _Timer
from lockstep.training.exercises.bench.inference import _verdict
from lockstep.training.exercises.bench.scaling import _each_strategy, against_ddp, table, why
from lockstep.training.parallel.world import World
from lockstep.training.run import prepare
from tests.ranks import on_ranks, training


def _made(step: float, **phases: float) -> Measured:
    return Measured(100 / step, step, {phase: phases.get(phase.split()[-1], 0.0) for phase in PHASES}, 1, 1)


def test_the_table_and_the_sentence_are_arithmetic_on_what_was_measured() -> None:
    rows = table(
        {1: _made(0.1, forward=0.04, backward=0.06), 2: _made(0.08, forward=0.03, backward=0.03, communication=0.02)}, 1
    )
    assert [row["speed_up"] for row in rows] == pytest.approx([1.0, 1.25])
    assert [row["efficiency"] for row in rows] == pytest.approx([1.0, 0.625])
    sentence = why(rows, 1)
    assert "Why is it not 2×?" in sentence and "takes 80.0 ms where 1/2 of the step on 1 would be 50.0 ms" in sentence
    assert (
        "The difference: exposed communication +20.0 ms, forward +10.0 ms" in sentence
        and "backward +0.0 ms" in sentence
    )
    assert "share" in why(rows, 10_000) and "cannot all run at once" in why(rows, 10_000)
    assert "cannot all run at once" not in why(table({1: _made(1), 2: _made(1)}, 1), 0)
    assert "give --ranks at least two" in why(rows[:1], 1)


def test_scaling_runs_and_writes_table_json_and_chart(tiny: list[str], tmp_path: Path) -> None:
    words = ["bench", "scaling", "--ranks", "2,1", "--steps", "30", "--warm-up", "1", "--rounds", "1", "--batch", "12"]
    words += ["--threads", "1"]
    words += [
        "--strategies",
        "flat,ddp,data_parallel",
        "--out",
        str(tmp_path / "out"),
        "--set",
        *[w for w in tiny if "epochs" not in w],
    ]
    done = training(*words, timeout=240)
    assert done.code == 0, done.output
    assert "Why is it not 2×?" in done.output and "global batch 12" in done.output and "flat" in done.output
    found = json.loads((tmp_path / "out/scaling.json").read_text())
    for name, batches in (("fixed", [12, 12]), ("scaled", [12, 24])):
        for row, batch in zip(found[name], batches):
            assert row["images_per_second"] * row["step"] == pytest.approx(batch, rel=1e-6)
            assert set(row["phases"]) == set(PHASES) and all(seconds >= 0 for seconds in row["phases"].values())
            assert 0.2 < sum(row["phases"].values()) / row["step"] <= 1.05
    assert found["strategies"]["flat"]["sent_bytes"] == 8 * sum((8 * 27 + 8, 16 * 72 + 16, 160 + 10))
    one, ddp = (found["strategies"][name] for name in ("data_parallel", "ddp"))
    assert (one["ranks"], one["threads"], ddp["ranks"], ddp["threads"]) == (1, 2, 2, 1)  # the same part of the machine
    ratio = one["images_per_second"] / ddp["images_per_second"]
    sentence = (
        f"data_parallel (1 process × 2 CPU thread(s)) is {ratio:.2f}× as fast as ddp (2 processes × 1 CPU thread(s))"
    )
    assert sentence in done.output and found["data_parallel_against_ddp"].startswith(sentence)
    assert "data_parallel   refused: sync.name=data_parallel works in one process" in done.output
    assert (tmp_path / "out/scaling.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_strategy_that_fails_leaves_the_others_their_rows(tiny: list[str]) -> None:
    words = [*(word for word in tiny if "epochs" not in word), "model=tests.nets:Sociable"]
    base = Job("smoke", words, ranks=2, steps=1, warm_up=1, threads=1)
    rows = dict(_each_strategy(base, ["data_parallel", "allreduce"], ranks=2, batch=12))
    assert rows["data_parallel"]["ranks"] == 0 and "ArithmeticError: nobody is here" in rows["data_parallel"]["failed"]
    assert rows["allreduce"]["ranks"] == 2 and rows["allreduce"]["images_per_second"] > 0
    assert against_ddp(rows) == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["scaling", "--ranks", "1,zero"], "must be a whole number from 1, got 'zero'"),
        (["scaling", "--ranks", "1", "--strategies", "nothing"], "there is no 'nothing'; known: "),
        (["scaling", "--recipe", "smoky"], "did you mean 'smoke'"),
        (["speed"], "invalid choice: 'speed'"),
        (["scaling", "--out", "/dev/null/x"], "--out /dev/null/x: Not a directory; name a folder that can be written"),
        (
            ["inference", "--out", "/dev/null/x"],
            "--out /dev/null/x: Not a directory; name a folder that can be written",
        ),
    ],
)
def test_wrong_words_are_one_line(words: list[str], message: str) -> None:
    done = training("bench", *words)
    assert (
        done.code == 2 and message in done.output and done.output.startswith("error: ") and done.output.count("\n") == 1
    )


def test_inference_says_where_data_parallel_is_a_pass_through(tmp_path: Path) -> None:
    words = ["bench", "inference", "--recipe", "mlp", "--batches", "1,4", "--rounds", "2", "--out", str(tmp_path)]
    done = training(
        *words,
        "--set",
        f"data.root={tmp_path}",
        "device=cpu",
        "data.options={n: 40, features: 64, informative: 32, redundant: 0, classes: 4}",
    )
    assert done.code == 0 and "DataParallel is a pass-through here: with no GPU(s)" in done.output, done.output
    assert [row["batch"] for row in json.loads((tmp_path / "inference.json").read_text())["rows"]] == [1, 4]
    rows = [{"batch": 8, "speed_up": 0.5}, {"batch": 512, "speed_up": 1.5}]
    assert _verdict(4, rows) == "DataParallel over 4 GPUs pays from a batch of 512 on, at best 1.50× (batch 512)."
    assert "is not faster than one" in _verdict(2, rows[:1]) and "pass-through" in _verdict(1, rows)


def _rates(world: World, root: str, run: str) -> list[float]:
    """The rates that the benchmark's steps are taken with."""
    words = ["data.source=synthetic", "data.options={n: 96, n_test: 10, size: 8}", f"data.root={root}", "global_batch_size=24",
             "model=tests.nets:SmallConv", "model_options={}", "schedule=[[0, 0], [2, 1.0]]", "lr=0.8", "bias_lr_factor=1"]  # fmt: skip
    p = prepare.prepare(config.load("smoke", words), world, Path(run), fresh=False)
    timer = _Timer(p)
    found = []
    for _ in range(5):
        timer.step()
        found.append(p.state.optimizer.param_groups[0]["lr"])
    assert all(seconds >= 0 for seconds in timer.phases.values()) and timer.phases["forward"] > 0
    if p.run:
        p.run.close()
    return found


def test_its_steps_stand_where_a_runs_steps_stand_in_the_schedule(data_root: Path, tmp_path: Path) -> None:
    expected = [0.8 * step / 8 for step in range(1, 6)]  # four steps an epoch
    assert on_ranks(_rates, 2, str(data_root), str(tmp_path / "run")) == [pytest.approx(expected)] * 2
