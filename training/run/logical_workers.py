"""Computes the parts of a step under `sync.name=exact` one by one, independently. One fixed binary tree adds up their results.

Each part begins with the batch statistics from before the step. Its generators are seeded by (seed, step, part). The step's statistics
and its loss are means over the parts, weighted by samples. The tree of `sync/tree.py` adds them up in float64. So they do not depend on
the number of ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F

from ..contract import UserError, named
from ..data import order
from ..data.batches import Part
from ..generators import RngScope
from ..parallel.exchange import all_gather_trees, raise_together
from ..parallel.packing import tensor_bytes
from ..resilience.closeness import BATCH_STATISTICS
from ..sync.base import capturing
from ..sync.exact import Exact, TreeSum
from .proof import Proof, changed, due
from .replica import Replica, Several
from .run import Run
from .step_input import Numbers, StepInput, StepSums


class LogicalWorkers:
    """The parts of each step of an attempt, and the sums over them. All ranks call the same methods in the same order.

    Args:
        sums: the sums over the samples of a part, which `finish` replaces by those of all samples.
    """

    def __init__(self, run: Run, replica: Replica, drawing: RngScope, sums: StepSums) -> None:
        self.run, self.replica, self._drawing, self._step_sums = run, replica, drawing, sums
        self._names = {*BATCH_STATISTICS, *replica.sync.options.mean}
        self.refused: UserError | None = None
        """The error with which this rank refuses the step, such as a changed buffer that cannot be averaged over the parts. The rank then
        computes nothing more, and `finish` raises the error."""
        self._sum = TreeSum(0, torch.float64, run.world)
        self._epoch = -1
        """The epoch of the last batch."""
        self._after: torch.Tensor | None = None
        """The batch statistics after the last step of this epoch. `end` sets them; None: no step of the epoch has ended."""
        self._odd = torch.zeros(2, dtype=torch.bool, device=run.world.device)
        """Two flags on the device, for the host's next read: parts changed a count by different amounts; a rank refuses the step."""
        self.proof: Proof | None = None
        """The proof of the step under way; None: the step has none. `begin` sets it."""
        self._call_is_first = False
        """Whether the next call of the function is the first for its part."""

    @property
    def _learning(self) -> list[Exact]:
        """The strategies of the models that learn in this step, all of `sync.name=exact`."""
        sync = self.replica.sync
        return cast("list[Exact]", sync.learning if isinstance(sync, Several) else [sync])

    def _begin_parts(self) -> None:
        for sync in self._learning:
            sync.begin_parts(self._of)

    def begin_batch(self) -> None:
        """Begins a batch. Does not check random draws and statistics between two epochs, such as those of an evaluation."""
        if self._epoch != self.run.state.cursor.epoch:
            self._epoch, self._after = self.run.state.cursor.epoch, None
            self._drawing.watch()

    def proves(self, after_save: bool) -> bool:
        """Returns whether this step proves its function. `after_save`: the step follows a save or a start."""
        return after_save or due(self.run.config.seed, self.run.user_state.steps)

    def begin(self, part: Part, before: list[torch.Tensor], after_save: bool, looks: bool = True) -> None:
        """Begins a step over the parts of a global batch, and makes its proof, if one is due.

        Args:
            part: this rank's range of parts.
            before: copies of the model's buffers now (`kept_buffers`).
            after_save: as in `proves`.
            looks: whether the host may wait for the device.
        """
        if self._drawing.drawn_between:
            self.run.warn(
                "the script draws random numbers between two steps. Under sync.name=exact draw numbers for samples inside the function of "
                "run.step(function, …): there they do not depend on the number of ranks"
            )
        buffers = self._buffers()
        statistics = {name: one for name, one in buffers.items() if self._names & {name, name.rpartition(".")[2]}}
        self._means = {name: buffer for name, buffer in statistics.items() if buffer.is_floating_point()}
        self._counts = {name: buffer for name, buffer in statistics.items() if name not in self._means}
        self._before = {name: kept for name, kept in zip(buffers, before, strict=True) if name in statistics}
        others = {name: buffer for name, buffer in buffers.items() if name not in statistics}
        others |= dict(self.replica.model.named_parameters())
        self._note_versions(others)
        self._last, self._total = part.first + len(part.parts) - 1, part.total
        model, refuse = self.replica.model, self.replica.sync.refuse
        self.proof = Proof(model, refuse, others, self._before, after_save) if self.proves(after_save) else None
        if looks and self._after is not None and not torch.equal(self._after, self._values(statistics)):
            self.run.warn(
                "batch statistics changed between two steps. A forward pass there uses one rank's samples, so the statistics depend on the "
                "number of ranks: call model.eval() before it, or use run.for_evaluation()"
            )
        self._sizes = [buffer.numel() for buffer in self._means.values()]
        counts = sum(buffer.numel() for buffer in self._counts.values())
        self._sections = [sum(self._sizes), len(self._sizes), counts, counts]
        self._of, self._begun = part.num_parts, False
        self._begin_parts()

    def _tree(self) -> TreeSum:
        """Returns the tree sum of the step under way. The first call of a step begins it, once the number of sums is known."""
        if not self._begun:
            self._begun, self._sections = True, [*self._sections, len(self._step_sums.values), 1]
            if self._sum.length != sum(self._sections):
                self._sum = TreeSum(sum(self._sections), torch.float64, self.run.world)
            self._sum.release()
            self._sum.begin(self._of)
        return self._sum

    def _totals(self) -> list[TreeSum]:
        """Returns the sums over the parts: of the gradients, and of statistics, losses and numbers."""
        return [*(total for sync in self._learning for total in sync.sums), self._tree()]

    def _note_versions(self, others: Mapping[str, torch.Tensor]) -> None:
        self._others = {name: (id(tensor), tensor._version) for name, tensor in others.items()}

    def prove(
        self, part: int, result: Callable[[], tuple[torch.Tensor, Numbers]], inputs: StepInput, given: Callable[[Any], bool]
    ) -> None:  # fmt: skip
        """Proves the function with this rank's first part. If the proof fails, `finish` raises the error on all ranks.

        Args:
            result: calls the function with the part's first samples.
            given: returns whether an argument comes from `run.batches()` or `run.part()`.
        """
        assert self.proof is not None

        def call() -> torch.Tensor:
            self.begin_part(part, sums=True)
            return result()[0]

        proof, sync = self.proof, self.replica.sync
        self.refused = self.refused or proof.look_at_arguments(inputs.batch, inputs.samples, self._total, given)
        self.refused = self.refused or proof.look_for_collectives(call)
        # If that call raised, `Step._loss` has restored the buffers, so their versions changed.
        self._note_versions(proof.alone)
        if self.refused is None:
            error = proof.prove(call)
            self._look_at_others()  # names a changed tensor, which says more than the error of the proof
            self.refused = self.refused or error
        sync.zero_grad()
        self._begin_parts()

    def begin_part(self, part: int, sums: bool) -> None:
        """Restores the batch statistics from the start of the step, and seeds the generators of the part.

        Args:
            sums: whether `take` follows. Then no parameter may have a gradient when the part begins.
        """
        self.restore()
        self.draw(part)
        self._call_is_first = sums

    def draw(self, part: int) -> None:
        """Seeds the generators with which the part begins."""
        self._drawing.seed(order.key(self.run.config.seed, self.run.user_state.steps, part, order.Salt.PART))

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Surrounds a call of the function. After a part's first call it refuses existing gradients: they are not of our backward pass."""
        with self.run.calling("run.step()"):
            yield
        first, self._call_is_first = self._call_is_first, False
        if first and self.refused is None and any(sync.has_gradients for sync in self._learning):
            names = [name for name, p in self.replica.model.named_parameters() if p.grad is not None]
            self.refused = self.replica.sync.refuse(
                f"takes gradients only from the loss that the function returns, and {names[0]} already has a gradient",
                "in the function return the sum of the losses, without backward(); after a backward() between two steps call "
                "model.zero_grad()",
            )

    @torch.no_grad()
    def restore(self) -> None:
        """Restores the batch statistics from the start of the step."""
        for name, buffer in self._buffers().items():
            if name in self._before:
                buffer.copy_(self._before[name])

    @staticmethod
    def _values(buffers: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns the buffers as one int64 vector of their float64 bits, so that NaN equals NaN."""
        values = [buffer.detach().double().flatten() for buffer in buffers.values()]
        return torch.cat(values).view(torch.int64) if values else torch.zeros(0)

    def end(self) -> None:
        """Ends the step and records its batch statistics."""
        self._after = self._values({name: buffer for name, buffer in self._buffers().items() if name in self._before})

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Returns the buffers that the model has now: a forward pass may have assigned another tensor."""
        return dict(self.replica.model.named_buffers())

    @torch.no_grad()
    def take(self, part: int, share: float) -> None:
        """Adds the gradients, statistics and sums of a part that was just computed, not replayed.

        Args:
            share: the part's fraction of the global batch's samples.
        """
        if part == self._last:
            self._look_at_others()
        for total, leaf in zip(self._totals(), self.collect(share), strict=True):
            total.add(part, leaf)

    @torch.no_grad()
    def collect(self, share: float) -> list[torch.Tensor]:
        """Returns the gradients and statistics of a part. The CUDA graph of a part ends with this call. `share`: as in `take`."""
        gradients = [leaf for sync in self._learning for leaf in sync.collect()]
        tree, buffers, before = self._tree(), self._buffers(), self._before
        means = [buffers[name].double().flatten() * share for name in self._means]
        changed = [(buffers[name] != before[name]).any().double().view(1) for name in self._means]
        counted = [(buffers[name] - before[name]).double().flatten() for name in self._counts]
        squares = [count**2 for count in counted]
        sums = self._step_sums.values
        ends = [sums, sums.new_full((1,), float(self.refused is not None))]
        leaf = tree.leaf()
        torch.cat([*means, *changed, *counted, *squares, *ends], out=leaf[: tree.length])
        return [*gradients, leaf]

    @torch.no_grad()
    def put(self, part: int, collected: list[torch.Tensor]) -> None:
        """Adds the results of a replayed part, as `take` does of a computed one.

        Args:
            collected: the tensors of `collect`, which the replay has filled.
        """
        for total, leaf in zip(self._totals(), collected, strict=True):
            total.add(part, total.leaf().copy_(leaf))  # a copy: the next replay overwrites `collected`

    def _look_at_others(self) -> None:
        parameters = dict(self.replica.model.named_parameters())
        now = {**self._buffers(), **parameters}
        for name, was in self._others.items():
            tensor = now.get(name)
            if self.refused is not None or (tensor is not None and (id(tensor), tensor._version) == was):
                continue
            self.refused = changed(self.replica.sync.refuse, name, name in parameters)

    def reduce(self) -> list[torch.Tensor]:
        """Returns the totals over all parts, for `finish`. Collective."""
        return [total.finish() for total in self._totals()]

    @torch.no_grad()
    def finish(self, totals: list[torch.Tensor]) -> None:
        """Sets the gradients, the batch statistics and the sums over all samples from the totals. If one rank raises, all ranks raise
        together.

        During a capture of a CUDA graph the host cannot read the flags: the next eager step reads them.

        Args:
            totals: the result of `reduce`, of any rank.

        Raises:
            UserError: on all ranks: the function depends on more than its samples, or a buffer has no mean over the parts.
        """
        *gradients, total = totals
        of_gradients = iter(gradients)
        for sync in self._learning:
            sync.apply(of_gradients)
        parts = self._of
        means, changed, counted, squares, sums, other = total[: sum(self._sections)].split(self._sections)
        buffers = self._buffers()
        for name, mean, moved in zip(self._means, means.split(self._sizes), changed):
            before = self._before[name]
            buffers[name].copy_(torch.where(moved > 0, mean.view(before.shape).to(before.dtype), before))
        self._odd.logical_or_(torch.stack([(squares * parts != counted**2).any(), other[0] != 0]))
        unequal, refused = (False, False) if capturing(total) else self._odd.tolist()
        if unequal or refused:
            error = self.refused
            if error is None and unequal:
                error = self.replica.sync.refuse(
                    f"needs every part to change integer buffers by the same amount ({', '.join(self._counts)})",
                    "a layer that some parts skip gets statistics that depend on the number of ranks: use sync.name=flat",
                )
            raise_together(error, self.run.world)
        if self.proof is not None and not capturing(total):
            error = self.proof.compare(all_gather_trees(self.proof.record, self.run.world), self._total)
            if error is not None:
                raise_together(error, self.run.world)
        moves = counted.split([buffer.numel() for buffer in self._counts.values()])
        for name, move in zip(self._counts, moves):
            before = self._before[name]
            buffers[name].copy_(before + (move / parts).view(before.shape).to(before.dtype))
        self._step_sums.values.copy_(sums)


def check_machine(run: Run, known: set[str]) -> None:
    """Compares the ranks' machines before the first step of an attempt: threads, instruction set and libraries also affect the
    bits. Every checkpoint holds a description of the machine. Collective.

    Args:
        known: the checks of this attempt so far (`Attempt.known`).

    Raises:
        UserError: on all ranks: a rank differs from the checkpoint or, in a new run, from rank 0. Its results may differ in the last bits.
    """
    if "machine" in known:
        return
    known.add("machine")
    every = all_gather_trees(machine(run.world.device), run.world)
    saved = run.state.canary
    before = saved or every[0]
    if other := [rank for rank, of_rank in enumerate(every) if _differences(before, of_rank)]:
        refused = UserError(
            f"the machine of rank {named(other)} differs from that of {'the checkpoint' if saved else 'rank 0'} "
            f"({_differences(before, every[other[0]])}), so the run may end in other weights: undo the difference, or start over in "
            "another run directory"
        )
        raise_together(refused, run.world)
    run.state.canary = every[0]


def check_alone(run: Run) -> None:
    """Kills this replacement rank if its machine computes other bits. The others then continue without it."""
    if run.state.canary and _differences(run.state.canary, machine(run.world.device)):
        run.console.warn(
            "this rank's machine computes other bits than the others. The rank ends, and the others continue without it"
        )
        os.kill(os.getpid(), signal.SIGKILL)


def _differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Returns the differences, for a message; "" if there are none."""
    return ", ".join(f"{name}: {before.get(name)} → {now[name]}" for name in now if before.get(name) != now[name])


def machine(device: torch.device) -> dict[str, Any]:
    """Returns the properties of the machine that affect the bits of results. The digest shows the instruction set, and how libraries are
    set."""
    places = {torch.device("cpu"), device}  # samples are prepared on the CPU
    results = b"".join(arithmetic(place) for place in sorted(places, key=str))
    return {
        "torch": torch.__version__,
        "GPU": torch.cuda.get_device_name(device) if device.type == "cuda" else "none",
        "threads": torch.get_num_threads(),
        "results on fixed numbers": hashlib.sha256(results).hexdigest()[:16],
    }


def arithmetic(device: torch.device) -> bytes:
    """Returns the results of a few operations on fixed numbers: large sums, whose order depends on threads and
    instruction set. They also cover the operations of optimizers, and numbers below float32's normal range."""
    x = torch.arange(300_007, device=device).mul_(7919).remainder_(2003).float().div_(1001).sub_(1)  # from −1 to 1
    y = x.flip(0)
    small = torch.full((8,), 1e-20, device=device)
    square = x[: 256 * 256].view(256, 256)
    images, filters = x[: 4 * 16 * 32 * 32].view(4, 16, 32, 32), y[: 32 * 16 * 3 * 3].view(32, 16, 3, 3)
    results = [
        x.sum(), torch.linalg.vector_norm(x), x.exp().mean(), torch.addcdiv(x, y, y.abs() + 0.1, value=-0.37),
        torch.addcmul(x, y, y, value=0.11), torch.lerp(x, y, 0.9), torch.softmax(square, 1), square @ square.T, small * small,
        F.conv2d(images, filters),
    ]  # fmt: skip
    return b"".join(tensor_bytes(tensor).numpy().tobytes() for tensor in results)
