"""`lockstep top`: who is called a straggler, what is read, and what is shown."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import helpers

TEXT = """# HELP training_step Steps.
# TYPE training_step gauge
training_step{{rank="{rank}",run="{run}"}} {steps}
training_steps_planned{{rank="{rank}",run="{run}"}} 100
training_samples_total{{rank="{rank}",run="{run}"}} {samples}
training_step_duration_seconds_bucket{{le="0.1",rank="{rank}",run="{run}"}} 3
training_step_duration_seconds_sum{{rank="{rank}",run="{run}"}} {spent}
training_step_duration_seconds_count{{rank="{rank}",run="{run}"}} {steps}
training_data_wait_seconds_sum{{rank="{rank}",run="{run}"}} {data}
training_grad_ready_seconds_sum{{rank="{rank}",run="{run}"}} {compute}
training_sync_wait_seconds_sum{{rank="{rank}",run="{run}"}} {sync}
training_loss{{rank="{rank}",run="{run}"}} NaN
training_finished{{rank="{rank}",run="{run}"}} 0
"""
Shares = tuple[float, float, float]
SLOW: list[Shares] = [(0.0, 0.1, 0.875), (0.025, 0.925, 0.025)]
"""Of two ranks, of a step's time: data, computing, waiting for the others."""


def text(rank: int, *parts: tuple[int, Shares], run: str = "x") -> str:
    """Metrics after some steps of 0.1 s with shares of it, and after more of them."""
    steps = sum(number for number, _ in parts)
    sums = [sum(number * 0.1 * shares[at] for number, shares in parts) for at in range(3)]
    names = dict(zip(("data", "compute", "sync"), sums))
    return TEXT.format(rank=rank, run=run, steps=steps, samples=16 * steps, spent=0.1 * steps, **names)


def run_of(folder: Path, *ranks: Shares) -> Path:
    """A run directory of ranks that serve nothing, after 40 steps."""
    for name in ("metrics", "endpoints"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text("config: {}\n")
    for rank, shares in enumerate(ranks):
        (folder / f"metrics/rank-{rank:05d}.prom").write_text(text(rank, (40, shares)))
    return folder


def endpoint(folder: Path, rank: int, host: object, port: object) -> None:
    (folder / f"endpoints/rank-{rank:05d}.json").write_text(json.dumps({"host": host, "port": port, "pid": 1}))


def top(folder: Path) -> list[dict[str, Any]]:
    done = helpers.top(folder, str(folder), "--json", "--every", "0.2")
    assert (done.returncode, done.stderr) == (0, ""), done
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@contextlib.contextmanager
def serving(*answers: str) -> Iterator[int]:
    """The port of a rank that gives these answers, one after the other, the last again and again."""
    left = list(answers)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write((left.pop(0) if len(left) > 1 else left[0]).encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.mark.promise("alerts")
@pytest.mark.parametrize(
    ("ranks", "stragglers"),
    [
        ([(0.0, 0.05, 0.94), (0.0, 0.9, 0.08)], [None, "compute"]), ([(0.0, 0.05, 0.94), (0.8, 0.1, 0.08)], [None, "data"]),
        ([(0, 0.6, 0.35), (0, 0.7, 0.3), (0, 0.96, 0.03), (0, 0.6, 0.4)], [None, None, "compute", None]),
        # All wait alike, hardly at all, or there is nobody to wait for.
        ([(0, 0.5, 0.45), (0, 0.7, 0.25)], [None, None]), ([(0, 0.8, 0.15), (0, 0.95, 0.01)], [None, None]), ([(0, 0.99, 0.0)], [None]),
    ],
)  # fmt: skip
def test_the_straggler_waits_least_while_the_others_wait(
    tmp_path: Path, ranks: list[Shares], stragglers: list[str | None]
) -> None:
    assert [rank["straggler"] for rank in top(run_of(tmp_path, *ranks))] == stragglers


def test_what_was_before_does_not_blur_the_picture(tmp_path: Path) -> None:
    """1000 even steps, then 40 in which one rank is slow."""
    run_of(tmp_path, *SLOW)
    even = (1000, (0.0, 0.6, 0.3))
    with contextlib.ExitStack() as servers:
        for rank, shares in enumerate(SLOW):
            answers = [text(rank, even), text(rank, even, (40, shares))]
            endpoint(tmp_path, rank, "127.0.0.1", servers.enter_context(serving(*answers)))
        ranks = top(tmp_path)
    assert [(rank["source"], rank["step"], rank["straggler"]) for rank in ranks] == [
        ("live", 1040, None),
        ("live", 1040, "compute"),
    ]
    assert ranks[0]["sync_wait"] == pytest.approx(0.875) and ranks[0]["step_seconds"] == pytest.approx(0.1)


def test_textfiles_do_where_no_rank_answers(tmp_path: Path) -> None:
    run_of(tmp_path, *SLOW)
    endpoint(tmp_path, 0, "127.0.0.1", 1)
    (tmp_path / "endpoints/rank-00001.json").write_text("half of it")
    (tmp_path / "metrics/rank-00002.prom").write_bytes(b"\xff\xfe not text")
    (tmp_path / "metrics/rank-x.prom").write_text("")
    ranks = top(tmp_path)
    told = [(rank["rank"], rank["source"], rank["straggler"]) for rank in ranks]
    assert told == [(0, "textfile", None), (1, "textfile", "compute")]
    assert (ranks[0]["step"], ranks[0]["sync_wait"], ranks[0]["images_per_second"]) == (40, 0.875, 160)
    table = helpers.top(tmp_path, str(tmp_path), "--once", "--every", "0.2").stdout
    assert "STRAGGLER (compute)" in table and "ssss" in table


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('step{rank="0",run="x"} 40', 'step{rank="0",run="x"} NaN'), ('planned{rank="0",run="x"} 100', 'planned{rank="0",run="x"} +Inf'),
        ('seconds_sum{rank="0",run="x"} 4.0', 'seconds_sum{rank="0",run="x"} 1e-308'),
        ('count{rank="0",run="x"} 40', 'count{rank="0",run="x"} -Inf'), ('sum{rank="0",run="x"} 3.5', 'sum{rank="0",run="x"} 1e308'),
        ("finished", 'exit_code{rank="0",run="x"} +Inf\ntraining_finished{rank="0",run="x"} 1\ntraining_other'),
    ],
)  # fmt: skip
def test_numbers_that_are_none_are_left_out(tmp_path: Path, old: str, new: str) -> None:
    file = run_of(tmp_path, *SLOW) / "metrics/rank-00000.prom"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    assert [rank["step"] for rank in top(tmp_path)][1:] == [40]
    done = helpers.top(tmp_path, str(tmp_path), "--once", "--every", "0.2")
    assert done.returncode == 0 and "40" in done.stdout, done


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


def test_an_endpoint_that_is_none_or_anothers_leaves_the_textfile(tmp_path: Path) -> None:
    """Another run, or another rank, may serve on the port of one that was killed."""
    ssh, port = _answers(b"SSH-2.0-OpenSSH\r\n")
    ill, busy = _answers(b"HTTP/1.0 503 Unavailable\r\n\r\n")
    with ssh, ill, serving(text(2, (777, SLOW[0]), run="y")) as run, serving(text(9, (777, SLOW[0]))) as rank:
        places: list[tuple[object, object]] = [
            ("127.0.0.1", port), ("127.0.0.1", busy), ("127.0.0.1", run), ("127.0.0.1", rank), ("a b", 80), ("x\n", 80), ("", 80),
            ("." * 80, 80), ("127.0.0.1", 0), ("127.0.0.1", 99999), ("127.0.0.1", -1), ([], 80), ("127.0.0.1", 1e300),
        ]  # fmt: skip
        run_of(tmp_path, *[SLOW[0]] * len(places))
        for number, place in enumerate(places):
            endpoint(tmp_path, number, *place)
        found = top(tmp_path)
    assert [(rank["source"], rank["step"]) for rank in found] == [("textfile", 40)] * len(places)


def test_what_is_no_run(tmp_path: Path) -> None:
    def told() -> subprocess.CompletedProcess[str]:
        done = helpers.top(tmp_path, str(tmp_path))
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
        return done

    assert "does not hold a run" in told().stderr
    (tmp_path / "run.yaml").write_text("")
    assert "has no metrics yet" in told().stderr


@pytest.mark.promise("growth")
def test_of_a_thousand_ranks_the_straggler_is_found_in_seconds(tmp_path: Path) -> None:
    run_of(tmp_path, *[SLOW[0]] * 700, SLOW[1], *[SLOW[0]] * 323)
    began = time.process_time()
    ranks = top(tmp_path)
    assert time.process_time() - began < 6, "two readings, of a thousand small files each"
    assert len(ranks) == 1024 and [rank["rank"] for rank in ranks if rank["straggler"]] == [700]
