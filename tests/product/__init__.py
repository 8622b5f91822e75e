"""The one place of the tests that reaches inside the product.

Tests come from outside: the command line with `--json`, the files that users see, and names that users import (`PUBLIC`).
What none of these gives – a checkpoint's tensors, the names of all strategies, a backend as an object – they take from
here. So a module that moves costs its own unit tests in `tests/unit/`, and lines of this folder. What needs torch is
imported when it is used: the dispatcher's tests run without.
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
"""Modules that the documentation tells users to import from; `lockstep` itself besides."""
AS_THEY_ARE = {
    "JobSpec": "jobs.spec.model:JobSpec",
    "SGD": "training.optim.base:SGD",  # torch's, which does not import its compiler: two CPU seconds of a fresh interpreter
    "Status": "jobs.status:Status",
    "Streams": "jobs.process:Streams",  # for a backend's `execute`: three descriptors
    "Unreachable": "jobs.status:Unreachable",
    "backend": "jobs.backend:backend_of",  # by its name on the command line
    "command_line": "jobs.cli.main:main",  # what the program `lockstep` runs; ends with SystemExit
    "copy_of_code": "jobs.snapshots:unpacked",  # identity → the folder that local jobs run it in
    "sweep": "jobs.sweep:expand",
    "EXTRAS": "training.extras:EXTRAS",
    "UserError": "training.contract:UserError",
    "EXIT_PREEMPTED": "training.contract:EXIT_PREEMPTED",
    "EXIT_USAGE": "training.contract:EXIT_USAGE",
    "clean": "training.checkpoint.store:clean",  # of a folder of checkpoints: what killed saves have left
    "goodput": "training.observe.account:of_run",  # run directory → its account
    "data": "training.config:Data",  # the settings of that group, checked
    "doctor_gpu": "tools.doctor:main",  # rows, whether to print JSON, and the Python of its processes
    "metrics_reader": "tools.ranks:Reader",  # run directory → what reads its ranks' metrics
    "leave": "training.__main__:leave",  # ends a rank as the program does: without the interpreter's teardown
    "prepared": "training.data.shard_writer:prepare",  # settings of the group `data` → shards
    "report": "tools.report:write",
    "sealed": "training.checkpoint.store:seal",  # the checksum that a manifest carries of itself
    "set_threads": "training.parallel.world:set_threads",
    "user_errors": "training.contract:user_errors",  # what a user is to read becomes one line and an exit code
}
"""What tests take as the product has it."""


def __getattr__(name: str) -> Any:
    if name not in AS_THEY_ARE:
        raise AttributeError(f"tests.product has no {name}")
    module, _, attribute = AS_THEY_ARE[name].partition(":")
    return getattr(Inside(module), attribute)
