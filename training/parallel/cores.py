"""The CPU cores of this process. Needs no torch."""

from __future__ import annotations

import os
from pathlib import Path


def cores() -> int:
    """Returns the CPU cores that this process may use, by its affinity and the quota of its container."""
    cgroup = Path("/sys/fs/cgroup")
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        if (cgroup / "cpu.max").exists():  # version 2: "200000 100000", or "max 100000"
            quota, period = (cgroup / "cpu.max").read_text().split()[:2]
        else:
            quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        limit = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return allowed
    return max(1, min(allowed, int(limit))) if limit > 0 else allowed  # -1: no quota
