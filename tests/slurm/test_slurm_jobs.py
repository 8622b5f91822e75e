"""Jobs on a real SLURM: training to the recipe's accuracy, failures, cancelling, sweeps, preparation, refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jobs.backends.slurm import training_task
from jobs.render import slurm as render
from jobs.spec import JobSpec
from tests.processes import PYTHON, ROOT, poll
from tests.slurm.conftest import Bench, once
from tests.slurm.test_slurm_survival import SETTINGS, assert_same, events, trained_here
from training.contract import UserError

LONG = "import time; print('begun', flush=True); time.sleep(600)"


def lockstep(*words: str, bound: float = 120) -> subprocess.CompletedProcess[str]:
    program = "import sys; sys.argv[0] = 'lockstep'; from jobs.cli import main; main()"
    return subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=bound)


def training(bench: Bench, name: str, **more: Any) -> JobSpec:
    """A short training on 2 nodes × 1 rank."""
    overrides = {
        **SETTINGS,
        "epochs": 2,
        "evaluate.every": 2,
        "data.root": str(bench.data_root),
        **more.pop("overrides", {}),
    }
    return JobSpec.of(
        {
            "name": name, "recipe": "smoke", "nodes": 2, "run_dir": str(bench.folder / name), "grace_seconds": 5, "cpus": 1,
            "overrides": overrides, "memory": "2Gi", **more,
        }
    )  # fmt: skip


@pytest.fixture(scope="session")
def local(tmp_path_factory: pytest.TempPathFactory, data_root: Path) -> Path:
    """The smoke recipe on 4 ranks of this machine, without SLURM."""
    run = tmp_path_factory.mktemp("smoke") / "local"
    return trained_here(run, 4, f"data.root={data_root}", "threads=1", timeout=300)


def test_the_smoke_recipe_reaches_its_accuracy(bench: Bench, local: Path) -> None:
    """2 nodes × 2 ranks, with SLURM's variables alone; the weights are those of 4 ranks of this machine."""
    run = bench.folder / "smoke"
    overrides = {"data.root": str(bench.data_root), "threads": 1}
    spec = JobSpec.of(
        {
            "name": "smoke",
            "recipe": "smoke",
            "nodes": 2,
            "ranks_per_node": 2,
            "run_dir": str(run),
            "overrides": overrides,
        }
    )
    bench.backend.submit(spec)
    found = bench.backend.wait("smoke", 300)
    assert found.state == "succeeded", f"{found}\n" + "\n".join(bench.backend.logs("smoke"))
    summary = bench.backend.summary("smoke")
    assert summary["accuracy"] >= 0.98 and summary["world_size"] == 4
    assert [(part.name, part.ranks) for part in found.ranks] == [("node1", [0, 1]), ("node2", [2, 3])]
    assert_same(run, local, summary["steps"])


def test_every_rank_has_its_own_log_and_place(bench: Bench) -> None:
    program = (
        "import os, socket; e = os.environ; "
        "print(e['RANK'], e['LOCAL_RANK'], e['WORLD_SIZE'], e['MASTER_ADDR'], socket.gethostname(), e['GREETING'], e['KEY'])"
    )
    spec = bench.command("places", program, nodes=2, gpus=2, env={"GREETING": 'it\'s "1e3"; $HOME'})
    spec = spec.model_copy(
        update={"secrets": JobSpec.of({**spec.plain(), "secrets": {"KEY": {"secret": "s", "key": "k"}}}).secrets}
    )
    with pytest.raises(UserError, match="needs the secret KEY"):
        bench.backend.submit(spec)
    os.environ["KEY"] = "hunter2"
    try:
        bench.backend.submit(spec)
    finally:
        del os.environ["KEY"]
    assert bench.backend.wait("places", 60).state == "succeeded"
    assert list(bench.backend.logs("places", rank=3)) == ['3 1 4 node1 node2 it\'s "1e3"; $HOME hunter2']
    assert [line.split()[:5] for line in sorted(bench.backend.logs("places"))] == [
        ["[rank", f"{rank}]", str(rank), str(rank % 2), "4"] for rank in range(4)
    ]
    kept = [path for path in (bench.backend.folder / "places").rglob("*") if path.is_file() and not path.is_symlink()]
    assert not any(b"hunter2" in path.read_bytes() for path in kept if not path.name.endswith("_log.out"))


@once
def test_what_was_sent_is_what_render_prints(bench: Bench) -> None:
    spec = bench.command(
        "same", "print()", nodes=2, slurm={"partition": "main", "exclude": "node9", "patch": {"nice": 5}}
    )
    with pytest.raises(UserError, match="SLURM refuses same: .*Invalid node name specified"):
        bench.backend.submit(spec)  # what sbatch refuses leaves nothing behind
    assert bench.backend.list() == []
    spec = bench.command("same", "print()", nodes=2, slurm={"partition": "main", "patch": {"nice": 5}})
    bench.backend.submit(spec)
    folder = bench.backend.folder / "same/submitit"
    sent = (folder / f"{bench.backend.job_id('same')}_submission.sh").read_text()
    assert sent == render.script(spec, folder)
    assert lockstep("render", "slurm", str(_file(bench, spec))).stdout == sent
    assert bench.backend.wait("same", 60).state == "succeeded"


def _file(bench: Bench, spec: JobSpec) -> Path:
    path = bench.folder / "job.yaml"
    path.write_text(json.dumps(spec.plain()))
    return path


def test_a_failing_rank_ends_the_others(bench: Bench) -> None:
    """Rank 1 of 4 on node1 raises; the ranks of the other node sit in a long sleep."""
    program = f"import os, time; time.sleep(1); 1 / (os.environ['RANK'] != '1'); {LONG}"
    bench.backend.submit(bench.command("bad", program, nodes=2))
    poll(lambda: bench.backend.status("bad").state == "running", 30, "the start")
    began = time.monotonic()
    found = bench.backend.wait("bad", 40)
    assert time.monotonic() - began < 30
    assert (found.state, found.code) == ("failed", 1)
    assert found.reason == "rank 1 on node1: ZeroDivisionError: division by zero"
    assert "Traceback (most recent call last):" in list(bench.backend.logs("bad", rank=1))
    assert "submitit" not in "\n".join(bench.backend.logs("bad", rank=1))


def test_a_failure_is_retried_and_wrong_usage_is_not(bench: Bench) -> None:
    once = bench.folder / "once"
    program = f"import os, sys; sys.exit(0 if os.path.exists('{once}') else [open('{once}', 'w'), 7][1])"
    bench.backend.submit(bench.command("again", program, ranks_per_node=1, max_restarts=2))
    wrong = training(bench, "wrong", overrides={"model": "tests.nets:NoSuchNet"}, max_restarts=3)
    bench.backend.submit(wrong)
    found = bench.backend.wait("again", 60)
    assert (found.state, found.ranks[0].restarts) == ("succeeded", 1), found
    found = bench.backend.wait("wrong", 60)
    assert (found.state, found.code, found.ranks[0].restarts) == ("failed", 2, 0), found
    assert "NoSuchNet" in found.reason


@once
def test_wrong_usage_on_one_rank_is_final_though_the_others_fail_otherwise(bench: Bench) -> None:
    program = "import os, sys, time; rank = int(os.environ['RANK']); time.sleep(0.5 * (1 - rank)); sys.exit(1 + rank)"
    bench.backend.submit(bench.command("mixed", program, max_restarts=3))
    found = bench.backend.wait("mixed", 60)
    assert (found.state, found.code, found.ranks[0].restarts) == ("failed", 2, 0), found


def test_cancel_while_pending_running_and_requeued(bench: Bench) -> None:
    hold = bench.command("holds", LONG, nodes=2, ranks_per_node=1, slurm={"exclusive": True}, max_restarts=2)
    bench.backend.submit(hold)
    bench.backend.submit(bench.command("waits", LONG, nodes=2, ranks_per_node=1))
    poll(lambda: list(bench.backend.logs("holds", rank=1)) == ["begun"], 60, "the ranks")
    waiting = bench.backend.status("waits")
    assert waiting.state in ("pending", "queued") and "waits" in waiting.reason, waiting
    assert bench.backend.cancel("waits").state == "cancelled"
    bench.cluster.ask("scontrol", "requeue", bench.backend.job_id("holds"))
    poll(lambda: bench.backend.status("holds").state == "restarting", 30, "the requeue")
    assert "restart 1" in bench.backend.status("holds").reason
    assert bench.backend.cancel("holds").state == "cancelled"
    spec = training(bench, "runs", overrides={"epochs": 400}, env={"LOCKSTEP_TEST_PACE": "0.05"})
    bench.backend.submit(spec)
    poll(lambda: len(events(bench.folder / "runs")) > 3, 60, "the training")
    found = bench.backend.cancel("runs")
    assert (found.state, found.reason, found.code) == ("cancelled", "cancelled; the state is saved", 75)
    assert events(bench.folder / "runs")[-1]["event"] == "preempted"
    time.sleep(1)
    assert bench.cluster.ask("squeue", "-h", "-t", "pending,running,completing") == "", "nobody has requeued it"
    assert {row.state for row in bench.backend.list()} == {"cancelled"}


def test_somebody_elses_scancel_is_not_undone(bench: Bench) -> None:
    """The ranks save and ask for a requeue; SLURM would grant it to a job that is being cancelled."""
    spec = training(bench, "ended", overrides={"epochs": 400}, env={"LOCKSTEP_TEST_PACE": "0.05"})
    bench.backend.submit(spec)
    poll(lambda: len(events(bench.folder / "ended")) > 3, 60, "the training")
    bench.cluster.ask("scancel", bench.backend.job_id("ended"))
    found = bench.backend.wait("ended", 60)
    assert (found.state, found.code) == ("cancelled", 75), found


def test_requests_that_no_node_can_meet(bench: Bench) -> None:
    for more, sentence in (
        ({"gpus": 8}, "SLURM refuses big: Batch job submission failed: Requested node configuration is not available"),
        ({"nodes": 3}, "SLURM refuses big: Batch job submission failed: "),
        ({"slurm": {"partition": "nowhere"}}, "invalid partition specified: nowhere"),
        ({"elastic": {"min_nodes": 1, "max_nodes": 2}}, "LS101 error: elastic is not for SLURM"),
    ):
        began = time.monotonic()
        with pytest.raises(UserError, match=sentence) as caught:
            bench.backend.submit(bench.command("big", LONG, **more))
        assert "\n" not in str(caught.value) and time.monotonic() - began < 10
    assert bench.backend.list() == []


def test_a_sweep_is_one_array(bench: Bench) -> None:
    spec = training(bench, "grid", overrides={"epochs": 1, "evaluate.every": 1}, nodes=1)
    done = lockstep("submit", "slurm", str(_file(bench, spec)), "--sweep", "lr=0.1,0.001", "--wait", "120", bound=180)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0] == ["NAME", "LR", "STATE", "ACCURACY"]
    assert [line[:3] for line in lines[1:]] == [["grid-0", "0.1000", "succeeded"], ["grid-1", "0.001", "succeeded"]]
    ids = [bench.backend.job_id(f"grid-{index}") for index in (0, 1)]
    assert [one.split("_")[1] for one in ids] == ["0", "1"] and len({one.split("_")[0] for one in ids}) == 1
    runs = [json.loads((bench.folder / "grid" / f"grid-{index}" / "summary.json").read_text()) for index in (0, 1)]
    assert runs[0]["config_hash"] != runs[1]["config_hash"]
    assert lockstep("submit", "slurm", str(_file(bench, spec)), "--sweep", "lr=0.1,0.001").returncode == 2, (
        "has finished"
    )


@once
def test_a_part_of_a_sweep_is_requeued_alone(bench: Bench) -> None:
    """The array's last element bears the array's own id: a requeue by that id would take all the others along."""
    spec = training(bench, "part", nodes=1, overrides={"epochs": 16, "evaluate.every": 16}, max_restarts=2)
    spec = spec.model_copy(update={"env": {"LOCKSTEP_TEST_PACE": "0.05"}})
    from jobs import sweep

    bench.backend.sweep("part", sweep.expand(spec, {"lr": [0.1, 0.01]}))
    for index in (0, 1):
        run = bench.folder / "part" / f"part-{index}"
        poll(lambda: any(event["event"] == "step" for event in events(run)), 60, "the training")
    bench.cluster.ask("scancel", "--signal=USR2", bench.backend.job_id("part-1"))
    found = [bench.backend.wait(f"part-{index}", 120) for index in (0, 1)]
    assert [(one.state, one.ranks[0].restarts) for one in found] == [("succeeded", 0), ("succeeded", 1)], found


def test_shards_are_prepared_once_and_waited_for(bench: Bench) -> None:
    shards = bench.folder / "shards"
    spec = training(bench, "fed", shards=str(shards), nodes=1)
    first = bench.backend.prepare(spec)
    assert first.created and not bench.backend.prepare(spec).created
    bench.backend.submit(spec)
    shown = bench.cluster.ask("scontrol", "show", "job", "-o", bench.backend.job_id("fed"))
    assert f"Dependency=afterok:{bench.backend.job_id('fed-prepare')}" in shown
    assert bench.backend.wait("fed", 120).state == "succeeded"
    assert (shards / "synthetic").is_dir()
    assert bench.backend.prepare(spec).where == f"the shards are in {shards}/synthetic"
    hungry = training(bench, "hungry", shards=str(bench.folder / "none"), nodes=1)
    bench.backend.prepare(hungry)
    bench.backend.submit(hungry)
    bench.backend.cancel("hungry-prepare")
    found = bench.backend.wait("hungry", 60)
    assert (found.state, found.reason) == (
        "failed", "the job that it depends on has failed: see its logs, then submit again"
    )  # fmt: skip


@once
def test_submitit_alone_can_drive_it(bench: Bench) -> None:
    import submitit

    spec = training(bench, "plain", nodes=1)
    folder = bench.folder / "submitit"
    executor = submitit.AutoExecutor(folder=folder, cluster="slurm")
    executor.update_parameters(nodes=1, tasks_per_node=2, timeout_min=10, mem_gb=2)
    job = executor.submit(training_task(spec.model_copy(update={"ranks_per_node": 2})))
    results = job.results()
    assert results[0]["world_size"] == 2 and results[1] is None
    bad = executor.submit(training_task(spec.model_copy(update={"run_dir": "/proc/nowhere", "ranks_per_node": 2})))
    error = bad.task(0).exception()
    assert error is not None and "rank 0 ended with 2: " in str(error)


@once
def test_an_answer_of_sbatch_that_was_lost(bench: Bench) -> None:
    """The job is found by its name and comment, and not submitted twice."""
    spec = bench.command("lost", LONG)
    bench.backend.submit(spec)
    job_id, path = bench.backend.job_id("lost"), bench.backend.folder / "lost/job.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "job_id": None}))
    assert not bench.backend.submit(spec).created
    assert bench.backend.job_id("lost") == job_id
    bench.backend.cancel("lost")


def test_slurm_has_forgotten_the_job(bench: Bench) -> None:
    """Without accounting a job is gone from SLURM minutes after its end; here its id is one that never was."""
    bench.backend.submit(bench.command("old", "print('done')"))
    assert bench.backend.wait("old", 60).state == "succeeded"
    path = bench.backend.folder / "old/job.json"
    record = json.loads(path.read_text())
    folder = Path(record["submitit"])
    for file in folder.glob(f"{record['job_id']}_*_end.json"):
        file.rename(folder / file.name.replace(record["job_id"], "7"))
    path.write_text(json.dumps({**record, "job_id": "7"}))
    assert bench.backend.status("old").state == "succeeded", "as it was seen at its end"
    (path.parent / "ended.json").unlink()
    assert bench.backend.status("old").state == "succeeded", "from what the tasks noted"
    for file in [*folder.glob("7_*_end.json"), path.parent / "ended.json"]:
        file.unlink()
    path.write_text(json.dumps({**record, "job_id": "7", "since": time.time()}))
    assert bench.backend.status("old").state == "pending"
    path.write_text(json.dumps({**record, "job_id": "7", "since": time.time() - 120}))
    assert (bench.backend.wait("old", 5).state, bench.backend.status("old").code) == ("lost", 4)


def test_doctor(bench: Bench) -> None:
    spec = training(bench, "ask", gpus=2, slurm={"account": "root"} if bench.cluster.accounting else {})
    done = lockstep("doctor", "slurm", str(_file(bench, spec)), "--json")
    found = {item["name"]: item for item in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout
    assert found["gpus"]["detail"] == "2 of 2 nodes have 2 GPUs, the job needs 2"
    assert found["preemption"] == {
        "name": "preemption", "result": "ok", "detail": "REQUEUE, the job is told first (preempt_send_user_signal)"
    }  # fmt: skip
    assert found["node"]["result"] == "ok" and str(bench.folder) in found["node"]["detail"]
    assert found["accounting"]["result"] == ("ok" if bench.cluster.accounting else "warning")
    assert found["account"]["result"] == ("ok" if bench.cluster.accounting else "cannot tell")
    python = bench.folder / "python-after-setup"
    python.write_text(f'#!/bin/sh\n[ -n "$PREPARED" ] && exec {PYTHON} "$@"\n')
    python.chmod(0o755)
    slurm = {**spec.slurm.model_dump(exclude_defaults=True), "python": str(python), "setup": ["export PREPARED=1"]}
    done = lockstep("doctor", "slurm", str(_file(bench, JobSpec.of({**spec.plain(), "slurm": slurm}))), "--json")
    assert done.returncode == 0, done.stdout
    wanting = {"gpu_type": "a100", "python": "/usr/bin/python3", "account": "nobody"}
    spec = JobSpec.of({**spec.plain(), "gpus": 8, "nodes": 3, "slurm": wanting})
    done = lockstep("doctor", "slurm", str(_file(bench, spec)), "--json")
    results = {item["name"]: item["result"] for item in json.loads(done.stdout)}
    assert done.returncode == 1 and results["partition"] == results["gpus"] == "missing"
    if bench.cluster.accounting:
        assert results["account"] == "missing"


@once
def test_what_is_refused_takes_nothing_away(bench: Bench) -> None:
    bench.backend.submit(bench.command("kept", "print('here')"))
    bench.backend.wait("kept", 60)
    refused = bench.command("kept", "print('here')", slurm={"partition": "nowhere"})
    with pytest.raises(UserError, match="SLURM refuses kept"):
        bench.backend.submit(refused, "replace")
    assert bench.backend.status("kept").state == "succeeded" and "here" in list(bench.backend.logs("kept", rank=0))
    with pytest.raises(UserError, match="kept is a job of its own"):
        bench.backend.sweep("kept", [training(bench, "kept-0", nodes=1), training(bench, "kept-1", nodes=1)])
    with pytest.raises(UserError, match="SLURM refuses tried"):
        bench.backend.sweep("tried", [training(bench, f"tried-{n}", nodes=1, slurm={"partition": "x"}) for n in (0, 1)])
    assert sorted(row.name for row in bench.backend.list()) == ["kept"]
    assert [entry.name for entry in bench.backend.folder.iterdir() if entry.is_dir()] == ["kept"]


@once
def test_the_lost_answer_for_an_array_is_found_again(bench: Bench) -> None:
    specs = [training(bench, f"lost-{n}", nodes=1, env={"N": str(n)}) for n in (0, 1)]
    before = {item.name: bench.backend.job_id(item.name) for item in bench.backend.sweep("lost", specs)}
    for name in before:
        path = bench.backend.folder / name / "job.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "job_id": None}))
    assert {name: bench.backend.job_id(name) for name in before} == before
    record = bench.backend.folder / "lost-0" / "job.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "job_id": None, "comment": "of nobody"}))
    assert bench.backend.status("lost-0").state == "pending", "somebody may be submitting it at this moment"
    record.write_text(json.dumps({**json.loads(record.read_text()), "since": 0.0}))
    assert bench.backend.status("lost-0").state == "lost"


@once
def test_the_driver_submits_again_after_a_preemption_and_shows_a_traceback(bench: Bench) -> None:
    spec = training(bench, "again", nodes=1, max_restarts=0, env={"LOCKSTEP_TEST_PACE": "0.3"})
    command = [PYTHON, str(ROOT / "examples/driver.py"), str(_file(bench, spec)), "--poll", "0.5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as driver:
        poll(lambda: len(events(bench.folder / "again")) > 2, 90, "the training")
        bench.cluster.ask("scancel", "--signal=USR2", bench.backend.job_id("again"))
        said, _ = driver.communicate(timeout=240)
    assert driver.returncode == 0, said
    assert "again: preempted" in said and "again  succeeded" in said
    assert [event["event"] for event in events(bench.folder / "again")].count("resumed") == 1
    spec = bench.command("wrong", "1 / 0")
    command[2] = str(_file(bench, spec))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "Traceback (most recent call last):" in done.stdout, done.stdout + done.stderr
    assert "ZeroDivisionError: division by zero" in done.stdout


@once
def test_the_example_driver(bench: Bench) -> None:
    spec = training(bench, "driven", nodes=1)
    command = [
        PYTHON,
        str(ROOT / "examples/driver.py"),
        str(_file(bench, spec)),
        "--sweep",
        "lr=0.1,0.01",
        "--poll",
        "0.5",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    for index in (0, 1):
        accuracy = bench.backend.summary(f"driven-{index}")["accuracy"]
        assert f"driven-{index}  succeeded  {accuracy:.4f}\n" in done.stdout
