"""`lockstep run` from a shell and from forked ranks: its output, its files, and bad input."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from lockstep.training.parallel.world import cores
from tests.events import events, status_of, summary_of
from tests.processes import LOCKSTEP, PYTHON, ROOT, clean_env, require, run
from tests.ranks import gang, training
from tests.runs import Job
from tests.warm.gang import python


@pytest.mark.promise("launchers", "recorded-steps")
def test_two_ranks_under_lockstep_run(tiny: list[str], tmp_path: Path) -> None:
    """Every process is new, as in a user's shell. tests/sync tests other launchers."""
    words = ["--run-dir", str(tmp_path / "run"), "--ranks", "2"]
    words += [word for setting in [*tiny, "capture=auto", "check_closeness=5"] for word in ("--set", setting)]
    (tmp_path / "tmp").mkdir()
    env = clean_env(TMPDIR=str(tmp_path / "tmp"))
    done = run([LOCKSTEP, "run", "smoke", *words], env)
    assert done.code == 0, done.output
    assert list((tmp_path / "tmp").iterdir()) == []  # neither the launcher's folders nor a compiler's
    assert "check_closeness: 5" in (tmp_path / "run/run.yaml").read_text()
    assert f"2 ranks on cpu, {max(1, cores() // 2)} thread" in done.output and "[rank" not in done.output, done.output
    assert "eagerly" not in done.output, "on the CPU nothing is to be recorded"
    assert done.output.count("Final validation accuracy") == 1
    assert summary_of(tmp_path / "run")["world_size"] == 2


@pytest.mark.promise("fresh")
def test_alone_then_complete_then_longer_then_fresh(tiny: list[str], tmp_path: Path) -> None:
    words = ("run", "smoke", "--run-dir", str(tmp_path / "run"), "--set", *tiny)
    assert training(*words).code == 0
    weights = (tmp_path / "run/checkpoints/step-00000024/state.safetensors").read_bytes()
    again = training(*words)
    assert again.code == 0 and "The run is complete: 3 epochs, 24 steps" in again.output
    assert status_of(tmp_path / "run")["code"] == 0
    before = {path: path.read_bytes() for path in sorted((tmp_path / "run").rglob("*")) if path.is_file()}
    refusal = training(*words, "lr=0.1")
    assert refusal.code == 2 and "lr: 0.05 → 0.1" in refusal.output and "--fresh" in refusal.output, refusal.output
    assert {path: path.read_bytes() for path in before} == before, "a run of other settings is left alone"
    longer = training(*words, "epochs=4")
    assert longer.code == 0 and "Resuming at step 24" in longer.output
    assert summary_of(tmp_path / "run")["steps"] == 32
    fresh = training(*words, "--fresh")
    assert fresh.code == 0 and "moved the earlier run to" in fresh.output
    assert (tmp_path / "run.old-1/summary.json").exists()
    assert (tmp_path / "run/checkpoints/step-00000024/state.safetensors").read_bytes() == weights  # deterministic


@pytest.mark.promise("full-disk")
def test_a_full_disk_below_what_it_prints_costs_no_training(tiny: list[str], tmp_path: Path) -> None:
    words = [
        PYTHON,
        "-m",
        "lockstep.training",
        "run",
        "smoke",
        "--run-dir",
        str(tmp_path / "run"),
        "--set",
        *tiny,
        "epochs=1",
    ]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, env=clean_env(), cwd=ROOT, stdout=full, stderr=full, timeout=120, check=False)
    assert (done.returncode, status_of(tmp_path / "run")["code"]) == (0, 0)


def test_the_summary_and_the_events_agree_and_a_run_that_has_not_learned_is_reported(
    tiny: list[str], tmp_path: Path
) -> None:
    done = training("run", "smoke", "--run-dir", str(tmp_path / "run"), "--set", *tiny, "log.format=json")
    written, summary = events(tmp_path / "run"), summary_of(tmp_path / "run")
    printed = [json.loads(line) for line in done.output.splitlines()]
    assert [line for line in printed if line["event"] != "status"] == written
    reasons = [line["reason"] for line in printed if line["event"] == "status"]
    assert reasons[0] == "running" and reasons[-1] == "complete"
    epochs = [event for event in written if event["event"] == "epoch"]
    assert [event["epoch"] for event in epochs] == [1, 2, 3] and all(event["attempt"] == 1 for event in written)
    assert summary["accuracy"] == epochs[-1]["accuracy"] and summary["train_loss"] == epochs[-1]["train_loss"]
    assert epochs[-1]["train_loss"] < epochs[0]["train_loss"] and written[-1]["event"] == "done"
    assert summary.keys() >= {
        "recipe", "sync", "world_size", "steps", "epochs", "train_loss", "accuracy", "images_per_second", "wall_seconds",
        "restarts", "data",
    }  # fmt: skip
    assert status_of(tmp_path / "run")["reason"] == "complete"
    done = training("run", "smoke", "--run-dir", str(tmp_path / "bad"), "--set", *tiny, "lr=300")
    assert done.code == 0 and "The run has not learned" in done.output, done.output
    assert "guessing" in status_of(tmp_path / "bad")["reason"]


@pytest.mark.promise("same-weights")
def test_a_loss_is_the_mean_of_all_ranks_in_the_events_of_steps_and_of_epochs(data_root: Path, tmp_path: Path) -> None:
    losses = {}
    for ranks in (1, 3):  # the parts of 25 samples are unequal
        job = Job(
            tmp_path / str(ranks), data_root, ranks, precision="float64", model="tests.nets:SmallConv", uneven="weight",
            global_batch_size=25, **{"log.every": 1},
        )  # fmt: skip
        assert job.go().code == 0
        steps, epochs = events(job.run_dir, "step"), events(job.run_dir, "epoch")
        assert [event["step"] for event in steps] == list(range(1, 25))  # the last ones, too
        losses[ranks] = [event["train_loss"] for event in steps]
        for number, epoch in enumerate(epochs):
            own = losses[ranks][8 * number : 8 * number + 8]
            mean = sum(loss * count for loss, count in zip(own, [25] * 7 + [17], strict=True)) / 192
            assert mean == pytest.approx(epoch["train_loss"], rel=1e-12)
    assert losses[3] == pytest.approx(losses[1], rel=1e-9)


def test_shard_then_train_from_the_shards_then_evaluate_and_export(tiny: list[str], tmp_path: Path) -> None:
    out, run_dir, weights = tmp_path / "shards", tmp_path / "run", tmp_path / "weights.pth"
    done = training("shard", "smoke", "--out", str(out), "--set", *tiny)
    assert done.code == 0 and "192 training and 50 test samples of [8, 8, 3] in 2 files" in done.output, done.output
    assert training("shard", "smoke", "--out", str(out), "--set", *tiny).code == 2
    words = ["data.root=/no-such-folder", f"data.shards={out}"]
    done = gang(2, "run", "smoke", "--run-dir", str(run_dir), "--set", *tiny, *words)
    assert done.code == 0, done.output
    reached = summary_of(run_dir)["accuracy"]
    done = training("evaluate", str(run_dir), "--trust-model")
    assert done.code == 0 and f"accuracy {reached:.4f} (" in done.output, done.output
    moved = out.rename(tmp_path / "elsewhere")
    done = training("evaluate", str(run_dir), "--trust-model", "--set", f"data.shards={moved}")
    assert done.code == 0 and f"accuracy {reached:.4f} (" in done.output, done.output
    moved.rename(out)
    assert python("-m", "lockstep", "export", str(run_dir), str(weights)).code == 0
    assert python("-m", "lockstep", "export", str(run_dir), str(weights)).code == 2, "nothing is overwritten"


def test_three_ranks_on_an_empty_folder_prepare_it_once(tmp_path: Path) -> None:
    shards = tmp_path / "data/shards"
    words = [f"data.root={tmp_path / 'data'}", "data.source=synthetic", "data.options={n: 3000, n_test: 30, size: 32}"]
    words += ["model=tests.nets:SmallConv", "model_options={}", "global_batch_size=96", "epochs=1"]
    done = gang(3, "run", "smoke", "--run-dir", str(tmp_path / "run"), "--set", *words)
    assert done.code == 0, done.output
    assert len([path for path in shards.iterdir() if path.is_dir()]) == 1 and not list(shards.glob(".*"))


@pytest.mark.nightly
def test_compile_gives_the_same_numbers(tiny: list[str], tmp_path: Path) -> None:
    words = ("run", "smoke", "--set", *tiny, "epochs=1", "--run-dir")
    bare = training(*words, str(tmp_path / "bare"), "--set", "compile=true", env=clean_env(PATH=str(tmp_path)))
    assert bare.code == 2 and "compile=true needs a C++ compiler" in bare.output, bare.output
    require(shutil.which("g++"), "g++ is not installed: torch compiles with it")
    assert training(*words, str(tmp_path / "a")).code == 0
    fast = training(*words, str(tmp_path / "b"), "--set", "compile=true", timeout=240)
    assert fast.code == 0, fast.output
    plain_loss, compiled_loss = (summary_of(tmp_path / name)["train_loss"] for name in "ab")
    assert abs(plain_loss - compiled_loss) < 1e-9


SET = ["run", "smoke", "--set"]
BAD = {
    "unknown recipe": (["run", "smoky"], {}, "did you mean 'smoke'"),
    "unknown command": (["rum"], {}, "invalid choice"),
    "ill-typed setting": ([*SET, "lr=fast"], {}, "optim.lr must be a valid number"),
    "missing data": (["run", "bag_of_tricks", "--set", "data.root=/dev/null/x"], {}, "/dev/null/x"),
    "RANK alone": (["run", "smoke"], {"RANK": "0"}, "WORLD_SIZE is not set beside RANK=0"),
    "fresh over something else": (["run", "smoke", "--fresh", "--run-dir", "OTHER"], {}, "does not hold a run of Lockstep"),
    "no GPU": ([*SET, "device=cuda"], {"CUDA_VISIBLE_DEVICES": ""}, "no GPU is visible"),
    "batch too large": ([*SET, "global_batch_size=4096", "uneven=drop"], {}, "is larger than the 1438"),
    "batch and ghost norm": ([*SET, "global_batch_size=16", "uneven=drop"], {}, "in blocks of 32 (ghost batch norm): make it 32, or"),
    "no weights": ([*SET, "init_from=/no-such-folder.pth"], {}, "cannot read /no-such-folder.pth"),
    "run dir is a file": (["run", "smoke", "--run-dir", "Makefile"], {}, "Makefile: File exists"),
    "nothing to launch": (["launch", "--ranks", "2"], {}, "nothing to launch"),
    "nodes without a meeting point": (["launch", "--nodes", "2", "run", "smoke"], {}, "needs --rendezvous"),
    "evaluate nothing": (["evaluate", "/no-such-folder"], {}, "/no-such-folder"),
}  # fmt: skip


@pytest.mark.promise("bad-input")
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_exit_2(name: str, tmp_path: Path, data_root: Path) -> None:
    words, env, message = BAD[name]
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "mine.txt").touch()
    words = [str(folder) if word == "OTHER" else word for word in words]
    if words[0] == "run" and "--run-dir" not in words:
        words += ["--run-dir", str(tmp_path / "run")]
    if "--set" in words and not any(word.startswith("data.root") for word in words):
        words.insert(words.index("--set") + 1, f"data.root={data_root}")
    done = training(*words, env=clean_env(**env))
    assert done.code == 2, done.output
    lines = [line for line in done.output.splitlines() if line]
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0], done.output
    assert not Path("/no-such-folder").exists()
    left = {path.name for path in (tmp_path / "run").iterdir()} if (tmp_path / "run").is_dir() else set()
    assert left <= {".lock", "status.json"}
    if "status.json" in left:  # backends trust it above exit codes
        assert status_of(tmp_path / "run")["code"] == 2
    assert (ROOT / "Makefile").is_file()


@pytest.mark.promise("bad-input")
def test_two_ranks_refuse_with_one_line(tmp_path: Path, data_root: Path) -> None:
    words = ("run", "smoke", "--run-dir", str(tmp_path / "run"), "--set", f"data.root={data_root}", "init_from=/no.pth")
    done = gang(2, *words)
    assert done.code == 2 and done.output.count("error:") == 1 and "cannot read /no.pth" in done.output, done.output


WAITING = """
import os, sys, time
class Finder:
    def find_spec(self, name, path=None, target=None):
        began = time.monotonic()
        while name == "torch._C" and "launch" in sys.argv and not os.path.exists("started"):
            if time.monotonic() - began > 60:
                os._exit(3)
            time.sleep(0.01)
sys.meta_path.insert(0, Finder())
"""


def test_the_ranks_start_before_the_launcher_has_imported_torch(tmp_path: Path) -> None:
    """The import takes as long as a rank's own, and a launcher of one node needs torch only to serve the ranks' store."""
    (tmp_path / "sitecustomize.py").write_text(WAITING)
    program = [PYTHON, "-c", "open('started', 'w').close()"]
    words = ["-m", "lockstep.training", "launch", "--ranks", "2", "--", *program]
    done = run([PYTHON, *words], clean_env(PYTHONPATH=f"{tmp_path}:{ROOT}"), cwd=tmp_path)
    assert done.code == 0, done.output
