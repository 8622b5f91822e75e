"""Healthy: every rank that runs in this container answers at /healthz, and says so.

    healthcheck.py [PROC]                           PROC: where the kernel shows the processes (/proc)

Standard library only: it starts every 30 seconds, beside the training. What serves no metrics, or serves them on any
port that is free, cannot be asked and counts as healthy.
"""

import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

ranks, enabled, first = 1, "", os.environ.get("LOCKSTEP_METRICS_PORT") or "9470"
for process in Path(*sys.argv[1:2] or ["/proc"]).glob("[0-9]*"):
    try:
        environment = (process / "environ").read_text(errors="replace").split("\0")
        words = (process / "cmdline").read_text(errors="replace").split("\0")
    except OSError:
        continue  # it has just ended, or is another user's
    # The launcher tells each rank how many there are.
    ranks = max([ranks, *(int(word.partition("=")[2]) for word in environment if word.startswith("LOCAL_WORLD_SIZE="))])
    # `--set` takes the last part of a setting's name, too.
    pairs = [word.removeprefix("metrics.").partition("=")[::2] for word in words]
    enabled = next((value for name, value in pairs if name == "enabled"), enabled)
if enabled.lower() in ("false", "no", "off") or first == "0":
    print("no metrics on known ports: not checked")
    sys.exit(0)
for local_rank in range(ranks):
    port = int(first) + local_rank
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=4).close()
    except urllib.error.HTTPError as error:
        said = error.read(200).decode(errors="replace").strip()
        sys.exit(f"local rank {local_rank} is unhealthy: {error.code} {said}")
    except OSError as error:
        sys.exit(f"local rank {local_rank} does not answer on port {port}: {error}")
