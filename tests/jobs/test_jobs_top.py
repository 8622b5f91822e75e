"""`lockstep top`: who is called a straggler, what is read, and what is shown."""

from __future__ import annotations

import contextlib
import http.server
import io
import json
import socket
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from lockstep.jobs.cli import top
from lockstep.jobs.cli.ranks import Reader, Snapshot, judge
from lockstep.training.contract import UserError
from tests.jobs.helpers import lockstep

TEXT = """# HELP training_step Steps.
# TYPE training_step gauge
training_step{{rank="{rank}",run="x"}} 40
training_steps_planned{{rank="{rank}",run="x"}} 100
training_samples_total{{rank="{rank}",run="x"}} 640
training_step_duration_seconds_bucket{{le="0.1",rank="{rank}",run="x"}} 3
training_step_duration_seconds_sum{{rank="{rank}",run="x"}} 4
training_step_duration_seconds_count{{rank="{rank}",run="x"}} 40
training_data_wait_seconds_sum{{rank="{rank}",run="x"}} {data}
training_grad_ready_seconds_sum{{rank="{rank}",run="x"}} {compute}
training_sync_wait_seconds_sum{{rank="{rank}",run="x"}} {sync}
training_loss{{rank="{rank}",run="x"}} NaN
training_finished{{rank="{rank}",run="x"}} 0
"""


def _snapshot(rank: int, at: float, steps: int, data: float, compute: float, sync: float) -> Snapshot:
    """After `steps` steps of 0.1 s, with shares of it."""
    spent = steps * 0.1
    return Snapshot(rank, {
        "step": steps, "samples_total": 16.0 * steps, "step_duration_seconds_count": steps, "attempt": 1,
        "step_duration_seconds_sum": spent, "data_wait_seconds_sum": data * spent, "grad_ready_seconds_sum": compute * spent,
        "sync_wait_seconds_sum": sync * spent, "last_step_timestamp_seconds": time.time(),
    }, at, "live")  # fmt: skip


def _judged(*shares: tuple[float, float, float]) -> list[str | None]:
    """Stragglers by rank; before these 40 steps all ranks had 1000 even ones, which must not blur the picture."""
    before = {rank: _snapshot(rank, 10.0, 1000, 0.0, 0.6, 0.3) for rank in range(len(shares))}
    after = {}
    for rank, (data, compute, sync) in enumerate(shares):
        first, then = before[rank].values, _snapshot(rank, 14.0, 40, data, compute, sync).values
        sums = {n: first[n] + then[n] for n in first if n not in ("attempt", "last_step_timestamp_seconds")}
        after[rank] = Snapshot(rank, {**first, **sums}, 14.0, "live")
    ranks = judge(before, after)
    assert [rank.images_per_second for rank in ranks] == pytest.approx([160.0] * len(shares))
    assert [rank.step_seconds for rank in ranks] == pytest.approx([0.1] * len(shares))
    return [rank.straggler for rank in ranks]


def test_the_straggler_waits_least_while_the_others_wait() -> None:
    assert _judged((0.0, 0.05, 0.94), (0.0, 0.9, 0.08)) == [None, "compute"]
    assert _judged((0.0, 0.05, 0.94), (0.8, 0.1, 0.08)) == [None, "data"]
    assert _judged((0, 0.6, 0.35), (0, 0.7, 0.3), (0, 0.96, 0.03), (0, 0.6, 0.4)) == [None, None, "compute", None]


def test_nobody_is_one_where_all_wait_alike_or_hardly_at_all_or_alone() -> None:
    assert _judged((0, 0.5, 0.45), (0, 0.7, 0.25)) == [None, None]
    assert _judged((0, 0.8, 0.15), (0, 0.95, 0.01)) == [None, None]
    assert _judged((0, 0.99, 0.0)) == [None]


def _run(folder: Path, *ranks: tuple[float, float, float]) -> Path:
    (folder / "metrics").mkdir(parents=True)
    (folder / "run.yaml").write_text("config: {}\n")
    for rank, (data, compute, sync) in enumerate(ranks):
        text = TEXT.format(rank=rank, data=data, compute=compute, sync=sync)
        (folder / f"metrics/rank-{rank:05d}.prom").write_text(text)
    return folder


def test_textfiles_do_where_no_rank_answers(tmp_path: Path) -> None:
    folder = _run(tmp_path / "run", (0.0, 0.4, 3.5), (0.1, 3.7, 0.1))
    (folder / "endpoints").mkdir()
    (folder / "endpoints/rank-00000.json").write_text('{"host": "127.0.0.1", "port": 1, "pid": 1}')
    (folder / "endpoints/rank-00001.json").write_text("half of it")
    (folder / "metrics/rank-00002.prom").write_bytes(b"\xff\xfe not text")
    (folder / "metrics/rank-x.prom").write_text("")
    done = lockstep(tmp_path, "top", str(folder), "--json", "--every", "0.2")
    assert (done.returncode, done.stderr) == (0, ""), done
    ranks = json.loads(done.stdout)
    assert [(rank["rank"], rank["source"], rank["straggler"]) for rank in ranks] == [
        (0, "textfile", None), (1, "textfile", "compute"),
    ]  # fmt: skip
    assert ranks[0]["step"] == 40 and ranks[0]["sync_wait"] == 0.875 and ranks[0]["images_per_second"] == 160
    table = lockstep(tmp_path, "top", str(folder), "--once", "--every", "0.2").stdout
    assert "STRAGGLER (compute)" in table and "dd" not in table and "ssss" in table


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('step{rank="0",run="x"} 40', 'step{rank="0",run="x"} NaN'),
        ('planned{rank="0",run="x"} 100', 'planned{rank="0",run="x"} +Inf'),
        ('sum{rank="0",run="x"} 4', 'sum{rank="0",run="x"} 1e-308'),
        ('count{rank="0",run="x"} 40', 'count{rank="0",run="x"} -Inf'),
        ('sum{rank="0",run="x"} 3.5', 'sum{rank="0",run="x"} 1e308'),
        ("finished", 'exit_code{rank="0",run="x"} +Inf\ntraining_finished{rank="0",run="x"} 1\ntraining_other'),
    ],
)
def test_numbers_that_are_none_are_left_out(tmp_path: Path, old: str, new: str) -> None:
    folder = _run(tmp_path / "run", (0.0, 0.4, 3.5), (0.1, 3.7, 0.1))
    file = folder / "metrics/rank-00000.prom"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    ranks = judge({}, Reader(folder).read())
    assert [rank.rank for rank in ranks] == [0, 1] and ranks[1].step == 40
    assert top.row(ranks[0])[0] == "0" and "40" in top.row(ranks[1])
    top.picture(folder, ranks)


def _answers(what: bytes) -> tuple[socket.socket, int]:
    """A server that says the same thing to everybody, and its port."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):  # until it is closed
            while True:
                client, _ = server.accept()
                with client:
                    client.sendall(what)

    threading.Thread(target=serve, daemon=True).start()
    return server, server.getsockname()[1]


def test_an_endpoint_that_is_none_leaves_the_textfile(tmp_path: Path) -> None:
    folder = _run(tmp_path / "run", (0.0, 0.4, 3.5))
    (folder / "endpoints").mkdir()
    other, port = _answers(b"SSH-2.0-OpenSSH\r\n")
    ill, busy = _answers(b"HTTP/1.0 503 Unavailable\r\n\r\n")
    places = [("127.0.0.1", port), ("127.0.0.1", busy), ("a b", 80), ("x\n", 80), ("", 80), ("." * 80, 80), ("127.0.0.1", 0),
              ("127.0.0.1", 99999), ("127.0.0.1", -1), ([], 80), ("127.0.0.1", 1e300)]  # fmt: skip
    with other, ill:
        for host, number in places:
            (folder / "endpoints/rank-00000.json").write_text(json.dumps({"host": host, "port": number}))
            found = Reader(folder).read()
            assert found[0].source == "textfile" and found[0].values["step"] == 40, (host, number)


@pytest.mark.parametrize(("run_name", "rank", "source"), [("x", 0, "live"), ("y", 0, "textfile"), ("x", 1, "textfile")])
def test_another_run_on_the_port_of_a_killed_rank_is_not_believed(
    tmp_path: Path, run_name: str, rank: int, source: str
) -> None:
    folder = _run(tmp_path / "run", (0.0, 0.4, 3.5))
    (folder / "endpoints").mkdir()
    text = (
        TEXT.format(rank=rank, data=0.0, compute=0.4, sync=3.5)
        .replace('run="x"', f'run="{run_name}"')
        .replace("} 40", "} 777")
    )

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        port = server.server_address[1]
        threading.Thread(target=server.handle_request, daemon=True).start()
        (folder / "endpoints/rank-00000.json").write_text(json.dumps({"host": "127.0.0.1", "port": port}))
        found = Reader(folder).read()[0]
    assert (found.source, found.values["step"]) == (source, 777 if source == "live" else 40)


def test_what_is_no_run(tmp_path: Path) -> None:
    done = lockstep(tmp_path, "top", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and "does not hold a run" in done.stderr
    (tmp_path / "run.yaml").write_text("")
    done = lockstep(tmp_path, "top", str(tmp_path))
    assert done.returncode == 2 and "has no metrics yet" in done.stderr
    with pytest.raises(UserError):
        Reader(tmp_path / "nothing")


@pytest.mark.parametrize("width", [80, 140])
def test_the_live_table_fits_and_moves_no_cursor(tmp_path: Path, width: int) -> None:
    folder = _run(tmp_path / "run", (0.0, 0.4, 3.5), (0.1, 3.7, 0.1))
    ranks = judge({}, Reader(folder).read())
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(top.picture(Path("runs/\x1b[2J[/x]"), ranks, width))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= width
    assert "[/x]: step 40" in text and "STRAGGLER (compute)" in text and "40 of 100" in text and "…" not in text
    assert ("COMPUTE" in text) == (width == 140)
