"""The reports of a script on its run: numbers, events, values that last. The part of `Session` that changes no weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from .loop import Loop


class Reporting:
    """`Session` is one."""

    run_dir: Path
    _started: Callable[[], Loop]
    """Returns the loop of the run, which begins with the first call that needs it."""

    @property
    def values(self) -> MutableMapping[str, Any]:
        """Values of the script, saved in every checkpoint: numbers, texts, tensors, numpy arrays, lists, dictionaries. They must be
        the same on every rank; those of rank 0 are saved.

        Examples:
            >>> run.values.setdefault("best", 0.0)  # unless the checkpoint has one
            0.0
            >>> run.values["best"] = max(run.values["best"], 0.93)
        """
        return self._started().run.user_state.values

    @property
    def summary(self) -> MutableMapping[str, Any]:
        """What summary.json says of the run besides our numbers: values as in `values`, saved in every checkpoint, too. A `remark`
        also ends the reason in status.json: "complete, but …".

        Examples:
            >>> run.summary["parameters"] = sum(p.numel() for p in model.parameters())
        """
        return self._started().run.user_state.summary

    @property
    def history(self) -> Mapping[str, Any]:
        """The last measurements: `accuracy`, `test_loss`, and the best of them. Of the last whole epoch, `train_loss`, and the numbers that
        a step returns with it.

        Examples:
            >>> loss = run.history.get("train_loss")
        """
        return self._started().run.state.history

    @property
    def best(self) -> float | None:
        """The best of the numbers that `checkpoint.keep_best` names (`accuracy`, if it names none) so far; None: none was logged.

        Examples:
            >>> improved = run.best is None or 0.93 > run.best
        """
        return self._started().attempt.saver.scores.best

    @property
    def grad_norm(self) -> float | None:
        """The norm of the last step's gradient over the samples of all ranks, before `clip`. None before the first step, and with
        `nonfinite=ignore` unless `clip` computes it. Waits for the device. Every `log.every` steps the events have it anyway.

        Examples:
            >>> if run.steps % 100 == 0:
            ...     run.log(norm=run.grad_norm or 0.0)
        """
        norm = self._started().attempt.grad_norm
        return None if norm is None else float(norm)

    def event(self, kind: str, **values: Any) -> None:
        """Appends a line to events.jsonl in the run directory (rank 0).

        Examples:
            >>> run.event("unfrozen", layer="head")
        """
        self._started().run.event(kind, **values)

    def log(self, **numbers: float) -> None:
        """Logs numbers of the script (those of rank 0): as an event, and in metrics, TensorBoard, W&B and the report.

        `accuracy` and `test_loss` are printed in the table of epochs. A best `accuracy` so far, or another number that
        `checkpoint.keep_best` names, is that of the present weights. At the next boundary they are saved, and kept.

        Examples:
            >>> run.log(accuracy=0.93, lr=schedule.get_last_lr()[0])
        """
        self._started().log(numbers)

    def print(self, text: object) -> None:
        """Prints the lines of a text, or of an object's text, on rank 0 alone; nothing with `log.format=json`.

        Examples:
            >>> run.print(f"{sum(p.numel() for p in model.parameters())} parameters")
        """
        for line in str(text).splitlines():
            self._started().run.console.line(line)

    def path(self, name: str) -> Path:
        """Where a file of the script's own belongs: in the run directory, below `files/`. The folder is there.

        Examples:
            >>> if run.leader:
            ...     torch.save(predictions, run.path("predictions.pt"))
        """
        path = self.run_dir / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path
