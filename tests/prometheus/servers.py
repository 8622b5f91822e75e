"""A real Prometheus and a real node exporter for tests, on free ports of the loopback interface."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.processes import ROOT, free_port, poll, require, started

OBSERVABILITY = ROOT / "deploy/observability"
RULES = OBSERVABILITY / "prometheus/rules.yaml"


def needs(*programs: str) -> None:
    """Skips where a program is missing; in CI that is a failure."""
    missing = [program for program in programs if shutil.which(program) is None]
    require(not missing, f"{', '.join(missing)} not installed")


class Prometheus:
    """A server's HTTP interface."""

    def __init__(self, port: int, folder: Path) -> None:
        self.url, self.folder = f"http://127.0.0.1:{port}", folder
        self.targets, self.runs = folder / "targets", folder / "runs"
        self.began = time.time()

    def free_ports(self) -> int:
        """Returns the first of two free ports that follow each other."""
        while True:
            port = free_port()
            with contextlib.suppress(OSError), socket.socket() as next_one:
                next_one.bind(("127.0.0.1", port + 1))
                return port

    def scrape(self, run_dir: Path, ports: list[int]) -> None:
        """Has the ranks on these ports scraped, and the textfiles of their run."""
        target = [{"targets": [f"127.0.0.1:{port}" for port in ports]}]
        (self.targets / f"{run_dir.name}.yaml").write_text(json.dumps(target))
        if not (self.runs / run_dir.name).exists():
            (self.runs / run_dir.name).symlink_to(run_dir)

    def targets_of(self, run_dir: Path) -> list[str]:
        return json.loads((self.targets / f"{run_dir.name}.yaml").read_text())[0]["targets"]

    def get(self, path: str, **words: Any) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}?{urllib.parse.urlencode(words)}", timeout=60) as answer:
            value = json.load(answer)
        assert value["status"] == "success", value
        return value["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        return self.get("/api/v1/query", query=expression)["result"]

    def value(self, expression: str) -> float | None:
        """Returns the value of a query that gives one series; None if it gives none."""
        series = self.query(expression)
        assert len(series) <= 1, series
        return float(series[0]["value"][1]) if series else None

    def over_time(self, expression: str) -> list[dict[str, Any]]:
        return self.get("/api/v1/query_range", query=expression, start=self.began, end=time.time(), step=1)["result"]

    def firing(self, run: str) -> list[dict[str, str]]:
        """The labels of the alerts that fire for a run."""
        alerts = self.get("/api/v1/alerts")["alerts"]
        return [item["labels"] for item in alerts if item["state"] == "firing" and item["labels"].get("run") == run]


def quickened(rules: str) -> str:
    """The rules with windows and waits for a run of seconds."""
    quick_rules = rules.replace("[2m]", "[10s]").replace("for: 3m", "for: 3s").replace("for: 5m", "for: 3s")
    assert quick_rules.count("[10s]") >= 6 and quick_rules.count("for: 3s") == 2
    return quick_rules


@contextlib.contextmanager
def prometheus(folder: Path) -> Iterator[Prometheus]:
    """Scrapes what stands in `targets` and, through a node exporter, the textfiles of `runs`, once a second."""
    needs("prometheus", "prometheus-node-exporter")
    exporter, port = free_port(), free_port()
    server = Prometheus(port, folder)
    for path in (server.targets, server.runs):
        path.mkdir()
    (folder / "rules.yaml").write_text(quickened(RULES.read_text()))
    config = yaml.safe_load((OBSERVABILITY / "prometheus/slurm.yaml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["file_sd_configs"][0]["refresh_interval"] = "1s"
    config["scrape_configs"].append(
        {"job_name": "textfile", "static_configs": [{"targets": [f"127.0.0.1:{exporter}"]}]}
    )
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with (
        started([
            "prometheus-node-exporter", "--collector.disable-defaults", "--collector.textfile",
            f"--collector.textfile.directory={server.runs}/*/metrics", f"--web.listen-address=127.0.0.1:{exporter}",
        ], env={"PATH": os.environ["PATH"]}) as _,
        started([
            "prometheus", f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
        ], env={"PATH": os.environ["PATH"]}) as process,
    ):  # fmt: skip

        def ready() -> bool:
            assert process.poll() is None, process.stdout and process.stdout.read()
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.url}/-/ready", timeout=5) as answer:
                return answer.status == 200
            return False

        poll(ready, 240, "Prometheus")
        yield server
