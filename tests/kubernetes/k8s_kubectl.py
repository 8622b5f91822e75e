"""A stand-in for `kubectl exec`: the container of a pod is an environment and a folder of this machine.

It acts as kubectl 1.32 does. Standard error ends in a line with an exit code that is not 0. A failure of kubectl exits with 1 and
one line. Without a terminal a signal ends it. With a terminal, Ctrl-C is a key for the command.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

PROGRAM = f"""#!{sys.executable}
import argparse, json, os, pathlib, signal, subprocess, sys
cut = sys.argv.index("--")
parser = argparse.ArgumentParser()
for flag in ("--namespace", "--context", "--container"): parser.add_argument(flag, required=flag != "--context")
for flag in ("--stdin", "--tty"): parser.add_argument(flag, action="store_true")
parser.add_argument("verb", choices=["exec"])
parser.add_argument("pod")
options, command = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1:]
file = pathlib.Path(__file__).parent / (options.pod + ".json")
if not file.exists():
    sys.exit(f"error: Internal error occurred: error executing command in container: container not running ({{options.pod}})")
pod = json.loads(file.read_text())
if pod["shows"]: print(pod["shows"], flush=True)
if pod["fails"]: sys.exit(pod["fails"])
if options.tty: signal.signal(signal.SIGINT, lambda *_: None)
words = [sys.executable if command[0] == "python" else command[0], *command[1:]]
how = dict(stderr=1) if options.tty else dict(start_new_session=True)
code = subprocess.run(words, env=pod["env"], cwd=pod["folder"], stdin=None if options.stdin else subprocess.DEVNULL, **how).returncode
code = 128 - code if code < 0 else code
sys.exit(print(f"command terminated with exit code {{code}}", file=sys.stderr) or code if code else 0)
"""


class Kubectl:
    """The pods that commands can be run in."""

    def __init__(self) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="kubectl-")
        self.folder = Path(self._scratch.name)
        (self.folder / "kubectl").write_text(PROGRAM)
        (self.folder / "kubectl").chmod(0o755)

    @property
    def path(self) -> str:
        """$PATH with the stand-in."""
        return f"{self.folder}:{os.environ['PATH']}"

    def put(self, pod: str, env: dict[str, str], folder: Path, fails: str = "", shows: str = "") -> None:
        """Adds a pod. With `fails` kubectl prints `shows`, then fails with this message."""
        record = {"env": env, "folder": str(folder), "fails": fails, "shows": shows}
        (self.folder / f"{pod}.json").write_text(json.dumps(record))

    def stop(self) -> None:
        self._scratch.cleanup()
