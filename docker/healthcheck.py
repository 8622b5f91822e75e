"""Healthy: every rank of this container that serves its metrics says so, and local rank 0 serves.

Standard library only: it starts every 30 seconds, beside the training.
"""

import os
import sys
import urllib.error
import urllib.request

base = int(os.environ.get("LOCKSTEP_METRICS_PORT", "9470"))
for local_rank in range(256):
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{base + local_rank}/healthz", timeout=4).close()
    except urllib.error.HTTPError as error:
        sys.exit(
            f"local rank {local_rank} is unhealthy: {error.code} {error.read(200).decode(errors='replace').strip()}"
        )
    except OSError as error:
        sys.exit(None if local_rank else f"local rank 0 does not answer on port {base}: {error}")
