"""`lockstep top`: who is called a straggler, what is read and believed, and what is shown."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import product
from tests.jobs import helpers
from tests.processes import PYTHON, require
from tests.terminal import SIZE, at_a_terminal, until_shown

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
training_last_step_timestamp_seconds{{rank="{rank}",run="{run}"}} {spent}
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


def straggling(folder: Path, **more: object) -> dict[str, Any]:
    """Writes the status of a run that says so of this rank."""
    said = {"rank": 1, "phase": "data", "share": 0.11, **more}
    (folder / "status.json").write_text(json.dumps({"code": None, "slow_rank": said}))
    return said


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
def test_the_straggler_that_rank_0_has_found_is_named_with_its_cost(tmp_path: Path) -> None:
    told = straggling(run_of(tmp_path, *SLOW))
    assert [rank["straggler"] for rank in top(tmp_path)] == [None, told]
    table = helpers.top(tmp_path, str(tmp_path), "--once", "--every", "0.2").stdout
    assert "STRAGGLER (data)" in table
    assert "rank 1, in data: costs 11 % of every step" in table


@pytest.mark.parametrize(
    "damage",
    [{"rank": "1"}, {"rank": -1}, {"rank": True}, {"share": 1e300}, {"share": None}, {"share": [1]}, {"phase": 7}],
)
def test_a_damaged_word_of_a_straggler_is_none(tmp_path: Path, damage: dict[str, Any]) -> None:
    straggling(run_of(tmp_path, *SLOW), **damage)
    assert [rank["straggler"] for rank in top(tmp_path)] == [None, None]
    (tmp_path / "status.json").write_text('{"slow_rank": ')
    assert [rank["straggler"] for rank in top(tmp_path)] == [None, None]


def test_what_was_before_does_not_blur_the_picture(tmp_path: Path) -> None:
    """1000 even steps, then 40 in which one rank is slow."""
    run_of(tmp_path, *SLOW)
    even = (1000, (0.0, 0.6, 0.3))
    with contextlib.ExitStack() as servers:
        for rank, shares in enumerate(SLOW):
            answers = [text(rank, even), text(rank, even, (40, shares))]
            endpoint(tmp_path, rank, "127.0.0.1", servers.enter_context(serving(*answers)))
        ranks = top(tmp_path)
    assert [(rank["source"], rank["step"]) for rank in ranks] == [("live", 1040), ("live", 1040)]
    assert ranks[0]["sync_wait"] == pytest.approx(0.875) and ranks[0]["step_seconds"] == pytest.approx(0.1)
    assert ranks[0]["images_per_second"] == pytest.approx(160)  # from step to step, whenever the two were read


def test_textfiles_do_where_no_rank_answers(tmp_path: Path) -> None:
    run_of(tmp_path, *SLOW)
    endpoint(tmp_path, 0, "127.0.0.1", 1)
    (tmp_path / "endpoints/rank-00001.json").write_text("half of it")
    (tmp_path / "metrics/rank-00002.prom").write_bytes(b"\xff\xfe not text")
    (tmp_path / "metrics/rank-x.prom").write_text("")
    ranks = top(tmp_path)
    assert [(rank["rank"], rank["source"]) for rank in ranks] == [(0, "textfile"), (1, "textfile")]
    assert (ranks[0]["step"], ranks[0]["sync_wait"], ranks[0]["images_per_second"]) == (40, 0.875, 160)
    table = helpers.top(tmp_path, str(tmp_path), "--once", "--every", "0.2").stdout
    assert "ssss" in table


def test_at_a_terminal_it_fits_and_a_hostile_name_moves_no_cursor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = run_of(Path("x\x1b[2J[/x]"), *[SLOW[0]] * 90, SLOW[1])
    straggling(run, rank=90, phase="d\x1b[2Jata")
    with at_a_terminal([PYTHON, "-c", product.PROGRAM, "top", str(run), "--every", "0.2"]) as (process, ours, _):
        shown = until_shown(ours, b"more ranks", 60)
        process.kill()
    assert b"x\x1b[2J" not in shown and b"d\x1b[2J" not in shown and b"[/x]" in shown and b"STRAGGLER" in shown, shown
    assert shown.count(b"\r\n") < SIZE[0]


def test_a_title_that_is_too_long_loses_the_beginning_of_the_path(tmp_path: Path) -> None:
    run = run_of(tmp_path / "a-folder-with-a-long-name" / "and-another-one" / "run", *SLOW)
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    with at_a_terminal([PYTHON, "-c", product.PROGRAM, "top", str(run), "--every", "0.2"], env) as (process, ours, _):
        shown = until_shown(ours, b"the rest", 60).decode()
        process.kill()
    titles = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in shown.split("\r\n") if "samples/s" in line]
    assert titles and len(titles[0]) == SIZE[1] and re.fullmatch("….*/run: step 40 of 100, .*samples/s", titles[0]), (
        titles
    )


SERVER = """
import http.server, os, sys
import encodings.idna, socketserver  # what a bind imports, while they can be read
os.setuid(int(sys.argv[3]))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Lockstep-Rank", sys.argv[1])
        self.end_headers()
        self.wfile.write(sys.argv[2].encode())
    def log_message(self, *words):
        pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""
NOBODY = 65534


@pytest.mark.promise("other-users")
@pytest.mark.parametrize(
    ("rank_id", "user", "source"),
    [("ours", None, "live"), ("that of another run of the name", None, "textfile"), ("ours", NOBODY, "textfile")],
)
def test_only_the_rank_itself_is_believed(tmp_path: Path, rank_id: str, user: int | None, source: str) -> None:
    """`top` believes an endpoint that has the rank's id and user. Else another program may have the port, and `top` shows the textfile."""
    require(user is None or os.geteuid() == 0, "needs root, to act as another user")
    run_of(tmp_path, SLOW[0])
    user = os.geteuid() if user is None else user
    words = [sys.executable, "-c", SERVER, rank_id, text(0, (777, SLOW[0])), str(user)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            where = {"host": "127.0.0.1", "port": int(process.stdout.readline()), "pid": 1, "id": "ours"}
            (tmp_path / "endpoints/rank-00000.json").write_text(json.dumps(where))
            (rank,) = top(tmp_path)
        finally:
            process.kill()
    assert (rank["source"], rank["step"]) == (source, 777 if source == "live" else 40), rank


def test_an_endpoint_that_is_none_or_anothers_leaves_the_textfile(tmp_path: Path) -> None:
    """Another run, or another rank, may serve on the port of one that was killed."""
    with serving("SSH-2.0") as no_metrics, serving(text(2, (777, SLOW[0]), run="y")) as run:
        places: list[tuple[object, object]] = [
            ("127.0.0.1", no_metrics), ("127.0.0.1", run), ("x\n", 80), ("." * 80, 80), ("127.0.0.1", 0), ("127.0.0.1", 99999),
            ([], 80), ("127.0.0.1", 1e300),
        ]  # fmt: skip
        run_of(tmp_path, *[SLOW[0]] * len(places))
        for number, place in enumerate(places):
            endpoint(tmp_path, number, *place)
        found = top(tmp_path)
    assert [(rank["source"], rank["step"]) for rank in found] == [("textfile", 40)] * len(places)


@pytest.mark.promise("growth")
def test_of_a_thousand_ranks_the_straggler_is_found(tmp_path: Path) -> None:
    straggling(run_of(tmp_path, *[SLOW[0]] * 700, SLOW[1], *[SLOW[0]] * 323), rank=700)
    ranks = top(tmp_path)
    assert len(ranks) == 1024 and [rank["rank"] for rank in ranks if rank["straggler"]] == [700]
