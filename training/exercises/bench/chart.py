"""The scaling benchmark as a PNG: speed-up against the number of ranks, and what a step is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.training.exercises.bench.gang import PHASES


def draw(rows: dict[str, list[dict[str, Any]]], path: Path, title: str) -> None:
    """Writes the chart. `rows` are those of `scaling.table`, for each form of the benchmark."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    ranks = [row["ranks"] for row in rows["fixed"]]
    left.plot(ranks, [size / ranks[0] for size in ranks], linestyle=":", color="grey", label="as many times as fast")
    for name, label in (("fixed", "global batch fixed"), ("scaled", "batch grows with the ranks")):
        left.plot(ranks, [row["speed_up"] for row in rows[name]], marker="o", label=label)
    left.set(xlabel="ranks", ylabel="speed-up (images/s)", xticks=ranks, ylim=(0, None), title=title)
    left.legend()
    labels = [f"{row['ranks']}\n{name}" for name in rows for row in rows[name]]
    bottom = [0.0] * len(labels)
    for phase in PHASES:
        heights = [1000 * row["phases"][phase] for name in rows for row in rows[name]]
        right.bar(labels, heights, bottom=bottom, label=phase)
        bottom = [low + height for low, height in zip(bottom, heights)]
    right.set(xlabel="ranks", ylabel="ms a step", title="where the time goes")
    figure.legend(*right.get_legend_handles_labels(), loc="outside right center", fontsize="small")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
