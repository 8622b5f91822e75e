"""Jobs on a real SLURM: training to the recipe's accuracy, failures, cancelling, sweeps, preparation, refusals."""

from __future__ import annotations

import json
import os
import time

import pytest

from lockstep.jobs.slurm import render
from lockstep.jobs.spec.model import JobSpec
from lockstep.training.contract import UserError
from tests.events import events
from tests.processes import PYTHON, poll
from tests.slurm.conftest import Bench, both, lockstep
from tests.slurm.trainings import Training, assert_same, trained_here, training

LONG = "import time; print('begun', flush=True); time.sleep(600)"


def test_the_smoke_recipe_reaches_its_accuracy(bench: Bench) -> None:
    """2 nodes × 2 ranks, with SLURM's variables alone; the weights are those of 4 ranks of this machine."""
    run = bench.folder / "smoke"
    overrides = {"data.root": str(bench.data_root), "threads": 1}
    values = {"name": "smoke", "recipe": "smoke", "nodes": 2, "ranks_per_node": 2, "run_dir": str(run)}
    bench.backend.submit(JobSpec.of({**values, "overrides": overrides}))
    found = bench.wait("smoke", 300)
    assert found.state == "succeeded", f"{found}\n" + "\n".join(bench.backend.logs("smoke"))
    summary = bench.backend.summary("smoke")
    assert summary["accuracy"] >= 0.98 and summary["world_size"] == 4
    assert [(part.name, part.ranks) for part in found.ranks] == [("node1", [0, 1]), ("node2", [2, 3])]
    local = trained_here(bench.folder / "local", 4, f"data.root={bench.data_root}", "threads=1", timeout=300)
    assert_same(run, local, summary["steps"])


def test_every_rank_has_its_own_log_and_place(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import os, socket; e = os.environ; "
        "print(e['RANK'], e['LOCAL_RANK'], e['WORLD_SIZE'], e['MASTER_ADDR'], socket.gethostname(), e['GREETING'], e['KEY'])"
    )
    spec = bench.command(
        "places", program, nodes=2, gpus=2, env={"GREETING": 'it\'s "1e3"; $HOME'}, secrets={"KEY": {"secret": "s", "key": "k"}}
    )  # fmt: skip
    with pytest.raises(UserError, match="needs the secret KEY"):
        bench.backend.submit(spec)
    monkeypatch.setenv("KEY", "hunter2")
    bench.backend.submit(spec)
    assert bench.wait("places").state == "succeeded"
    assert list(bench.backend.logs("places", rank=3)) == ['3 1 4 node1 node2 it\'s "1e3"; $HOME hunter2']
    assert [line.split()[:5] for line in sorted(bench.backend.logs("places"))] == [
        ["[rank", f"{rank}]", str(rank), str(rank % 2), "4"] for rank in range(4)
    ]
    kept = [path for path in (bench.backend.folder / "places").rglob("*") if path.is_file() and not path.is_symlink()]
    kept = [path for path in kept if not path.name.endswith("_log.out")]
    assert {"job.json", "ended.json"} <= {path.name for path in kept}
    assert {path.suffix for path in kept} >= {".sh", ".pkl"}, "what was sent, and the payloads"
    assert not any(b"hunter2" in path.read_bytes() for path in kept)


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
    assert lockstep("render", "slurm", str(bench.file(spec))).stdout == sent
    assert bench.wait("same").state == "succeeded"


def test_a_failing_rank_ends_the_others(bench: Bench) -> None:
    """Rank 1 of 4 on node1 raises; the other ranks, two of them on the other node, sit in a long sleep."""
    go = bench.folder / "go"
    program = f"import os, time; first = os.environ['RANK'] == '1'\nwhile first and not os.path.exists('{go}'): time.sleep(0.05)\n"
    bench.backend.submit(bench.command("bad", f"{program}1 / (not first); {LONG}", nodes=2))
    for rank in (0, 2, 3):
        poll(lambda: list(bench.backend.logs("bad", rank=rank)) == ["begun"], 60, f"rank {rank}")
    assert bench.backend.status("bad").state == "running"
    go.touch()
    found = bench.wait("bad", 30)
    assert (found.state, found.code) == ("failed", 1)
    assert found.reason == "rank 1 on node1: ZeroDivisionError: division by zero"
    assert "Traceback (most recent call last):" in list(bench.backend.logs("bad", rank=1))
    assert "submitit" not in "\n".join(bench.backend.logs("bad", rank=1))


def test_a_failure_is_retried_and_wrong_usage_is_not(bench: Bench) -> None:
    once = bench.folder / "once"
    program = f"import os, sys; sys.exit(0 if os.path.exists('{once}') else [open('{once}', 'w'), 7][1])"
    bench.backend.submit(bench.command("again", program, ranks_per_node=1, max_restarts=2))
    bench.backend.submit(training(bench, "wrong", nodes=1, overrides={"model": "tests.nets:NoSuchNet"}, max_restarts=3))
    found = bench.wait("again")
    assert (found.state, found.ranks[0].restarts) == ("succeeded", 1), found
    found = bench.wait("wrong")
    assert (found.state, found.code, found.ranks[0].restarts) == ("failed", 2, 0), found
    assert "NoSuchNet" in found.reason


def test_wrong_usage_on_one_rank_is_final_though_the_others_fail_otherwise(bench: Bench) -> None:
    program = "import os, sys, time; rank = int(os.environ['RANK']); time.sleep(0.5 * (1 - rank)); sys.exit(1 + rank)"
    bench.backend.submit(bench.command("mixed", program, max_restarts=3))
    found = bench.wait("mixed")
    assert (found.state, found.code, found.ranks[0].restarts) == ("failed", 2, 0), found


def test_cancel_while_pending_and_requeued(bench: Bench) -> None:
    hold = bench.command("holds", LONG, nodes=2, ranks_per_node=1, slurm={"exclusive": True}, max_restarts=2)
    bench.backend.submit(hold)
    poll(lambda: list(bench.backend.logs("holds", rank=1)) == ["begun"], 60, "the ranks")
    bench.backend.submit(bench.command("waits", LONG, nodes=2, ranks_per_node=1))
    bench.becomes("waits", "pending", reason="waits for nodes to be free in partition main")
    assert bench.backend.cancel("waits").state == "cancelled"
    bench.cluster.ask("scontrol", "requeue", bench.backend.job_id("holds"))
    bench.becomes("holds", "restarting", reason="restart 1: waits for its start time")
    assert bench.backend.cancel("holds").state == "cancelled"
    assert {row.state for row in bench.backend.list()} == {"cancelled"}


def test_cancel_while_running(bench: Bench) -> None:
    job = Training(bench, "runs", epochs=2)
    job.hold.reached()
    found = bench.backend.cancel("runs")
    assert (found.state, found.reason, found.code) == ("cancelled", "cancelled; the state is saved", 75)
    assert events(job.run)[-1]["event"] == "preempted"
    bench.cluster.idle()  # nobody is left who could ask for a requeue
    assert bench.cluster.ask("squeue", "-h", "-t", "pending,running,completing") == "", "nobody has requeued it"


def test_somebody_elses_scancel_is_not_undone(bench: Bench) -> None:
    """The ranks save and ask for a requeue; SLURM would grant it to a job that is being cancelled."""
    job = Training(bench, "ended", epochs=2)
    job.hold.reached()
    bench.cluster.ask("scancel", job.job_id)
    found = bench.wait("ended")
    assert (found.state, found.code) == ("cancelled", 75), found
    bench.cluster.idle()
    assert bench.backend.status("ended").state == "cancelled"


def test_requests_that_no_node_can_meet(bench: Bench) -> None:
    for more, sentence in (
        (
            {"gpus": 8, "cpus": 2, "memory": "1Gi"},
            "SLURM refuses big: Batch job submission failed: Requested node configuration is not available",
        ),
        ({"nodes": 3}, "SLURM refuses big: Batch job submission failed: "),
        ({"slurm": {"partition": "nowhere"}}, "invalid partition specified: nowhere"),
        ({"elastic": {"min_nodes": 1, "max_nodes": 2}}, "LS101 error: elastic does not work on SLURM"),
    ):
        began = time.monotonic()
        with pytest.raises(UserError, match=sentence) as caught:
            bench.backend.submit(bench.command("big", LONG, **more))
        assert "\n" not in str(caught.value) and time.monotonic() - began < 10
    assert bench.backend.list() == []


def test_an_answer_of_sbatch_that_was_lost(bench: Bench) -> None:
    """The job is found by its name and comment, and not submitted twice."""
    spec = bench.command("lost", LONG, slurm={"patch": {"begin": "now+1hour"}})
    bench.backend.submit(spec)
    job_id, path = bench.backend.job_id("lost"), bench.backend.folder / "lost/job.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "job_id": None, "since": 0.0}))
    conf = os.environ["SLURM_CONF"]
    with pytest.MonkeyPatch.context() as patch:  # squeue fails: that says nothing about the job
        patch.setenv("SLURM_CONF", f"{conf}.of-nobody")
        for words in (("status", "slurm", "lost"), ("submit", "slurm", str(bench.file(spec)), "--replace")):
            done = lockstep(*words)
            assert done.returncode == 69 and "does not answer" in done.stderr, done
    assert bench.cluster.ask("squeue", "-h", "-o", "%F").split() == [job_id]
    assert not bench.backend.submit(spec).created
    assert bench.backend.job_id("lost") == job_id


def test_a_finished_job_is_not_taken_for_a_later_submission(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--replace` died when it came to sbatch; SLURM still shows the older job, of the same name and spec."""
    spec = bench.command("again", "print('done')", ranks_per_node=1)
    bench.backend.submit(spec)
    assert bench.wait("again").state == "succeeded"
    before = bench.cluster.ask("squeue", "-h", "--me", "-t", "all", "-n", "again", "-o", "%F")
    (bench.folder / "bin").mkdir()
    (bench.folder / "bin/sbatch").write_text("#!/bin/sh\nkill -9 $PPID\n")
    (bench.folder / "bin/sbatch").chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{bench.folder}/bin:{os.environ['PATH']}")
        with pytest.raises(UserError):
            bench.backend.submit(spec, "replace")
    assert before and bench.backend.status("again").state == "pending", "is being submitted, as far as anybody knows"
    for stage in bench.backend.folder.glob(".again.??????"):
        stage.rename(bench.folder / "stage")  # what the killed script has left
    assert bench.backend.cancel("again").state == "lost"
    assert bench.backend.submit(spec, "replace").created
    assert bench.wait("again").state == "succeeded" and bench.backend.job_id("again") != before


@both
def test_slurm_has_forgotten_the_job(bench: Bench) -> None:
    """The accounting still knows how it ended; without one there are what was seen, and what the tasks noted."""
    bench.backend.submit(bench.command("old", "print('done')", ranks_per_node=1))
    bench.backend.submit(bench.command("bad", "raise SystemExit(3)", ranks_per_node=1))
    assert (bench.wait("old").state, bench.wait("bad").state) == ("succeeded", "failed")
    bench.cluster.forgets(*(bench.backend.job_id(name) for name in ("old", "bad")))

    def states() -> tuple[str, str]:
        return bench.backend.status("old").state, bench.backend.status("bad").state

    assert states() == ("succeeded", "failed"), "as it was seen at the end"
    folders = [bench.backend.folder / name for name in ("old", "bad")]
    for folder in folders:
        (folder / "ended.json").unlink()
    assert states() == ("succeeded", "failed"), "from what the tasks noted"
    for folder in folders:
        for file in (*folder.glob("submitit/*_end.json"), folder / "ended.json"):
            file.unlink()
    if bench.cluster.accounting:
        found = bench.backend.status("bad")
        assert (found.state, found.reason, found.exit_code) == ("failed", "exit code 3", 3)
        found = bench.backend.status("old")
        assert (found.state, found.reason) == ("running", "has ended; the results of rank 0 are not visible yet")
        return
    assert states() == ("pending", "pending")
    path = folders[1] / "job.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "since": time.time() - 120}))
    found = bench.backend.wait("bad", 5)
    assert (found.state, found.code) == ("lost", 4)


@both
def test_doctor(bench: Bench) -> None:
    spec = training(bench, "ask", gpus=2, slurm={"account": "root"} if bench.cluster.accounting else {})
    done = lockstep("doctor", "slurm", str(bench.file(spec)), "--json")
    found = {item["name"]: item for item in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout
    assert found["gpus"]["detail"] == "2 of 2 nodes have 2 GPUs, the job needs 2"
    assert found["preemption"] == {
        "name": "preemption", "result": "ok", "detail": "REQUEUE, the job gets a signal before (preempt_send_user_signal)"
    }  # fmt: skip
    assert found["node"]["result"] == "ok" and str(bench.folder) in found["node"]["detail"]
    assert found["accounting"]["result"] == ("ok" if bench.cluster.accounting else "warning")
    assert found["account"]["result"] == ("ok" if bench.cluster.accounting else "cannot tell")
    python = bench.folder / "python-after-setup"
    python.write_text(f'#!/bin/sh\n[ -n "$PREPARED" ] && exec {PYTHON} "$@"\n')
    python.chmod(0o755)
    slurm = {**spec.slurm.model_dump(exclude_defaults=True), "python": str(python), "setup": ["export PREPARED=1"]}
    done = lockstep("doctor", "slurm", str(bench.file(JobSpec.of({**spec.plain(), "slurm": slurm}))), "--json")
    assert done.returncode == 0, done.stdout
    wanting = {"gpu_type": "a100", "python": "/usr/bin/python3", "account": "nobody"}
    spec = JobSpec.of({**spec.plain(), "gpus": 8, "nodes": 3, "slurm": wanting})
    done = lockstep("doctor", "slurm", str(bench.file(spec)), "--json")
    results = {item["name"]: item["result"] for item in json.loads(done.stdout)}
    assert done.returncode == 1 and results["partition"] == results["gpus"] == "missing"
    assert results["account"] == ("missing" if bench.cluster.accounting else "cannot tell")


def test_doctor_tries_the_image(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the words of the batch script: an image without submitit, one of another version, and no pyxis to run any."""
    inside = "print('0.0.1', *(open(name).read() for name in sys.argv[1:]))"
    for name, program in (
        ("lacking", "sys.modules['submitit'] = None; exec(sys.argv.pop(1))"),
        ("older", f"sys.argv.pop(1); {inside}"),
        ("sound", "exec(sys.argv.pop(1))"),
    ):
        python = bench.folder / name
        python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && shift\nexec {PYTHON} -c "import sys; {program}" "$@"\n')
        python.chmod(0o755)
    stand_in = bench.folder / "apptainer"  # the words behind the image, run on the node
    stand_in.write_text('#!/bin/sh\nwhile [ "$1" != /images/none.sif ]; do shift; done; shift\nexec "$@"\n')
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bench.folder}:{os.environ['PATH']}")

    def node(**slurm: str) -> tuple[str, str]:
        spec = bench.command("ask", "print()", slurm={"image": "/images/none.sif", **slurm})
        done = lockstep("doctor", "slurm", str(bench.file(spec)), "--json")
        found = next(item for item in json.loads(done.stdout) if item["name"] == "node")
        return found["result"], found["detail"]

    result, detail = node(container="apptainer", python=str(bench.folder / "sound"))
    assert result == "ok" and "sound in /images/none.sif" in detail
    result, detail = node(container="apptainer", python=str(bench.folder / "lacking"))
    assert result == "missing" and "submitit" in detail and "the image needs Lockstep and submitit" in detail, detail
    result, detail = node(container="apptainer", python=str(bench.folder / "older"))
    assert result == "missing" and "has Lockstep 0.0.1, and this machine has" in detail, detail
    result, detail = node(container="pyxis")
    assert result == "missing" and "--container-image" in detail, detail


def test_what_is_refused_takes_nothing_away(bench: Bench) -> None:
    bench.backend.submit(bench.command("kept", "print('here')"))
    bench.wait("kept")
    refused = bench.command("kept", "print('here')", slurm={"partition": "nowhere"})
    with pytest.raises(UserError, match="SLURM refuses kept"):
        bench.backend.submit(refused, "replace")
    assert bench.backend.status("kept").state == "succeeded" and "here" in list(bench.backend.logs("kept", rank=0))
    with pytest.raises(UserError, match="kept is already the name of a job"):
        bench.backend.sweep("kept", [training(bench, "kept-0", nodes=1), training(bench, "kept-1", nodes=1)])
    with pytest.raises(UserError, match="SLURM refuses tried"):
        bench.backend.sweep("tried", [training(bench, f"tried-{n}", nodes=1, slurm={"partition": "x"}) for n in (0, 1)])
    assert sorted(row.name for row in bench.backend.list()) == ["kept"]
    assert [entry.name for entry in bench.backend.folder.iterdir() if entry.is_dir()] == ["kept"]
