"""How what surrounds a step grows with the number of ranks: python -m benchmarks.scale [--ranks 2,8,32] [--out FILE]

Counts messages, bytes, listed names and CPU-seconds of real gloo ranks on this machine: of a start, and of each exchange
between ranks (docs/how-it-works.md), from the kernel's counters of the ranks' sockets.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.measure import Load, write
from benchmarks.ranks import on_ranks
from lockstep.training import config as configuration
from lockstep.training.checkpoint import state as states
from lockstep.training.checkpoint import store
from lockstep.training.data import shard_writer
from lockstep.training.parallel import exchange
from lockstep.training.parallel.world import World, detect, joined
from lockstep.training.recipe.loop import Recipe
from lockstep.training.resilience import closeness
from lockstep.training.resilience.preempt import Consensus
from lockstep.training.run.evaluation import summed
from lockstep.training.run.run import Run
from lockstep.training.session import session_of

TINY = [
    "data.source=synthetic", "data.options={n: 2048, n_test: 512, size: 8, noise: 1.5}",
    "augment.crop=1", "model=bag_of_tricks", "model_options={width: 0.0625}", "global_batch_size=1024", "uneven=weight", "epochs=1",
    "schedule=[]", "threads=1", "sync.name=flat", "evaluate.batch_size=64",
]  # fmt: skip
"""A network of a few thousand parameters with batch norm, on images of 8 × 8."""
REPEATS = 20
"""Calls of what takes microseconds."""
_RETRANSMITTED, _NOT_SENT, _DATA_SEGMENTS_OUT, _BYTES_SENT = 100, 144, 156, 200
"""Places of numbers in the kernel's struct tcp_info (Linux 4.19 and later). Behind the bytes sent are those that were sent again."""


class Spent(NamedTuple):
    """What one rank did. Messages are TCP segments with data: gloo's headers, and what it says of buffers, among them."""

    messages: int
    bytes: int
    store_messages: int
    """To the store where the ranks meet (torch's TCPStore), and from it on the rank that serves it."""
    entries: int
    """Names read in listings of the watched folders."""
    cpu: float
    """Seconds of all threads."""

    def since(self, before: Spent) -> Spent:
        return Spent(*(now - then for now, then in zip(self, before)))


class Counts:
    """Counts what this process does from its construction on. One a process: audit hooks cannot be taken out again."""

    def __init__(self, store_port: int, folders: list[Path]) -> None:
        self._port, self._folders = store_port, [str(folder.resolve()) for folder in folders]
        self._entries, self._looking, self._looked = 0, False, 0.0
        sys.addaudithook(self._audit)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if (
            self._looking
            or event not in ("os.scandir", "os.listdir")
            or not isinstance(args[0], (str, bytes, os.PathLike))
        ):
            return
        path = os.path.abspath(os.fsdecode(args[0]))
        if any(path.startswith(folder) for folder in self._folders):
            self._looking = True
            with contextlib.suppress(OSError):
                self._entries += len(os.listdir(path))
            self._looking = False

    def now(self) -> Spent:
        cpu = time.process_time()
        messages = sent = store = 0
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            try:
                if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(descriptor)) as found:
                    if found.type != socket.SOCK_STREAM or found.family not in (socket.AF_INET, socket.AF_INET6):
                        continue
                    ports = (found.getpeername()[1], found.getsockname()[1])
                    info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            except OSError:  # one that listens, or gone since
                continue
            # What the kernel sent again, because a busy receiver was late, is none of ours.
            (again,) = struct.unpack_from("<I", info, _RETRANSMITTED)
            segments = struct.unpack_from("<I", info, _DATA_SEGMENTS_OUT)[0] - again
            if self._port in ports:
                store += segments
            else:
                messages += segments
                octets, again = struct.unpack_from("<QQ", info, _BYTES_SENT)
                # What waits in the kernel was written: it must not count in what comes next.
                sent += octets - again + struct.unpack_from("<I", info, _NOT_SENT)[0]
        own = cpu - self._looked  # without what the looking takes, which grows with the number of sockets
        self._looked += time.process_time() - cpu
        return Spent(messages, sent, store, self._entries, own)


def calls(world: World, state: states.TrainState) -> dict[str, tuple[Callable[[], object], int]]:
    """Name → (a collective call, how often). `state` is that of a run before its first step."""
    consensus = Consensus(world, None)
    gathered: list[Any] = []

    def resized() -> object:
        """As if the ranks of the checkpoint had been one fewer, or one more."""
        other = (
            None if gathered[0] is None else {**gathered[0], "ranks": [*gathered[0]["ranks"], gathered[0]["ranks"][0]]}
        )
        return states.scatter(other, state)

    def agree(fails: bool) -> None:
        error = store.CorruptCheckpoint("a file of this rank is damaged") if fails and world.leader else None
        with contextlib.suppress(RuntimeError):
            exchange.raise_together(error, world)

    def merged() -> None:
        states.averaged_buffers(state.model, world)
        summed(lambda: torch.zeros(21), world.size, lambda numbers: iter([()] * len(numbers)), world, seed=0)

    return {
        "consensus, a step": (lambda: (consensus.poll(), consensus.settle()), REPEATS),
        "agreement, no error": (lambda: agree(False), REPEATS),
        "agreement, an error": (lambda: agree(True), 1),
        "checkpoint gathered": (lambda: gathered.append(states.gather(state)), 1),
        "checkpoint sent": (lambda: states.scatter(gathered[0], state), 1),
        "checkpoint sent, other world size": (resized, 1),
        "evaluation merged": (merged, 2),
        "closeness": (lambda: closeness.check_parameter_closeness(state.model, batch_statistics=False), 1),
    }  # fmt: skip


def _rank(folder: str) -> dict[str, dict[str, float]]:
    """What one rank spends, by part: joining, a start, and each exchange by itself (a call of it)."""
    torch.set_num_threads(1)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for as long as this process lives
    root, found = Path(folder), {}
    counts = Counts(int(os.environ["MASTER_PORT"]), [root])
    before = counts.now()
    with joined(detect(os.environ), "cpu", 300) as world:
        found["join (torch's store and mesh)"] = counts.now().since(before)._asdict()
        before = counts.now()
        settings = _settings(root)
        start = Run(root / "run", settings, handle_signals=False, world=world)
        with session_of(start) as run:
            Recipe(run, settings, start)
            found["a start"] = counts.now().since(before)._asdict()
            for name, (call, times) in calls(world, run._started().run.state).items():
                dist.barrier()
                before = counts.now()
                for _ in range(times):
                    call()
                found[name] = {key: value / times for key, value in counts.now().since(before)._asdict().items()}
    return found


def _settings(root: Path) -> configuration.Config:
    return configuration.load("smoke", [f"data.root={root / 'data'}", *TINY])


def counted(size: int, timeout: float) -> dict[str, dict[str, dict[str, float]]]:
    """Part → measure → of all `size` ranks together, and of the one that does most."""
    with tempfile.TemporaryDirectory() as folder:
        shard_writer.prepare(_settings(Path(folder)).data)
        ranks = on_ranks(size, timeout, _rank, folder)
    return {
        name: {
            what: {"total": sum(rank[name][what] for rank in ranks), "most": max(rank[name][what] for rank in ranks)}
            for what in Spent._fields
        }
        for name in ranks[0]
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", default="2,8,32", help="128 and 256 take minutes, gigabytes, and 20,000 open files")
    parser.add_argument("--timeout", type=float, default=900)
    parser.add_argument("--out", type=Path, help="the file of the result (default: in benchmarks/results)")
    args = parser.parse_args()
    load = Load()
    runs = {int(text): counted(int(text), args.timeout) for text in args.ranks.split(",")}
    about = {**load.about, **load.taken()}
    for name in runs[min(runs)]:
        print(name)
        for what in Spent._fields:
            points = {size: run[name][what] for size, run in runs.items()}
            if any(point["total"] for point in points.values()):
                print(f"  {what:15}", *(f"{n}: {p['total']:.4g} (most {p['most']:.4g})" for n, p in points.items()))
    if about["busy"]:
        print(f"BUSY MACHINE: others took {about['others']:.0%} of its CPU time; counts hold, CPU-seconds do not")
    print(f"written to {write('scale', {'machine': about, 'ranks': runs}, args.out)}")


if __name__ == "__main__":
    main()
