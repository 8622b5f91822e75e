"""python -m tests.traces [--show]

Traces a step, a save, a resume and the kill of a rank in real processes: two ranks train with the default strategy. And a
submission to the emulated API server, and a status of a job that runs under SLURM's stand-ins. Prints
for each how many of the product's files and functions Python enters, and how many calls it makes. It counts all threads of
rank 0, of the launcher, or of the command. A save counts what a step without one does not enter; a resume is a whole start.
A command counts without its imports. `--show` names the files, each with its calls. So two commits can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import textwrap
from collections import Counter
from pathlib import Path

from tests.processes import LAUNCH, PYTHON, ROOT, clean_env, run
from tests.slurm.stand_ins import RUNNING, made

TRACER = """
import atexit, json, os, runpy, sys, threading, time
from collections import Counter

calls, armed = Counter(), [False]

def profile(frame, event, _):
    if event == "call" and armed[0]:
        calls[frame.f_code.co_filename, frame.f_code.co_qualname] += 1

def write(name):
    armed[0] = False
    with open(os.path.join(os.environ["TRACES"], name), "w") as file:
        json.dump([[*key, count] for key, count in calls.items()], file)
    calls.clear()

threading.setprofile(profile)
sys.setprofile(profile)
"""
LOOP = """
import signal
import torch
from lockstep import Session

rank, phase = int(os.environ["RANK"]), sys.argv[2]
again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
killed = os.path.join(os.environ["TRACES"], "killed")
armed[0] = phase == "resume"
with Session(sys.argv[1], seed=1, checkpoint={"every_steps": 10}) as run:
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(128, 4))
    model = run.replicate(torch.nn.Linear(4, 1))
    run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    for _ in run.epochs(steps=12 if phase == "step" else 14):
        for (batch,) in run.batches(data, 8):
            while run.steps == 10 and armed[0] and not os.path.exists(sys.argv[1] + "/checkpoints/step-00000010"):
                time.sleep(0.01)
            if armed[0]:
                write(f"{'resume' if phase == 'resume' else {6: 'step', 10: 'save'}[run.steps]}-{rank}")
            if phase == "kill" and run.steps == 4 and rank == 1 and not again:
                open(killed, "w").close()
                time.sleep(1)
                os.kill(os.getpid(), signal.SIGKILL)
            armed[0] = phase == "step" and run.steps in (5, 9)
            run.step(model(batch).square().mean())
"""
LAUNCHER = """
def arm():
    while not os.path.exists(os.path.join(os.environ["TRACES"], "killed")):
        time.sleep(0.05)
    armed[0] = True

threading.Thread(target=arm, daemon=True).start()
atexit.register(write, "kill-0")
runpy.run_module("lockstep.training", run_name="__main__", alter_sys=True)
"""
COMMAND = """
import importlib, pkgutil
from lockstep.jobs.cli.main import main

for name in ("lockstep.jobs", f"lockstep.jobs.{sys.argv[1]}"):  # what runs as a module is imported is no part of the command
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, f"{name}.") if name == "lockstep.jobs" else []:
        if module.name.split(".")[2] in (sys.argv[1], "spec", "cli", "code") or not module.ispkg and module.name.count(".") == 2:
            importlib.import_module(module.name)
name, sys.argv = sys.argv[2], ["lockstep", *sys.argv[3:]]
atexit.register(write, name)
armed[0] = True
main()
"""


def commands(folder: Path) -> None:
    """Traces `submit k8s` and `status slurm`. Raises `RuntimeError` where one fails."""
    sys.path.insert(0, str(ROOT / "tests/kubernetes"))
    from k8s_server import ApiServer

    command = folder / "command.py"
    command.write_text(TRACER + COMMAND)
    site = made(folder)
    site.record()
    site.shows(RUNNING)
    job = {"name": "smoke", "recipe": "smoke", "nodes": 2, "image": "registry.corp/lockstep:1"}
    (folder / "k8s.yaml").write_text(json.dumps(job))
    with ApiServer() as server:
        config = str(server.kubeconfig(folder / "kubeconfig"))
        for package, words in {
            "kubernetes": ("submit-0", "submit", "k8s", str(folder / "k8s.yaml")),
            "slurm": ("status-0", "status", "slurm", "mine"),
        }.items():
            env = clean_env(TRACES=str(folder), KUBECONFIG=config, **site.env)
            result = run([PYTHON, str(command), package, *words], env)
            if result.code:
                raise RuntimeError(f"{words[0]}: exit code {result.code}: {result.output}")


def traced(only_commands: bool = False) -> dict[str, Counter[tuple[str, str]]]:
    """Returns kind → (file, function) → calls. Raises `RuntimeError` where a run fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script, launcher = folder / "loop.py", folder / "launcher.py"
        script.write_text(TRACER + LOOP)
        launcher.write_text(TRACER + LAUNCHER)
        phases = {"step": LAUNCH, "resume": LAUNCH, "kill": (PYTHON, str(launcher), "launch")}
        for phase, start in {} if only_commands else phases.items():
            run_dir = folder / ("kill" if phase == "kill" else "run")
            words = [
                *start,
                "--ranks",
                "2",
                "--max-restarts",
                str(int(phase == "kill")),
                "--",
                PYTHON,
                str(script),
                str(run_dir),
                phase,
            ]
            result = run(words, clean_env(TRACES=name, PYTHONWARNINGS="ignore"))
            if result.code:
                raise RuntimeError(f"{phase}: exit code {result.code}: {result.output}")
        commands(folder)
        traces = {}
        for kind in (*([] if only_commands else ["step", "save", "resume", "kill"]), "submit", "status"):
            traces[kind] = counts = Counter[tuple[str, str]]()
            for path, function, count in json.loads((folder / f"{kind}-0").read_text()):
                real = Path(os.path.realpath(path))
                if os.path.isabs(path) and real.is_relative_to(ROOT) and not real.is_relative_to(ROOT / ".venv"):
                    counts[str(real.relative_to(ROOT)), function.split(".<locals>.<")[0]] += count
        for function in traces.get("step", ()):  # the checkpoint is made in a step like any other
            traces["save"].pop(function, None)
        return traces


def main() -> None:
    parser = argparse.ArgumentParser(description=textwrap.dedent(__doc__ or ""))
    parser.add_argument("--show", action="store_true", help="name the files and functions")
    parser.add_argument("--commands", action="store_true", help="trace the commands alone")
    options = parser.parse_args()
    print("| | files | functions | calls |\n|---|---|---|---|")
    for kind, counts in traced(options.commands).items():
        files = Counter[str]()
        for (path, _), count in counts.items():
            files[path] += count
        print(f"| {kind} | {len(files)} | {len(counts)} | {counts.total()} |")
        if options.show:
            for path, count in files.most_common():
                print(f"  {count:6} {path}:", *(name for file, name in counts if file == path))


if __name__ == "__main__":
    main()
