"""make smoke: trains in containers, and checks the accuracy and every rank's metrics; leaves nothing behind.

    python docker/smoke.py --image lockstep:cpu --nodes 2 --ranks 2

Standard library only. Exit codes: 0 all checks passed, 1 one did not, 2 wrong usage or no engine.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

HERE = Path(__file__).parent
RECIPE = "smoke"
LEAST, STARTS = 600, 150
"""Seconds that the nodes have at least, and how many starts of a container they may take where each rank has a core."""
EVERY = 20
"""Seconds between two lines that say what it waits for."""


class Failed(Exception):
    """One line for the person who ran it."""


class Smoke:
    """A job as `lockstep render compose` prints it, and a Prometheus, in one Compose project; `down` removes all of it."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.file = args, folder / "job.yaml"
        self.name = f"smoke-{os.getpid()}"
        self.project = f"lockstep-{self.name}"
        self.env = {
            **os.environ, "PROMETHEUS_CONFIG": str(folder / "prometheus.yml"), "PROMETHEUS_PORT": "0",
            "PROMETHEUS_IMAGE": args.prometheus_image, "LOCKSTEP_SECRET": secrets.token_hex(32),
        }  # fmt: skip

    def up(self) -> None:
        """The image renders the job: here there need not be any package."""
        args = self.args
        settings = [f"ranks_per_node={args.ranks}", f"run_dir=/runs/{RECIPE}", "grace_seconds=20"]
        settings += [f"overrides.{one}" for one in ("threads=1", *args.set.split())]
        words = ["--name", self.name, "--recipe", RECIPE, "--image", args.image, "--nodes", str(args.nodes)]
        words += [f"--set={one}" for one in settings]
        python = ("run", "--rm", "--network", "none", "--entrypoint", "python", args.image)
        began = time.monotonic()
        rendered = self.docker(*python, "-m", "lockstep", "render", "compose", *words)
        if args.timeout is None:
            args.timeout = self.measured(time.monotonic() - began)
        self.docker("volume", "create", f"{self.project}-runs")  # as `lockstep submit` does
        self.file.write_bytes(rendered)
        self.compose("up", "--detach", "--no-build")

    def measured(self, seconds: float) -> float:
        """Seconds to wait for the nodes, where a container that starts Python has taken so many."""
        cores = int(self.docker("info", "--format", "{{.NCPU}}"))
        ranks = self.args.nodes * self.args.ranks
        timeout = max(LEAST, STARTS * seconds * max(1, ranks / cores))
        tell(
            f"a container starts in {seconds:.1f} s, and {ranks} ranks share {cores} cores: the nodes have {timeout:.0f} s"
        )
        return timeout

    def docker(self, *words: str, timeout: float = 120) -> bytes:
        try:
            done = subprocess.run(["docker", *words], env=self.env, capture_output=True, timeout=timeout)
        except FileNotFoundError:
            raise Failed("docker is not installed: install Docker with its compose plugin") from None
        except subprocess.TimeoutExpired:
            raise Failed(f"docker {words[0]} did not answer within {timeout:g} s") from None
        if done.returncode:
            lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
            raise Failed(f"docker {words[0]}: {lines[-1]}")
        return done.stdout

    def compose(self, *words: str, timeout: float = 300) -> bytes:
        files = ("--project-directory", str(HERE), "-f", str(self.file), "-f", str(HERE / "monitoring.yaml"))
        return self.docker("compose", *files, "--progress", "quiet", *words, timeout=timeout)

    def nodes(self) -> list[dict[str, Any]]:
        ids = self.docker("ps", "--all", "--quiet", "--filter", f"label=lockstep/job={self.name}").decode().split()
        return json.loads(self.docker("inspect", *ids)) if ids else []

    def wait(self) -> list[dict[str, Any]]:
        """The nodes once they have ended."""
        began = printed = time.monotonic()
        while True:
            nodes = self.nodes()
            states = {node["Name"].lstrip("/"): node["State"]["Status"] for node in nodes}
            waiting = [
                f"{name} ({state})" for name, state in states.items() if state in ("created", "running", "restarting")
            ]
            if not waiting:
                return nodes
            now = time.monotonic()
            if now - began > self.args.timeout:
                raise Failed(
                    f"{' and '.join(waiting)} did not end within {self.args.timeout:g} s: read `docker logs`, or give more time "
                    "with make smoke TIMEOUT=SECONDS"
                )
            if now - printed >= EVERY:
                printed = now
                tell(f"waits for {', '.join(waiting)}: {now - began:.0f} of {self.args.timeout:.0f} s")
            time.sleep(1.5)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """What Prometheus answers: a series each, with `metric` and `value`."""
        address = self.compose("port", "prometheus", "9090").decode().strip()
        url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(url, timeout=10) as answer:
                return json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            raise Failed(f"Prometheus refuses {expression}: {error.read().decode(errors='replace')[:200]}") from None
        except (OSError, ValueError, KeyError) as error:
            raise Failed(f"Prometheus does not answer at {address}: {error}") from None

    def down(self) -> None:
        if self.file.exists():
            self.compose("down", "--volumes", "--remove-orphans", "--timeout", "5")
        self.docker("volume", "rm", "--force", f"{self.project}-runs")
        own = f"label=com.docker.compose.project={self.project}"
        for kind, words in {
            "container": ("ps", "--all"),
            "volume": ("volume", "ls"),
            "network": ("network", "ls"),
        }.items():
            if left := self.docker(*words, "--quiet", "--filter", own).split():
                raise Failed(f"{len(left)} {kind}s of {self.project} are still there")


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def configuration(ranks: int) -> str:
    """Prometheus' settings with one line a local rank, for a short run."""
    lines = []
    settings = (HERE.parent / "deploy/observability/prometheus/compose.yaml").read_text()
    for line in re.sub("[0-9]+s", "1s", settings).splitlines():
        match = re.search(r"port: (\d+)", line)
        if match and int(match[1]) == 9470:
            lines += [line.split(" #")[0].replace("9470", str(9470 + rank)) for rank in range(ranks)]
        elif not match:
            lines.append(line)
    return "\n".join(lines) + "\n"


def check(smoke: Smoke) -> list[tuple[str, str, bool]]:
    """(what, found, whether it is right). Raises `Failed` where there is nothing to check."""
    args = smoke.args
    world = args.nodes * args.ranks
    began = time.monotonic()
    smoke.up()
    nodes = smoke.wait()
    took = time.monotonic() - began
    codes = [node["State"]["ExitCode"] for node in nodes]
    rows = [("exit codes of the nodes", " ".join(map(str, codes)), codes == [0] * args.nodes)]
    if any(codes):
        return rows
    run = f"{nodes[0]['Id']}:/runs/{RECIPE}"
    with tarfile.open(fileobj=io.BytesIO(smoke.docker("cp", f"{run}/summary.json", "-"))) as archive:
        summary = json.load(archive.extractfile("summary.json") or io.BytesIO(b"{}"))
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        smoke.docker("cp", run, str(args.out))
    accuracy = float(summary["accuracy"])
    rows += [
        ("ranks that trained", f"{summary['world_size']} in {args.nodes} containers", summary["world_size"] == world),
        ("accuracy", f"{accuracy:.4f} (at least {args.accuracy})", accuracy >= args.accuracy),
        ("images a second", f"{summary['images_per_second']:.0f}", True),
    ]
    # The ranks are gone, so Prometheus is asked for what it saw while they ran.
    span = f"[{int(took) + 60}s]"
    up = smoke.query(f'sum by (instance) (max_over_time(up{{job="lockstep"}}{span}))')
    seen = sum(float(series["value"][1]) >= 1 for series in up)
    rows.append(("targets that Prometheus scraped", str(seen), seen == world))
    for name in ("training_step", "training_samples_total"):
        found = {series["metric"]["rank"]: float(series["value"][1])
                 for series in smoke.query(f"max by (rank) (max_over_time({name}{span}))")}  # fmt: skip
        shown = " ".join(f"{rank}:{value:g}" for rank, value in sorted(found.items(), key=lambda item: int(item[0])))
        rows.append(
            (f"{name} by rank", shown or "nothing", len(found) == world and all(value > 0 for value in found.values()))
        )
    rows.append(("seconds from up to the end", f"{took:.1f}", True))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="Trains the smoke recipe in containers and checks what came of it.")
    parser.add_argument("--image", default="lockstep:cpu")
    parser.add_argument("--prometheus-image", default=os.environ.get("PROMETHEUS_IMAGE") or "prom/prometheus:v3.5.0")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="ranks a node")
    parser.add_argument("--accuracy", type=float, default=0.98, help="the least that is right")
    parser.add_argument("--set", default="", help="more settings of the recipe: NAME=VALUE …")
    parser.add_argument("--timeout", type=float, help=f"seconds for the training; else measured, at least {LEAST}")
    parser.add_argument("--out", type=Path, help="copy the run directory there")
    args = parser.parse_args()
    if not (1 <= args.nodes <= 16 and 1 <= args.ranks <= 16):
        parser.error("--nodes and --ranks must be 1 … 16")
    if args.timeout is not None and not args.timeout > 0:
        parser.error(f"--timeout must be above 0 seconds, got {args.timeout:g}")

    def stop(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
        raise Failed(f"stopped by {signal.Signals(number).name}")

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    with tempfile.TemporaryDirectory(prefix="lockstep-smoke-") as folder:
        config = Path(folder) / "prometheus.yml"
        config.write_text(configuration(args.ranks))
        Path(folder).chmod(0o755)
        config.chmod(0o644)
        smoke = Smoke(args, Path(folder))
        rows: list[tuple[str, str, bool]] = []
        error = ""
        try:
            smoke.docker("image", "inspect", args.image)
            rows = check(smoke)
            if not all(right for *_, right in rows):
                print(smoke.compose("logs", "--no-color", "--tail", "40").decode(errors="replace"), file=sys.stderr)
        except Failed as problem:
            error = str(problem)
        finally:
            try:
                smoke.down()
                rows += [("left behind", "nothing", True)] if rows else []
            except Failed as problem:
                error = error or str(problem)
    width = max((len(what) for what, *_ in rows), default=0)
    for what, found, right in rows:
        print(f"{'ok ' if right else 'NOT'}  {what.ljust(width)}  {found}")
    if error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if rows else 2
    return 0 if rows and all(right for *_, right in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
