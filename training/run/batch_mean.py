"""Checks whether the loss of a batch, and its gradient, are the mean over its samples, and whether the function of a step carries a state
from one batch to the next. If a check fails, several ranks or a resume may give other weights than one process. It comes at the third step
of a function, at its steps 16, 32, 64 …, and in the first step of the epochs 2, 3, 5, 9 …, since a loss may have other terms by then; and
after a step whose loss ends in other operations.

The check calls the function in evaluation mode: twice with the same samples and random numbers, once with other random numbers, and with
each half of the samples. It does so again in training mode, if there is no batch norm. If a call raises because of its gradient, only the
losses are compared. The check undoes the changes of the calls. If that is not possible, or the function raises, there is no warning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..config import Config
from ..data import order, pytree
from ..generators import RngScope
from ..models.arithmetic import evaluating
from ..sync.base import hooks_of_script
from .replica import Replica
from .run import Run
from .step_input import CurrentBatch, Numbers, StepInput
from .undo import Undo, Unsafe

CALL = 3
"""The step of a function at which it is checked. In its first step a loss may still be the same for all samples."""
OFTEN = 16
"""It is checked again at its steps 16, 32, 64 …: a run of one epoch may change its loss, too."""
_ROUNDING = {torch.float64: 1e-8, torch.float32: 3e-5}
"""Relative difference between losses of the same samples in different batches, by dtype."""
_ROUNDING_OF_LOW, _ROUNDING_OF_TF32 = 2e-2, 2e-3
_SMALL = 1e-4
"""Share of the loss: the product of the norms of a gradient and of the weights is larger, unless the gradient is zero but for rounding."""
_OF_GRADIENT = 100
"""Factor of the relative difference for gradients, in which the samples' own gradients may cancel."""
_PASSED = {"Add", "Sub", "Neg", "Mul", "Div", "ToCopy", "View", "Squeeze", "Unsqueeze", "Alias", "Sum"}
"""Operations between a sum and the loss. A sum that is divided may be a mean."""
_NO_SAMPLES = ("Mean", "Div", "Stack", "Cat")
"""Operations whose results are no sums of samples, though they may be as many: means, shares of a mean, several losses."""
_CHOICES = re.compile("(Index|IndexSelect|Topk|Sort|MaskedSelect|Slice)Backward[01]?")
"""Operations that take some entries of a tensor."""
_MOST, _LAST = 100, 8

Call = Callable[[StepInput, int, int], tuple[torch.Tensor, Numbers]]
Gradient = tuple[torch.Tensor | None, ...]
Result = tuple[float, Gradient]
"""A loss, and its gradient."""


class BatchMean:
    """The check of each function of an attempt."""

    def __init__(self, run: Run, replica: Replica, current: CurrentBatch) -> None:
        self._run, self._replica, self._current = run, replica, current
        self._steps: Counter[Any] = Counter()
        """Steps of each function."""
        self._losses = 0
        """Losses that `look_at_loss` has seen."""
        self._function: Any = None
        """The function of the newest step; None: there is none to check."""
        self._end = frozenset[str]()
        """The last operations of the newest loss (`note`)."""
        self._checked: dict[Any, set[frozenset[str]]] = {}
        """Function → the last operations of its loss in the steps that were checked."""

    def note(self, loss: torch.Tensor) -> None:
        """Notes the last operations of a loss: not each step may have the same terms."""
        nodes = [] if self._function is None else [loss.grad_fn]
        for node in nodes:
            nodes += [inner for inner, _ in getattr(node, "next_functions", ())[: _LAST - len(nodes)]]
        self._end = frozenset(type(node).__name__ for node in nodes)

    def look(self, inputs: StepInput, call: Call, code: types.CodeType | None) -> None:
        """Counts the step, and warns once of its function. Waits for the device at the step of the check.

        Args:
            call: returns the loss of these samples of the rank, and the numbers.
            code: the code of the function (`bytecode.code_of`); None: it is another object that can be called.
        """
        if isinstance(self._run.config, Config) or not self._replica.sync.is_replicated:
            return
        self._function = function = code or type(inputs.compute)
        self._steps[function] += 1
        self._warn_of_own_divisor(inputs)
        if inputs.part is not None and inputs.divisor is None and (left := self._current.left(inputs)):
            self._run.warn(
                f"the function of a step gets {left} of this rank's {inputs.samples} samples, with which its mean counts: leave samples "
                "out of the dataset, or return a sum, and give their number as a tensor, divisor=…",
                "left out",
            )
        cursor = self._run.state.cursor
        is_new_epoch = not cursor.step and cursor.epoch > 0 and not cursor.epoch & (cursor.epoch - 1)  # 1, 2, 4, 8 …
        count = self._steps[function]
        is_due = count == CALL or is_new_epoch or (count >= OFTEN and not count & (count - 1))
        if is_due and (inputs.part is None or inputs.part.samples):
            self._check(inputs, call, is_first=count == 1)

    def look_again(self, inputs: StepInput, call: Call) -> None:
        """Warns, after a step, of its function if its loss ends in other operations than in the steps that this has checked."""
        ends = self._checked.setdefault(self._function, set())
        is_new = self._steps[self._function] >= CALL and self._end not in ends and len(ends) < _LAST
        if is_new and (inputs.part is None or inputs.part.samples):
            ends.add(self._end)
            self._check(inputs, call, is_first=False)

    def _check(self, inputs: StepInput, call: Call, is_first: bool) -> None:
        with contextlib.suppress(Unsafe):
            for trains in (False, True):
                if sentence := self._tried(inputs, call, trains, is_first):
                    self._run.warn(sentence, sentence.partition(":")[0])
                    return

    def _tried(self, inputs: StepInput, call: Call, trains: bool, is_first: bool) -> str:
        """Returns the result of `_compared`: of losses and gradients, or of losses alone if the gradients raise. Returns "" if the losses
        raise, too: the step itself raises again.

        Args:
            is_first: whether the function has had no step. A strategy may prepare itself in its first backward pass.
        """
        has_hooks = next(hooks_of_script(self._replica.sync.model, self._replica.hooks), None) is not None
        gradients = (False,) if is_first or has_hooks else (True, False)
        for with_gradient in gradients:
            try:
                return self._compared(inputs, call, trains, with_gradient)
            except Unsafe:
                raise
            except Exception:  # noqa: BLE001, S112 - the step itself raises a function's own error again
                continue
        return ""

    def look_at_loss(self, loss: torch.Tensor, inputs: StepInput, parts: int) -> None:
        """Warns once of a loss, computed outside a function, that is a sum over its samples, is divided by the number of parts, or leaves
        samples out. Waits for the device at the losses 1, 2, 4, 8 … that are torch's for classes.

        Args:
            parts: into which `accumulate` cuts the batch; 0: it does not.
        """
        self._losses += 1
        if self._losses & (self._losses - 1) or isinstance(self._run.config, Config):
            return
        leaves_out = False
        with contextlib.suppress(AttributeError, RuntimeError):  # an operation of the script may have a name of torch's
            leaves_out = bool(inputs.samples) and inputs.divisor is None and _leaves_out(loss.grad_fn, inputs.samples)
        if leaves_out:
            self._run.warn(
                "the loss leaves samples or tokens out (ignore_index, a mask), weighs classes, or divides a sum by another number than its "
                "entries, so N ranks minimise another loss than 1 rank: take the sum (reduction='sum'), and give this rank's count as a "
                "tensor, run.step(loss, divisor=(labels != -100).sum()). A choice among the samples, such as the largest losses, sees "
                "those of this rank alone"
            )
        if self._losses > 1:
            return
        if self._run.world.size > 1:
            kind = "mean" if inputs.divisor is None else "sum"
            checks = self._replica.sync.is_replicated
            mend = ". To have it checked, pass its function: run.step(function, *batch)" if checks else ""
            self._run.console.line(
                f"A loss that is computed outside a function is not checked: it must be the {kind} over this rank's samples, or N ranks "
                f"minimise another loss than 1 rank{mend}"
            )
        self._warn_of_own_divisor(inputs)
        if inputs.divisor is None and inputs.samples > 1 and _kind(loss.grad_fn, inputs.samples) == "sum":
            self._run.warn(
                "the loss is a sum over the samples of this rank, so N ranks minimise another loss than 1 rank: take the mean, or give the "
                "divisor of all ranks, run.step(loss, divisor=…)"
            )
        if inputs.divisor is None and parts > 1 and inputs.samples != parts and _is_divided(loss.grad_fn, parts):
            self._run.warn(
                f"the loss is divided by {parts}, as many as the batches of a step, and run.accumulate() weighs each by its samples "
                "already: leave the division out, or the gradient is too small"
            )

    def _warn_of_own_divisor(self, inputs: StepInput) -> None:
        is_own = not isinstance(inputs.divisor, torch.Tensor) and inputs.divisor == inputs.samples
        if is_own and inputs.samples < (inputs.total or 0):
            self._run.warn(
                f"the divisor is {inputs.divisor:g}, as many as this rank's samples, and the batch has {inputs.total} on all ranks: a "
                "number is the divisor of all ranks. Give run.batch.total, or this rank's count as a tensor, which the ranks sum",
                "divisor",
            )

    def _compared(self, inputs: StepInput, call: Call, trains: bool, with_gradient: bool) -> str:
        """Returns a warning about the function; "": there is none.

        Args:
            trains: whether the modules keep their modes, in place of evaluation mode.
            with_gradient: whether to compare the gradients, too.
        """
        assert inputs.compute is not None
        low, high = inputs.part.parts[0] if inputs.part is not None and inputs.part.parts else (0, inputs.samples)
        low, high = inputs.micro_batches(low, high)[0]
        run, multiple, kept = self._run, inputs.part.multiple if inputs.part is not None else 1, self._run.user_state
        seeds = [order.key(run.config.seed, run.user_state.steps, number, order.Salt.PROOF) for number in range(2)]
        undo, drawing = Undo(inputs.compute, inputs.batch), RngScope(run.world.device, every=True)
        modules = [*self._replica.model.modules(), *undo.modules]
        with_gradient = with_gradient and "backward" not in undo.names and bool(inputs.batch)
        if trains and (_normalises(modules, trains) or not any(module.training for module in modules)):
            return ""
        weights = [p for p in self._replica.model.parameters() if p.requires_grad] if with_gradient else []
        dtypes: set[torch.dtype] = set()

        def result(first: int, end: int, seed: int, weights: list[nn.Parameter] = weights) -> Result:
            drawing.seed(seed)
            batch = pytree.cut(inputs.batch, first, end, inputs.samples, copies=True)  # the function may change it
            loss, _ = call(dataclasses.replace(inputs, batch=batch, samples=end - first), 0, end - first)
            dtypes.add(loss.dtype)
            # A step weighs the loss of a part before its backward pass, which may clamp the gradient of a layer.
            weighed = loss * (end - first) / (high - low) if inputs.divisor is None else loss
            # The graph may reach beyond the function, into what the step needs again.
            gradient = torch.autograd.grad(weighed, weights, retain_graph=True, allow_unused=True) if weights else ()
            return float(loss), gradient

        with contextlib.ExitStack() as stack:
            stack.enter_context(drawing)
            stack.enter_context(undo.calls())
            stack.enter_context(torch.set_grad_enabled(with_gradient))
            if with_gradient:
                stack.enter_context(self._replica.sync.accumulate())  # a strategy prepares nothing for these passes
            if not trains:
                stack.enter_context(evaluating(nn.ModuleList([self._replica.model, *undo.modules])))
            (whole, gradient), (again, _) = result(low, high, seeds[0]), result(low, high, seeds[0], [])
            if undo.drew:
                raise Unsafe("numbers of its own")
            near = _rounding(dtypes, undo) * max(1.0, abs(whole), abs(again))
            if abs(whole - again) > near:
                if trains or undo.reaches([*kept.objects.values(), *kept.rank_objects.values()]):
                    return ""  # a checkpoint has the state. In training mode a call may move a buffer, as spectral norm does
                return (
                    "the function of a step carries a state from one call to the next: for the same samples and random numbers it gave "
                    f"the loss {whole:.6g}, then {again:.6g}. A start that resumes begins without this state, and each rank has its own: "
                    "hand it in with the batch, begin it anew in each step, or keep it by run.keep_of_rank()"
                )
            half = (high - low) // 2 // multiple
            other, gradient_of_other = result(low, high, seeds[1])
            tolerance = _OF_GRADIENT * _rounding(dtypes, undo)
            noisy = abs(other - whole) > near or _distance(gradient, gradient_of_other) > tolerance
            if noisy or not half or not inputs.batch or _normalises(undo.modules):
                return ""
            # Both odd, if they can be: of two even halves each may have half of what a median, or the largest ones, take.
            odd, even = half - 1 + half % 2 or half, half - half % 2 or half
            middle = low + odd * multiple
            try:
                first, second = result(low, middle, seeds[0]), result(middle, high, seeds[0])
            except Exception:  # samples that come in pairs have no odd half
                if inputs.part is None:  # the script has cut the batch, and knows where
                    raise
                middle = low + even * multiple
                first, second = result(low, middle, seeds[0]), result(middle, high, seeds[0])
        return _unlike_halves(
            inputs, (whole, gradient), (first, second), (middle - low, high - middle), _rounding(dtypes, undo), weights
        )


def _unlike_halves(
    inputs: StepInput,
    whole: Result,
    halves: tuple[Result, Result],
    sizes: tuple[int, int],
    rounding: float,
    weights: list[nn.Parameter],
) -> str:
    """Returns a warning if the loss of a batch, or its gradient, does not follow from those of its two halves; "": it does.

    Args:
        sizes: samples of the halves.
        rounding: relative difference between losses that counts as equal.
    """
    (loss, gradient), (first, second) = whole, halves
    losses, gradients = (first[0], second[0]), (first[1], second[1])
    samples, tolerance = sum(sizes), _OF_GRADIENT * rounding
    kind = "mean" if inputs.divisor is None else "sum"
    shares = (1.0, 1.0) if kind == "sum" else tuple(size / samples for size in sizes)
    expected = sum(share * half for share, half in zip(shares, losses))
    near = rounding * max(1.0, *map(abs, (loss, *losses)))
    if not math.isfinite(near):
        return ""
    # In float16 small gradients would be lost.
    compares = bool(gradient) and inputs.scaler is None
    apart = _distance(gradient, *gradients) if compares else 0.0
    # Terms that cancel, such as those of a critic, round more than their sum. Their gradients do not.
    is_rounding = compares and abs(loss - expected) < _OF_GRADIENT * near and apart < tolerance / 10
    if abs(loss - expected) > near and not is_rounding:
        return (
            f"the loss of a batch is not the {kind} over its samples: {samples} samples give {loss:.6g}, and their two halves "
            f"{expected:.6g}. So N ranks minimise another loss than 1 rank. {_advice(inputs, loss, losses, near)}"
        )
    if apart <= tolerance or _is_rounding(gradient, weights, loss):
        return ""
    return (
        f"the gradient of a batch is not the {kind} over its samples: that of {samples} samples and that of their two halves "
        f"differ by {apart:.2g} of their norm, though the loss is the {kind}. So N ranks take another step than one. A term that is "
        "divided by its own value, advantages that are whitened, or an Embedding with scale_grad_by_freq depend on the samples of a rank: "
        "compute such numbers from the whole batch, before run.part(), and pass them as arguments"
    )


def _distance(whole: Gradient, *parts: Gradient) -> float:
    """Returns the distance between a gradient and the sum of others, in their norm; 0 if a gradient is not finite."""
    apart, norm, norms = 0.0, 0.0, [0.0] * len(parts)
    for gradients in zip(whole, *parts):
        if any(one is not None and one.layout is not torch.strided for one in gradients):
            continue  # sparse
        like = next((one for one in gradients if one is not None), None)
        if like is not None:
            one, *others = (
                torch.zeros_like(like).double() if gradient is None else gradient.double() for gradient in gradients
            )
            apart += float((one - sum(others)).square().sum())
            norm += float(one.square().sum())
            norms = [before + float(other.square().sum()) for before, other in zip(norms, others)]
    scale = max(math.sqrt(norm), sum(map(math.sqrt, norms)))
    return math.sqrt(apart) / scale if scale and math.isfinite(scale) and math.isfinite(apart) else 0.0


def _is_rounding(gradient: Gradient, weights: list[nn.Parameter], loss: float) -> bool:
    """Returns whether a gradient is so small that rounding may have made it: that of a student which still equals its teacher."""
    strided = [one for one in gradient if one is not None and one.layout is torch.strided]
    sizes = nn.utils.get_total_norm(strided) * nn.utils.get_total_norm(weights)
    return float(sizes) < _SMALL * abs(loss)


def _is_divided(node: Any, parts: int) -> bool:
    """Returns whether a graph ends in a division of a mean by this number. A sum, of samples or of several losses, may be a mean by it."""
    factor = getattr(node, "_saved_other", None) if type(node).__name__ == "DivBackward0" else None
    if not isinstance(factor, torch.Tensor) or factor.numel() != 1 or float(factor) != parts:
        return False
    inner = node.next_functions[0][0]
    is_sum = getattr(inner, "_saved_reduction", None) == 2
    return not (is_sum or type(inner).__name__.startswith(("Add", "Sum", "Stack")))


def _leaves_out(graph: Any, samples: float) -> bool:
    """Returns whether a graph ends in the mean of torch's loss for classes over weights, or over fewer labels than there are, but for as
    many as `samples`; in a mean over entries that were chosen from a tensor with one per sample; or in a sum that is divided by another
    number than its entries."""
    waiting, seen = [graph], set[Any]()
    while waiting and len(seen) < _MOST:
        node = waiting.pop()
        seen.add(node)
        name = type(node).__name__
        if name.startswith("NllLoss") and node._saved_reduction == 1:
            count, precision = node._saved_target.numel(), torch.finfo(node._saved_total_weight.dtype).eps
            weight = float(node._saved_total_weight)  # waits for the device
            if min(abs(weight - count), abs(weight - samples)) > precision * count:
                return True
        elif name.startswith("MeanBackward"):
            if _is_chosen(node, samples):
                return True
        elif name.startswith("DivBackward") and _is_part_of_sum(node, samples):
            return True
        elif name.rstrip("01").removesuffix("Backward") in _PASSED:
            waiting += [inner for inner, _ in node.next_functions if inner is not None and inner not in seen]
    return False


def _is_chosen(node: Any, samples: float) -> bool:
    """Returns whether the entries of a mean are no multiple of the samples, and were chosen from a tensor whose rows are."""
    if math.prod(getattr(node, "_saved_self_sym_sizes", ())) % samples == 0:
        return False
    for _ in range(_MOST):
        node = node.next_functions[0][0]
        name = type(node).__name__
        if _CHOICES.fullmatch(name):
            sizes: Any = node._saved_self.shape if name.startswith("Masked") else node._saved_self_sym_sizes
            return len(sizes) > 0 and sizes[0] % samples == 0
        if name.rstrip("01").removesuffix("Backward") not in _PASSED:
            return False
    return False


def _is_part_of_sum(node: Any, samples: float) -> bool:
    """Returns whether a sum over samples is divided by a whole number that is no multiple of theirs, such as a number of tokens."""
    inner, other = node.next_functions[0][0], getattr(node, "_saved_other", None)
    sizes: Any = getattr(inner, "_saved_self_sym_sizes", ()) if type(inner).__name__.startswith("SumBackward") else ()
    if not isinstance(other, torch.Tensor) or other.numel() != 1:
        return False
    return len(sizes) > 0 and sizes[0] % samples == 0 and float(other).is_integer() and float(other) % samples != 0


def _kind(node: Any, samples: int, seen: dict[Any, str] | None = None) -> str:
    """Returns "sum" if a graph ends in a sum over this many samples, "scaled" for such a sum times a number, else "other". A graph of
    more than `_MOST` operations is "other", too."""
    seen = {} if seen is None else seen
    if node in seen or len(seen) == _MOST:
        return seen.get(node, "other")
    seen[node] = "other"
    name, inputs = type(node).__name__, [inner for inner, _ in getattr(node, "next_functions", ()) if inner is not None]
    sizes = getattr(node, "_saved_self_sym_sizes", ())
    if name.startswith("SumBackward") and sizes and sizes[0] == samples:
        if not any(type(inner).__name__.startswith(_NO_SAMPLES) for inner in inputs):
            seen[node] = "sum"
    elif getattr(node, "_saved_reduction", None) == 2:  # torch's own losses: 1 is the mean
        seen[node] = "sum"
    elif name.rstrip("01").removesuffix("Backward") in _PASSED:
        kinds = {_kind(inner, samples, seen) for inner in inputs}
        if kinds and "other" not in kinds:
            seen[node] = "scaled" if name.startswith(("Mul", "Div")) or kinds == {"scaled"} else "sum"
    return seen[node]


def _advice(inputs: StepInput, whole: float, halves: tuple[float, float], near: float) -> str:
    if inputs.divisor is not None:
        return "With divisor=… return the sum over the samples, without a mean and without a term that is not theirs"
    if abs(whole - sum(halves)) <= near:
        return "It is a sum: give its divisor, run.step(function, …, divisor=…)"
    return (
        "Return a mean over the samples, or a sum with divisor=… (tokens, class weights). A loss that compares samples sees those of "
        "its rank alone. run.part() cuts the first dimension, which is that of the samples"
    )


def _rounding(dtypes: set[torch.dtype], undo: Undo) -> float:
    if undo.watching.is_low:
        return _ROUNDING_OF_LOW
    if torch.cuda.is_initialized() and (torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32):
        return _ROUNDING_OF_TF32
    return max(_ROUNDING.get(dtype, _ROUNDING_OF_LOW) for dtype in dtypes)


def _normalises(modules: list[nn.Module], trains: bool = False) -> bool:
    """Returns whether a batch norm takes the statistics of its batch: in training mode, and without running statistics in any."""
    norms = (module for module in modules if isinstance(module, nn.modules.batchnorm._BatchNorm))
    return any(module.running_mean is None or (trains and module.training) for module in norms)
