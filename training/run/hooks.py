"""Hooks of a script on parameters: autograd calls them with the gradient of a part of the batch, before that is summed over the ranks."""

from __future__ import annotations

from ..sync.watch import hooks_of_script
from .replica import Replica
from .run import Run


class ScriptHooks:
    """What `look` has seen of them. Whether a hook is linear cannot be seen, and one that prints is harmless: so it is a warning."""

    def __init__(self, run: Run, replica: Replica) -> None:
        self._run, self._replica = run, replica
        self._cuts = run.world.size > 1 or replica.sync.batch_parts is not None or run.config.micro_batch_size > 0
        """A backward pass has the gradient of a part of the batch."""
        self._warned = False

    def look(self) -> None:
        """Before a step.

        Raises:
            UserError: a hook is called too early to use a gradient, or never.
        """
        sync = self._replica.sync
        if not self._cuts and sync.replicas:
            return
        for name, after in hooks_of_script(sync.model, self._replica.hooks):
            if after and sync.replicas:
                raise sync.refuse(
                    f"sums the gradient of {name} over the ranks after the hook that register_post_accumulate_grad_hook() has set",
                    "use the gradient between run.backward() and run.update()",
                )
            if not after and not sync.replicas:
                raise sync.refuse(
                    f"calls no hook that register_hook() has set, and {name} has one",
                    "change the gradient between run.backward() and run.update(), or use sync.name=flat",
                )
            if not after and not self._warned:
                self._warned = True
                if self._run.world.leader:
                    self._run.console.warn(
                        f"a hook on {name} gets the gradient of a part of the batch, before the sum. A mask or a factor is right "
                        "there. A clamp, a norm or noise gives another result than one process: change the gradient between "
                        "run.backward() and run.update(), or give the step clip=…"
                    )
