"""Jobs on a real SLURM: placement of ranks, failures, cancellation, refusals."""

from __future__ import annotations

import time

import pytest

from tests import product
from tests.events import events
from tests.processes import PYTHON, ROOT, poll
from tests.product import UserError
from tests.slurm.conftest import Bench, lockstep
from tests.slurm.trainings import Training, training

LONG = "import time; print('begun', flush=True); time.sleep(600)"


def test_every_rank_has_its_own_log_and_place(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import os, socket; e = os.environ; "
        "print(e['RANK'], e['LOCAL_RANK'], e['WORLD_SIZE'], e['MASTER_ADDR'], socket.gethostname(), e['GREETING'], e['KEY'])"
    )
    spec = bench.command(
        "places", program, nodes=2, gpus=2, env={"GREETING": 'it\'s "1e3"; $HOME'}, secrets={"KEY": {"secret": "s", "key": "k"}}
    )  # fmt: skip
    with pytest.raises(UserError, match="KEY"):
        bench.backend.submit(spec)
    monkeypatch.setenv("KEY", "hunter2")
    bench.backend.submit(spec)
    status = bench.wait("places")
    assert status.state == "succeeded" and [(part.name, part.ranks) for part in status.ranks] == [
        ("node1", [0, 1]),
        ("node2", [2, 3]),
    ]
    assert list(bench.backend.logs("places", rank=3)) == ['3 1 4 node1 node2 it\'s "1e3"; $HOME hunter2']
    assert [line.split()[:5] for line in sorted(bench.backend.logs("places"))] == [
        ["[rank", f"{rank}]", str(rank), str(rank % 2), "4"] for rank in range(4)
    ]
    files = [path for path in bench.note("places").rglob("*") if path.is_file() and not path.is_symlink()]
    files = [path for path in files if not path.name.endswith("_log.out")]
    assert {path.suffix for path in files} >= {".sh", ".pkl", ".json"}, "what was sent, the payloads, and records"
    assert not any(b"hunter2" in path.read_bytes() for path in files)


@pytest.mark.promise("slurm-truth")
def test_what_was_sent_is_what_render_prints(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "of an outer job")
    spec = bench.command("same", "print()", nodes=2, slurm={"partition": "main", "patch": {"nice": 5}})
    bench.backend.submit(spec)
    folder = bench.note("same/submitit")
    script = (folder / f"{bench.job_id('same')}_submission.sh").read_text()
    assert script == product.slurm_script(spec, folder) == lockstep("render", "slurm", str(bench.file(spec))).stdout
    assert bench.wait("same").state == "succeeded"


@pytest.mark.promise("slurm-truth")
def test_what_is_refused_leaves_nothing_and_takes_nothing_away(bench: Bench) -> None:
    bench.backend.submit(bench.command("kept", "print('here')"))
    bench.wait("kept")
    for more, message in (
        ({"gpus": 8, "cpus": 2, "memory": "1Gi"}, "Requested node configuration is not available"), ({"nodes": 3}, "SLURM refuses big"),
        ({"slurm": {"patch": {"exclude": "node9"}}}, "Invalid node name"), ({"slurm": {"partition": "nowhere"}}, "nowhere"),
    ):  # fmt: skip
        start = time.monotonic()
        with pytest.raises(UserError, match=message) as raised:
            bench.backend.submit(bench.command("big", LONG, **more))
        assert "\n" not in str(raised.value) and time.monotonic() - start < 10
    with pytest.raises(UserError, match="SLURM refuses kept"):
        bench.backend.submit(bench.command("kept", "print('here')", slurm={"partition": "nowhere"}), "replace")
    assert bench.backend.status("kept").state == "succeeded" and "here" in list(bench.backend.logs("kept", rank=0))
    with pytest.raises(UserError, match="kept is already"):
        bench.backend.sweep("kept", [training(bench, "kept-0", nodes=1), training(bench, "kept-1", nodes=1)])
    with pytest.raises(UserError, match="SLURM refuses tried"):
        bench.backend.sweep("tried", [training(bench, f"tried-{n}", nodes=1, slurm={"partition": "x"}) for n in (0, 1)])
    assert [row.name for row in bench.backend.list()] == ["kept"]
    assert [entry.name for entry in bench.backend.folder.iterdir() if entry.is_dir()] == ["kept"]


def test_a_failing_rank_ends_the_others(bench: Bench) -> None:
    """Rank 1 of 4 raises. SLURM ends the other ranks, two of them on the other node."""
    go = bench.folder / "go"
    program = f"import os, time; first = os.environ['RANK'] == '1'\nwhile first and not os.path.exists('{go}'): time.sleep(0.05)\n"
    bench.backend.submit(bench.command("bad", f"{program}1 / (not first); {LONG}", nodes=2))
    for rank in (0, 2, 3):
        poll(lambda: list(bench.backend.logs("bad", rank=rank)) == ["begun"], 60, f"rank {rank}")
    go.touch()
    status = bench.wait("bad")
    assert (status.state, status.code) == ("failed", 1)
    assert status.reason == "rank 1 on node1: ZeroDivisionError: division by zero"
    lines = list(bench.backend.logs("bad", rank=1))
    assert "Traceback (most recent call last):" in lines and "submitit" not in "\n".join(lines)


@pytest.mark.promise("slurm-survives")
def test_failures_are_retried_and_wrong_usage_of_one_rank_is_final(bench: Bench) -> None:
    """Also if other ranks fail differently."""
    once = bench.folder / "once"
    program = f"import os, sys; sys.exit(0 if os.path.exists('{once}') else [open('{once}', 'w'), 7][1])"
    bench.backend.submit(bench.command("again", program, ranks_per_node=1, max_restarts=2))
    mixed = "import os, signal, sys, time; rank = int(os.environ['RANK']); "
    mixed += "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1)); time.sleep(600 * (1 - rank)); sys.exit(1 + rank)"
    bench.backend.submit(bench.command("mixed", mixed, max_restarts=3))
    bench.backend.submit(training(bench, "wrong", nodes=1, overrides={"model": "tests.nets:NoSuchNet"}, max_restarts=3))
    for name, expected in (("again", ("succeeded", 0, 1)), ("mixed", ("failed", 2, 0)), ("wrong", ("failed", 2, 0))):
        status = bench.wait(name)
        assert (status.state, status.code, status.ranks[0].restarts) == expected, status
    assert "NoSuchNet" in status.reason


def test_cancel_while_running_saves_and_is_not_undone(bench: Bench) -> None:
    """The ranks save and request a requeue. The job stays cancelled, although SLURM would grant it."""
    job = Training(bench, "runs", epochs=2)
    job.hold.wait()
    bench.cluster.ask("scancel", job.job_id)
    status = bench.wait("runs")
    assert (status.state, status.code) == ("cancelled", 75) and events(job.run)[-1]["event"] == "preempted", status
    bench.cluster.idle()  # no process is left that could request a requeue
    assert bench.cluster.ask("squeue", "-h", "-t", "pending,running,completing") == "", "nobody has requeued it"
    assert bench.backend.status("runs").state == "cancelled"


@pytest.mark.promise("named-rank")
def test_a_rank_that_hangs_is_named_though_each_task_sees_its_own_rank_alone(bench: Bench) -> None:
    script, run = ROOT / "tests/faults/hanging.py", bench.folder / "hung"
    spec = bench.command("hung", "", command=[PYTHON, "-u", str(script), str(run), "held"], nodes=2, ranks_per_node=1)
    bench.backend.submit(spec)
    bench.becomes("hung", "running", 120, ": rank 1 waits (hanging.py:")
    poll(lambda: events(run, "hang"), 60, "the report of the hang")
    (run / "GO").touch()
    assert bench.wait("hung").state == "succeeded", list(bench.backend.logs("hung"))
    assert any("hang: rank 1 gets further again" in line for line in bench.backend.logs("hung")), list(
        bench.backend.logs("hung")
    )
    assert not (run / "hang.jsonl").exists() and events(run, "hang")
