"""The one place of the tests that reaches inside the product.

Tests come from outside: the command line with `--json`, the files that users see, and names that users import (`PUBLIC`).
What none of these gives – a checkpoint's tensors, the names of all strategies, a backend as an object – they take from
here. So a module that moves costs its own unit tests in `tests/unit/`, and lines of this folder. What needs torch is
imported by the function that uses it: the dispatcher's tests run without.
"""

from __future__ import annotations

from tests.product.dispatch import *
from tests.product.files import *
from tests.product.loops import *
from tests.product.names import *
from tests.product.neighbours import *
from tests.product.ranks import *

PUBLIC = {
    "lockstep.training.sync.teaching.horovod",
    "lockstep.training.sync.teaching.strategies",
    "lockstep.training.parallel.world",
    "lockstep.training.resilience.closeness",
}
"""Modules that the documentation tells users to import from; `lockstep` itself besides."""
