"""python benchmarks/peers.py [--rounds 5] [--steps 20] [--data-root DATA] [--out FILE]

ResNet-18 on the same images and ranks: plain PyTorch DDP as the data-parallel tutorial writes it (DataLoader,
PIL transforms, DistributedSampler), Lightning, Accelerate, and this package's own `training run`. All start under torchrun,
take turns round by round, and report images/s after the warm-up, and the seconds from the start of the command to the end of
the first step. Images are CIFAR-10's from --data-root, else synthetic ones of the same size. Needs: pip install -e '.[peers]'.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.measure import machine, write
from lockstep.training.cli import positive
from lockstep.training.contract import user_errors

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
RATE, MOMENTUM, DECAY = 0.1, 0.9, 1e-5


class Clock:
    """Wall time at the end of each step; the times between the warm-up's last and the last one count."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.ends: list[float] = []

    def tick(self) -> None:
        self.ends.append(time.time())

    def report(self, rank: int) -> None:
        args = self.args
        ends = self.ends[: args.warm_up + args.steps]
        seconds = ends[-1] - ends[args.warm_up - 1]
        samples = (len(ends) - args.warm_up) * args.batch * args.ranks
        value = {
            "images_per_second": samples / seconds, "start_up": ends[0] - float(os.environ["PEERS_BEGAN"]),
        }  # fmt: skip
        (args.work / f"result-{rank}.json").write_text(json.dumps(value))


class Pictures(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """As torchvision's CIFAR10: a PIL image through the tutorial's transforms, one at a time."""

    def __init__(self, work: Path) -> None:
        self.images, self.labels = np.load(work / "images.npy", mmap_mode="r"), np.load(work / "labels.npy")
        from torchvision import transforms

        steps = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
        self.transform = transforms.Compose([*steps, transforms.Normalize(MEAN, STD)])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        return self.transform(Image.fromarray(np.asarray(self.images[index]))), int(self.labels[index])


def tutorial_model() -> torch.nn.Module:
    from torchvision.models import resnet18  # not above: Lockstep's start has to pay for what it needs alone

    return resnet18(num_classes=10)


def _sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)


def plain(args: argparse.Namespace, clock: Clock) -> None:
    """The tutorial's script: DistributedDataParallel, DistributedSampler, DataLoader."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    data = Pictures(args.work)
    sampler = torch.utils.data.DistributedSampler(data)
    loader = torch.utils.data.DataLoader(data, args.batch, sampler=sampler)
    network = DistributedDataParallel(tutorial_model())
    optimizer = _sgd(network)
    network.train()
    sampler.set_epoch(0)
    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(network(images), labels).backward()
        optimizer.step()
        clock.tick()
    dist.destroy_process_group()


def lightning(args: argparse.Namespace, clock: Clock) -> None:
    import lightning as L

    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = tutorial_model()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:  # noqa: ARG002
            images, labels = batch
            return F.cross_entropy(self.network(images), labels)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return _sgd(self)

        def on_train_batch_end(self, *words: Any) -> None:  # noqa: ARG002
            clock.tick()

    loader = torch.utils.data.DataLoader(Pictures(args.work), args.batch, shuffle=True)
    trainer = L.Trainer(
        accelerator="cpu", devices=args.ranks, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Net(), loader)


def accelerate(args: argparse.Namespace, clock: Clock) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = tutorial_model()
    optimizer = _sgd(model)
    loader = torch.utils.data.DataLoader(Pictures(args.work), args.batch, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(images), labels))
        optimizer.step()
        clock.tick()
    accelerator.end_training()


def lockstep(args: argparse.Namespace, clock: Clock) -> None:
    """`training run resnet18`, unchanged: with its NaN check, its consensus on signals and its event log."""
    from lockstep.training.__main__ import main

    run = args.work / "run"
    words = ["run", "resnet18", "--run-dir", str(run), "--fresh", "--set", f"data.shards={args.work / 'shards'}"]
    words += [f"batch_size={args.batch}", "model_options.stem=stock"]
    words += ["epochs=1", "log.every=1", "log.format=json"]
    with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet):
        code = main(words)
    if code:
        raise SystemExit(code)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    clock.ends = [event["time"] for event in events if event["event"] == "step"]


PEERS: dict[str, Callable[[argparse.Namespace, Clock], None]] = {
    "plain DDP": plain, "Lightning": lightning, "Accelerate": accelerate, "Lockstep": lockstep,
}  # fmt: skip


def prepare(args: argparse.Namespace, work: Path) -> str:
    """Writes the same images for all; returns what they are."""
    from lockstep.training.data import shard_writer, sources
    from lockstep.training.data.sources.raw import Raw

    count = args.batch * args.ranks * (args.warm_up + args.steps)
    if args.data_root:
        raw, name = sources.load("cifar10", args.data_root, {}), "cifar10"
    else:
        raw, name = sources.load("synthetic", work, {"n": count, "n_test": 64}), "synthetic"
    if len(raw.train[1]) < count:
        raise SystemExit(f"{count} images are needed, there are {len(raw.train[1])}: use a smaller --steps or --batch")
    images, labels = np.ascontiguousarray(raw.train[0][:count]), raw.train[1][:count]
    np.save(work / "images.npy", images)
    np.save(work / "labels.npy", labels)
    part = Raw((images, labels), (raw.test[0][:64], raw.test[1][:64]), raw.classes)
    shard_writer.write(part.stream(), work / "shards", name)
    return name


def start(name: str, args: argparse.Namespace, work: Path) -> dict[str, float]:
    """One run of one peer, in processes of its own. Raises `SystemExit` with its output where it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
    command += [str(Path(__file__).resolve()), "--worker", name, "--work", str(work)]
    for option in ("ranks", "batch", "steps", "warm_up"):
        command += [f"--{option.replace('_', '-')}", str(getattr(args, option))]
    threads = max(1, len(os.sched_getaffinity(0)) // args.ranks)
    env = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "LOCKSTEP_THREADS"), str(threads))
    env["PEERS_BEGAN"] = str(time.time())
    for left in work.glob("result-*.json"):
        left.unlink()
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=args.timeout)
    found = [json.loads(path.read_text()) for path in work.glob("result-*.json")]
    if done.returncode or len(found) != args.ranks:
        raise SystemExit(f"{name} failed with exit code {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    return {
        "images_per_second": statistics.mean(one["images_per_second"] for one in found),
        "start_up": max(one["start_up"] for one in found),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--batch", type=positive, default=128, help="images a rank and step")
    parser.add_argument("--steps", type=positive, default=20)
    parser.add_argument("--warm-up", type=positive, default=3)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--timeout", type=float, default=1800)
    parser.add_argument("--data-root", type=Path, help="folder with CIFAR-10")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", choices=list(PEERS), help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        clock = Clock(args)
        PEERS[args.worker](args, clock)
        clock.report(int(os.environ["RANK"]))
        return
    names = args.peers
    missing = [name for name in ("Lightning", "Accelerate") if name in names and not find_spec(name.lower())]
    if missing:
        raise SystemExit(f"{', '.join(missing)} not installed: pip install -e '.[peers]', or leave out with --peers")
    about = machine()
    sizes = {"ranks": args.ranks, "batch": args.batch, "steps": args.steps}
    result: dict[str, Any] = {"machine": about, **sizes}
    with tempfile.TemporaryDirectory(prefix="lockstep-peers-") as directory:
        result["data"] = prepare(args, Path(directory))
        print(f"{about['cpu']}, {about['cores']} cores, torch {about['torch']}, {result['data']}, {args.batch} a rank")
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for number in range(args.rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                rounds[name].append(start(name, args, Path(directory)))
    result["peers"] = report(rounds)
    print(f"written to {write('peers', result, args.out)}")


def report(rounds: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Prints medians, and Lockstep against each peer as the median of the ratios of one round."""
    print("\nResNet-18                      images/s   start-up s   Lockstep is")
    rows: dict[str, Any] = {}
    for name, runs in rounds.items():
        row: dict[str, Any] = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        ratio = None
        if "Lockstep" in rounds and name != "Lockstep":
            pairs = zip(rounds["Lockstep"], runs)
            ratio = statistics.median(ours["images_per_second"] / theirs["images_per_second"] for ours, theirs in pairs)
        rows[name] = {**row, "lockstep_over_it": ratio, "rounds": runs}
        tail = f"{ratio:9.2f} × as fast" if ratio else ""
        print(f"{name:28} {row['images_per_second']:9.1f} {row['start_up']:12.1f}   {tail}")
    return rows


if __name__ == "__main__":
    with user_errors():
        main()
