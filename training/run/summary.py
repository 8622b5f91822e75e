"""What a run leaves when it ends: summary.json and a line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.training import contract, files
from lockstep.training.run.context import RunContext

if TYPE_CHECKING:
    from lockstep.training.run.prepare import Prepared


def summarise(prepared: Prepared, wall_seconds: float, failures: int) -> None:
    """Writes summary.json and the last event of a run that is complete.

    Args:
        wall_seconds: of this attempt.
        failures: checkpoints of this attempt that the disk refused.
    """
    state, config = prepared.state, prepared.config
    history, trained = state.history, max(state.clock.trained, 1e-9)
    summary = {
        "recipe": config.recipe, "sync": config.sync.name, "world_size": prepared.world.size, "steps": prepared.steps_done,
        "epochs": state.cursor.epoch, "train_loss": history.get("train_loss"), "test_loss": history.get("test_loss"),
        "accuracy": history.get("accuracy"), "class_accuracy": history.get("class_accuracy"),
        "best_accuracy": history.get("best_accuracy"), "images_per_second": prepared.samples_done / trained,
        "examples_seen": prepared.samples_done, "trained_seconds": trained, "wall_seconds": wall_seconds,
        "global_batch_size": prepared.global_batch, "restarts": prepared.attempt - 1,
        "preemptions": history.get("preemptions", 0), "checkpoint_failures": failures, "config_hash": config.hash(),
        "data": prepared.data,
    }  # fmt: skip
    if prepared.run is not None and prepared.world.leader:
        prepared.run.summary(summary)
    prepared.event("done", **summary)


def stands(context: RunContext) -> bool:
    """Whether summary.json is that of the run as it is: a start that adds nothing leaves it, and tells it to those who read the
    lines. It is not where a kill came between the last save and the summary."""
    if context.run is None:
        return False
    found: Any = files.read_json(context.run.path / contract.SUMMARY_FILE)
    now = (context.steps_done, context.state.cursor.epoch)
    if not isinstance(found, dict) or (found.get("steps"), found.get("epochs")) != now:
        return False
    if context.world.leader:
        context.console.on_event({"event": "done", **found})
    return True


def say_complete(prepared: Prepared) -> None:
    """A line for a run that was complete before this start."""
    accuracy = prepared.state.history.get("accuracy")
    reached = f", validation accuracy {accuracy:.4f}" if accuracy is not None else ""
    prepared.console.line(
        f"The run is complete: {prepared.config.epochs} epochs, {prepared.steps_done} steps{reached}. "
        "Raise epochs to continue, or start over with --fresh (FRESH=1 make train)."
    )
