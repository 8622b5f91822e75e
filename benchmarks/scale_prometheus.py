"""What 1,024 ranks cost a real Prometheus: python -m benchmarks.scale_prometheus [--ranks 1024] [--seconds 60]

One server here stands for all ranks, each a target with its own path. Memory, series and the seconds that each rule takes
are Prometheus' own figures, read from its API; so is the share of a core that it needs.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from benchmarks import large_run
from lockstep.training import contract

RULES = Path(__file__).parents[1] / "deploy/observability/prometheus/rules.yaml"


class Ranks(http.server.ThreadingHTTPServer):
    """Answers /rank/N with that rank's metrics, whose counters have gone on since the last time."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, ranks: int, run: str) -> None:
        self.template, self.slow = large_run.metrics_text(0, run), large_run.metrics_text(0, run, slow=True)
        self.ranks, self.began = ranks, time.monotonic()
        super().__init__(("127.0.0.1", 0), _Answer)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing: Prometheus gives up a scrape that is late."""

    def text(self, rank: int) -> bytes:
        """Every step takes 0.1 s, so counters of seconds and of steps grow with the clock."""
        steps = 100 + (time.monotonic() - self.began) * 10
        lines = []
        for line in (self.slow if rank == self.ranks // 2 else self.template).splitlines():
            if line.startswith("#"):
                continue
            name, _, value = line.rpartition(" ")
            if "_total{" in name or "_sum{" in name or "_count{" in name or "_bucket{" in name:
                value = repr(float(value) * steps / 100)
            elif "last_step_timestamp" in name:
                value = repr(time.time())
            lines.append(f"{name} {value}")
        return "\n".join([*lines, ""]).replace('rank="0"', f'rank="{rank}"').encode()


class _Answer(http.server.BaseHTTPRequestHandler):
    server: Ranks
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = self.server.text(int(self.path.rpartition("/")[2]))
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def configuration(ranks: Ranks, rules: Path, interval: int) -> dict[str, Any]:
    address = f"127.0.0.1:{ranks.server_port}"
    groups = [
        {"targets": [address], "labels": {"__metrics_path__": f"/rank/{rank}", "instance": f"rank-{rank}"}}
        for rank in range(ranks.ranks)
    ]
    return {
        "global": {"scrape_interval": f"{interval}s", "evaluation_interval": f"{interval}s"},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "lockstep", "static_configs": groups}],
    }


def measure(ranks: int, seconds: float, interval: int, rules: Path = RULES) -> dict[str, Any]:
    """Prometheus' own figures after so many seconds of scraping `ranks` ranks."""
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        server = Ranks(ranks, "large")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration(server, rules, interval)))
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                ["prometheus", f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'tsdb'}",
                 f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"], stdout=log, stderr=log,
            )  # fmt: skip
        try:
            time.sleep(seconds)
            return _figures(f"http://127.0.0.1:{port}", process.pid)
        finally:
            process.terminate()
            process.wait(30)
            server.shutdown()
            server.server_close()


def _figures(url: str, pid: int) -> dict[str, Any]:
    rules = {}
    for group in _get(url, "/api/v1/rules")["groups"]:
        for rule in group["rules"]:
            cause = rule.get("labels", {}).get("cause", "")
            name = f"{rule['name']}{f' ({cause})' if cause else ''}"
            rules[name] = {"seconds": rule["evaluationTime"], "health": rule["health"]}
    ticks = os.sysconf("SC_CLK_TCK")
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = Path(f"/proc/{pid}/status").read_text()
    return {
        "series": _get(url, "/api/v1/status/tsdb")["headStats"]["numSeries"],
        "up": _value(url, "sum(up)"),
        "resident_bytes": int(status.partition("VmRSS:")[2].split()[0]) << 10,
        "cpu_seconds": (int(fields[11]) + int(fields[12])) / ticks,
        "rules": rules, "rules_seconds": sum(rule["seconds"] for rule in rules.values()),
        "stragglers": [item["metric"]["rank"] for item in _query(url, "run_rank:training_straggler:sync_wait")],
    }  # fmt: skip


def _get(url: str, path: str, **words: str) -> Any:
    with urllib.request.urlopen(f"{url}{path}?{urllib.parse.urlencode(words)}", timeout=60) as answer:
        return json.load(answer)["data"]


def _query(url: str, expression: str) -> list[dict[str, Any]]:
    return list(_get(url, "/api/v1/query", query=expression)["result"])


def _value(url: str, expression: str) -> float | None:
    found = _query(url, expression)
    return float(found[0]["value"][1]) if found else None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--interval", type=int, default=15, help="seconds between two scrapes of a rank")
    args = parser.parse_args()
    found = measure(args.ranks, args.seconds, args.interval)
    for name, rule in sorted(found.pop("rules").items(), key=lambda item: -item[1]["seconds"]):
        print(f"{rule['seconds'] * 1e3:8.2f} ms  {rule['health']:7}  {name}")
    print(json.dumps(found))
    assert contract.METRICS and found["up"] == args.ranks, "not all ranks were scraped"


if __name__ == "__main__":
    sys.exit(main())
