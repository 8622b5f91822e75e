"""The only folder of the tests that imports the product's internals.

Tests use the command line with `--json`, the files that users see, and names that users import (`PUBLIC`).
This folder gives the rest: a checkpoint's tensors, the names of all strategies, a backend as an object.
A module that moves changes its unit tests in `tests/unit/` and lines of this folder. Modules that need torch are
imported at their first use: the dispatcher's tests run without torch.
"""

from __future__ import annotations

from typing import Any

from tests.product.files import *
from tests.product.inside import Inside
from tests.product.jobs import *
from tests.product.training import *

PUBLIC = {
    "lockstep.jobs.sweep",
    "lockstep.training.parallel.world",
    "lockstep.training.resilience.closeness",
}
"""Modules that users import from according to the documentation, next to `lockstep`."""
AS_THEY_ARE = {
    "JobSpec": "jobs.spec.model:JobSpec",
    "SGD": "training.optim.base:SGD",  # torch's SGD without the import of torch's compiler, which takes two CPU seconds
    "Status": "jobs.status:Status",
    "Streams": "jobs.process:Streams",  # for a backend's `execute`: three descriptors
    "Unreachable": "jobs.status:Unreachable",
    "backend": "jobs.backend:backend_of",  # name on the command line → backend
    "command_line": "jobs.cli.main:main",  # the main function of `lockstep`; raises SystemExit
    "copy_of_code": "jobs.snapshots:unpacked",  # identity → the folder in which local jobs run the code
    "sweep": "jobs.sweep:expand",
    "EXTRAS": "training.extras:EXTRAS",
    "UserError": "training.contract:UserError",
    "EXIT_PREEMPTED": "training.contract:EXIT_PREEMPTED",
    "EXIT_USAGE": "training.contract:EXIT_USAGE",
    "clean": "training.checkpoint.store:clean",  # removes the leftovers of killed saves from a folder of checkpoints
    "goodput": "training.observe.account:of_run",  # run directory → its account
    "data": "training.config:Data",  # the settings of that group, checked
    "doctor_gpu": "tools.doctor:main",  # arguments: rows, whether to print JSON, the Python of its processes
    "metrics_reader": "tools.ranks:Reader",  # run directory → the reader of its ranks' metrics
    "leave": "training.__main__:leave",  # ends a rank as the program does: without the interpreter's teardown
    "prepared": "training.data.shard_writer:prepare",  # settings of the group `data` → shards
    "report": "tools.report:write",
    "sealed": "training.checkpoint.store:seal",  # the manifest's checksum of itself
    "set_threads": "training.parallel.world:set_threads",
    "user_errors": "training.contract:user_errors",  # prints a user's error as one line, with its exit code
}
"""Names of the product that tests use unchanged."""


def __getattr__(name: str) -> Any:
    if name not in AS_THEY_ARE:
        raise AttributeError(f"tests.product has no {name}")
    module, _, attribute = AS_THEY_ARE[name].partition(":")
    return getattr(Inside(module), attribute)
