"""python benchmarks/survivors.py [--rounds 5] [--torchft PYTHON] [--nvrx PYTHON]

Seconds from SIGKILL of a rank to the next step that is finished: one job, four ranks of this machine on gloo, two kills a run, at random
moments, of random ranks, rank 0 too. `live` is `launch --live`, `restart` is `launch --max-restarts`, `torchrun` its restart of the same
script. torchft (pip install torchft-nightly) and NVRx (nvidia-resiliency-ext) need the Python of an environment that has them.
`live` has three runs a round, the others one. A step is finished when all ranks of its group are through with it.

*full rate*: the end of the first of five steps whose median time is within 1.5 × that of the second half of the steps before the next kill.
*again*: finished steps that were taken once more. *lost*, *repeated*: samples of the epoch that went into no step, or into several; none
where the weights have the bits of the undisturbed run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from torch.distributed import TCPStore

from benchmarks.measure import Figure, Run, figure, options
from benchmarks.survivors_peers.job import BATCH, RANKS, STEPS
from lockstep.training.contract import user_errors

ROOT = Path(__file__).parents[1]
JOBS = ROOT / "benchmarks/survivors_peers"
KILLS = ((0.2, 0.35), (0.6, 0.75))
"""Shares of a run's steps between which each kill is drawn."""
LIVE_RUNS = 3
"""Of `live` in each round."""
LIGHTHOUSE = ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
"""As in torchft's README; by default, a replica is dead after 5 s without a heartbeat."""
Line = dict[str, Any]
Processes = list[subprocess.Popen[bytes]]
Start = Callable[[Path, dict[str, str]], Processes]
"""(folder, environment) → the processes of a run."""


@dataclass
class Kill:
    t: float
    """Seconds of the monotonic clock, which is one for all processes."""
    pid: int
    rank: int
    """Its number at the start."""
    size: int
    """Ranks before."""
    spoke: set[int]
    """Processes that had told anything."""


@dataclass
class Told:
    """What the job's processes have told so far."""

    folder: Path
    lines: list[Line] = field(default_factory=list)
    _read: dict[Path, int] = field(default_factory=dict)

    def look(self) -> None:
        for path in self.folder.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                found = file.read().rpartition(b"\n")[0]
            if found:
                self._read[path] = self._read.get(path, 0) + len(found) + 1
                self.lines += [{**json.loads(line), "pid": int(path.stem)} for line in found.splitlines()]

    def of(self, what: str) -> list[Line]:
        return [line for line in self.lines if line["what"] == what]


def _popen(command: list[str], folder: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    with (folder / "output").open("ab") as output:
        return subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True, cwd=folder)


def session(launcher: list[str], folder: Path, env: dict[str, str]) -> Processes:
    return [_popen([sys.executable, "-m", *launcher, str(JOBS / "ours.py"), str(folder / "run")], folder, env)]


def ranks(command: list[str], folder: Path, env: dict[str, str]) -> Processes:
    """Without a launcher. The first of `command` is a Python."""
    env = env | {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    return [_popen(command, folder, {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(RANKS)]


def torchft(python: str, folder: Path, env: dict[str, str]) -> Processes:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    _popen([str(Path(python).parent / "torchft_lighthouse"), "--bind", address, *LIGHTHOUSE], folder, env)
    return ranks([python, str(JOBS / "torchft_ddp.py")], folder, {**env, "TORCHFT_LIGHTHOUSE": f"http://{address}"})


@contextlib.contextmanager
def started(start: Start) -> Iterator[tuple[Path, Processes, Told]]:
    """Nothing of it is left, whatever happens."""
    mark = uuid.uuid4().hex
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LOCKSTEP_", "TORCHELASTIC_"))}
    with tempfile.TemporaryDirectory(prefix="lockstep-survivors-") as directory:
        folder = Path(directory)
        (folder / "told").mkdir()
        env |= {
            "SURVIVORS_MARK": mark, "SURVIVORS_TOLD": str(folder / "told"), "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "LOCKSTEP_METRICS_PORT": "0",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        }  # fmt: skip
        processes: Processes = []
        try:
            processes = start(folder, env)
            yield folder, processes, Told(folder / "told")
        finally:
            while left := _living(mark):
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.01)
            for process in processes:
                process.wait()


def _living(mark: str) -> list[int]:
    """Processes of a run, whatever their parents. One that has ended has no environment any more."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"SURVIVORS_MARK={mark}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def trained(start: Start, draw: random.Random | None, quiet: float) -> dict[str, Any]:
    """One run: its kills, or what went wrong.

    Args:
        draw: of the kills; None: there are none.
        quiet: seconds without a word of it after which it has failed.
    """
    with started(start) as (folder, processes, told):
        kills: list[Kill] = []

        def waited(happens: Callable[[], bool]) -> bool:
            """False: it has failed before."""
            heard, since = -1, 0.0
            while not happens():
                if len(told.lines) > heard:
                    heard, since = len(told.lines), time.monotonic()
                if time.monotonic() - since > quiet or all(process.poll() is not None for process in processes):
                    told.look()
                    return happens()
                time.sleep(0.004)
                told.look()
            return True

        def over() -> bool:
            return len(told.of("weights")) >= (told.of("step") or [{"size": RANKS}])[-1]["size"]

        for between in KILLS if draw is not None else ():
            step = draw.randrange(*(round(STEPS * share) for share in between))
            if not waited(lambda step=step: any(line["step"] >= step for line in told.of("step"))):
                break
            time.sleep(draw.uniform(0, 0.05))  # anywhere within a step
            told.look()
            newest = max(told.of("step"), key=lambda line: line["step"])
            there = sorted({line["pid"] for line in told.of("step") if line["step"] >= newest["step"] - 1})
            pid = draw.choice(there)
            rank = next(line["rank"] for line in told.of("begun") if line["pid"] == pid)
            kills.append(Kill(time.monotonic(), pid, rank, newest["size"], {line["pid"] for line in told.lines}))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wanted = len(KILLS) if draw is not None else 0
        went_well = len(kills) == wanted and waited(over)
        weights = {line["sha256"] for line in told.of("weights")}
        following = [*[kill.t for kill in kills[1:]], float("inf")]
        if not went_well or len(weights) != 1:
            said = f"{len(kills)} of {wanted} kills, {len(weights)} weights at the end"
            output = (folder / "output").read_text(errors="replace")
            return {"failed": said, "ranks": [kill.rank for kill in kills], "output": output[-4000:]}
        found = [measured(told.lines, kill, end) for kill, end in zip(kills, following)]
        add_regrouped(found, kills, folder / "run/events.jsonl")
        before = kills[0].t if kills else float("inf")
        times = [*ends([line for line in told.of("step") if line["t"] < before]).values()]
        pace = statistics.median(b - a for a, b in pairwise(times))
        about = {"version": told.of("begun")[0]["version"], "step": pace, **samples(told.of("step"))}
        return {"weights": weights.pop(), "kills": found, **about}


def ends(lines: list[Line]) -> dict[int, float]:
    """Step → when the last rank of its group was through with it. The lines are of steps."""
    found: dict[int, dict[int, float]] = {}
    sizes: dict[int, int] = {}
    for line in lines:
        found.setdefault(line["step"], {})[line["pid"]] = line["t"]
        sizes[line["step"]] = line["size"]
    return {step: max(times.values()) for step, times in sorted(found.items()) if len(times) >= sizes[step]}


def measured(lines: list[Line], kill: Kill, following: float) -> dict[str, Any]:
    """Of one kill, in seconds from it. `following`: when the next one was."""
    steps = [line for line in lines if line["what"] == "step" and line["t"] < following]
    old = [line for line in steps if line["t"] < kill.t or (line["pid"] in kill.spoke and line["size"] == kill.size)]
    new = [line for line in steps if line["t"] > kill.t and line not in old]
    last = max(line["step"] for line in old)
    times = [t for step, t in ends(new).items() if step > last]
    after = [line for line in lines if kill.t < line["t"] < following]
    row: dict[str, Any] = {
        "rank": kill.rank, "ranks": kill.size, "ranks_after": new[-1]["size"] if new else 0,
        "next_step": times[0] - kill.t if times else None, "full_rate": None,
        "again": sum(step <= last for step in ends(new)), "discarded": sum(line["what"] == "discarded" for line in after),
    }  # fmt: skip
    lengths = [b - a for a, b in pairwise(times)]
    if len(lengths) >= 10:
        expected = statistics.median(lengths[len(lengths) // 2 :])
        fast = [i for i in range(len(lengths) - 4) if statistics.median(lengths[i : i + 5]) <= 1.5 * expected]
        row |= {"step": expected, "full_rate": times[fast[0] + 1] - kill.t if fast else None}
    begun = [line for line in after if line["what"] == "begun"]
    told = {
        "started": [line["born"] for line in begun], "imported": [line["t"] for line in begun],
        "ready": [line["t"] for line in after if line["what"] == "ready"],
    }  # fmt: skip
    row["parts"] = {what: max(found) - kill.t for what, found in told.items() if found}
    return row


def add_regrouped(rows: list[dict[str, Any]], kills: list[Kill], events: Path) -> None:
    """The phases of `live`, one after the other: until a rank notices, until the ranks have met, and what is left of the step."""
    told = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
    clocks = time.time() - time.monotonic()
    regrouped = [event for event in told if event["event"] == "regrouped"]
    for event in regrouped[: len(kills)]:
        row, kill = rows[event["generation"] - 1], kills[event["generation"] - 1]
        met = event["time"] - clocks - kill.t
        parts = {"noticed": met - event["seconds"], "met": event["seconds"], "step": (row["next_step"] or 0.0) - met}
        row["parts"] = parts


def samples(steps: list[Line]) -> dict[str, int]:
    """Lost and repeated ones, where the steps tell theirs: what counts is a step's last attempt."""
    newest: dict[int, int] = {}
    for line in steps:
        newest[line["step"]] = max(newest.get(line["step"], 0), line.get("attempt", 0))
    counted = [line for line in steps if line.get("attempt", 0) == newest[line["step"]]]
    used = Counter(sample for line in counted for sample in line.get("ids", ()))
    return {"lost": STEPS * BATCH - len(used), "repeated": sum(used.values()) - len(used)} if used else {}


def contestants(args: argparse.Namespace) -> dict[str, Start]:
    launch = ["lockstep.training", "launch", "--ranks", str(RANKS)]
    elastic = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", "3"]
    found: dict[str, Start] = {
        "live": lambda *a: session([*launch, "--live", "--", sys.executable], *a),
        "restart": lambda *a: session([*launch, "--max-restarts", "3", "--", sys.executable], *a),
        "torchrun": lambda *a: session(elastic, *a),
    }
    if args.torchft:
        found["torchft"] = lambda *a: torchft(args.torchft, *a)
    if args.nvrx:
        job = [args.nvrx, str(JOBS / "nvrx_inprocess.py")]
        found["nvrx"] = lambda folder, env: ranks([*job, str(folder / "kept.pt")], folder, env)
    return {name: start for name, start in found.items() if not args.only or name in args.only}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser, 5)
    parser.add_argument("--torchft", metavar="PYTHON", help="of an environment with torchft-nightly")
    parser.add_argument("--nvrx", metavar="PYTHON", help="of an environment with nvidia-resiliency-ext")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of live, restart, torchrun, torchft, nvrx")
    parser.add_argument("--seed", type=int, default=1, help="of the kills")
    parser.add_argument("--quiet", type=float, default=60, help="seconds without a word: failed (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=60, help="after which no run is begun (default: %(default)s)")
    args = parser.parse_args()
    began = time.monotonic()
    record = Run("survivors", args)
    found = contestants(args)
    undisturbed = {name: trained(start, None, args.quiet) for name, start in found.items()}
    for name, run in undisturbed.items():
        print(f"undisturbed {name}: {run.get('failed') or run['step']} s a step", flush=True)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in found}
    others = [name for name in found if name != "live"]
    for number in range(args.rounds):
        turn = others[number % max(len(others), 1) :] + others[: number % max(len(others), 1)]
        for place in range(LIVE_RUNS if "live" in found else 0):
            turn.insert(place * (len(others) + LIVE_RUNS) // LIVE_RUNS, "live")
        for place, name in enumerate(turn):
            if time.monotonic() - began > 60 * args.minutes:
                continue
            run = trained(found[name], random.Random(f"{args.seed} {number} {place}"), args.quiet)
            runs[name].append(run)
            said = [f"{kill['next_step'] or float('nan'):.3f}" for kill in run.get("kills", ())]
            print(f"{number + 1}/{args.rounds} {name}: {run.get('failed') or ', '.join(said)}", flush=True)
    figures = report(runs, undisturbed)
    return record.finish(figures, {"undisturbed": undisturbed, "runs": runs})


def report(runs: dict[str, list[dict[str, Any]]], undisturbed: dict[str, dict[str, Any]]) -> dict[str, Figure]:
    """Prints a line a contestant."""
    figures: dict[str, Figure] = {}
    print(
        "\nnext step, s  kills   median    95 %     min–max    full rate   again    lost  repeated  same bits  failed"
    )
    for name, of_name in runs.items():
        done = [run for run in of_name if "kills" in run]
        kills = [row for run in done for row in run["kills"]]
        rows = [row for row in kills if row["next_step"] is not None]
        if not rows:
            print(f"{name:12} none of {len(of_name)} runs went on")
            continue
        nexts = [row["next_step"] for row in rows]
        rates = [row["full_rate"] for row in rows if row["full_rate"] is not None]
        same = [run["weights"] == undisturbed[name].get("weights") for run in done]
        lost, repeated = (
            [0 if equal else run.get(what, -1) for run, equal in zip(done, same)] for what in ("lost", "repeated")
        )
        figures[f"{name}: next step"] = figure(nexts, "s")
        figures |= {f"{name}: full rate": figure(rates, "s")} if rates else {}
        for part in rows[0]["parts"]:
            figures[f"{name}: – {part}"] = figure([row["parts"][part] for row in rows if part in row["parts"]], "s")
        high = statistics.quantiles(nexts, n=20, method="inclusive")[18] if len(nexts) > 1 else nexts[0]
        print(
            f"{name:9} {len(nexts):3} of {len(kills):2} {statistics.median(nexts):8.3f} {high:7.3f} {min(nexts):7.3f}–{max(nexts):<6.3f} "
            f"{statistics.median(rates) if rates else float('nan'):8.3f} {statistics.mean(row['again'] for row in rows):9.1f} "
            f"{statistics.median(lost):7.0f} {statistics.median(repeated):8.0f} {sum(same):9} of {len(done)} {len(of_name) - len(done):6}"
        )  # fmt: skip
    return figures


if __name__ == "__main__":
    with user_errors():
        sys.exit(main())
