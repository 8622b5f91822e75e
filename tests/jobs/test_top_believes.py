"""`lockstep top` after a rank was killed: its endpoint file stays, and somebody else may have its port."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import require

NOBODY = 65534
METRICS = """\
training_step{{rank="0",run="run"}} {step}
training_step_duration_seconds_count{{rank="0",run="run"}} {step}
training_step_duration_seconds_sum{{rank="0",run="run"}} 4
"""
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


@contextlib.contextmanager
def _served(rank_id: str, user: int | None) -> Iterator[int]:
    """The port of somebody who says that he is the rank, 777 steps further."""
    words = [
        sys.executable,
        "-c",
        SERVER,
        rank_id,
        METRICS.format(step=777),
        str(os.geteuid() if user is None else user),
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.promise("other-users")
@pytest.mark.parametrize(
    ("rank_id", "user", "source"),
    [("ours", None, "live"), ("that of another run of the name", None, "textfile"), ("ours", NOBODY, "textfile")],
)
def test_only_the_rank_itself_is_believed(tmp_path: Path, rank_id: str, user: int | None, source: str) -> None:
    require(user is None or os.geteuid() == 0, "needs root, to act as another user")
    folder = tmp_path / "run"
    for name in ("metrics", "endpoints"):
        (folder / name).mkdir(parents=True)
    (folder / "run.yaml").write_text("config: {recipe: x}\n")
    (folder / "metrics/rank-00000.prom").write_text(METRICS.format(step=40))
    with _served(rank_id, user) as port:
        where = {"host": "127.0.0.1", "port": port, "pid": 1, "id": "ours"}
        (folder / "endpoints/rank-00000.json").write_text(json.dumps(where))
        program = "import sys; sys.argv[0] = 'lockstep'; from lockstep.jobs.cli.main import main; main()"
        words = [sys.executable, "-c", program, "top", str(folder), "--json", "--every", "0.2"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    (rank,) = json.loads(done.stdout)
    assert (rank["source"], rank["step"]) == (source, 777 if source == "live" else 40), done
