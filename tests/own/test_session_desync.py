"""One rank leaves the loop, or skips a step, while the others train."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import product
from tests.events import status_of
from tests.own.job import script

SCRIPT = """
kind, sync = sys.argv[2:4]
with Session(sys.argv[1], sync=sync) as run:
    model = replicated(run)
    x = torch.randn(160, 4)
    def given():  # of unknown length
        yield from run.part(x).split(4)
    for epoch in run.epochs(2):
        for part in run.iterate(given()):
            odd = run.rank == 1 and run.steps == 6
            if odd and kind in ("break", "break from a sum"):
                break
            if kind == "break from a sum":
                run.sum(1.0)
            if odd and kind == "continue":
                continue
            if odd and kind == "exit":
                sys.exit()
            if run.steps == 6 and kind == "all break":
                break
            if run.steps == 6 and kind == "ways":
                if run.rank == 1:
                    break
                continue
            if "Fsdp" in sync:
                loss = model(part).square().mean()
                if odd and kind == "continue after the loss":
                    continue
                run.step(loss, samples=len(part))
            else:
                count = {"fewer steps": 2 - odd, "more steps": 2 + odd, "second step": 1 + odd}.get(kind, 1)
                for _ in range(count):
                    run.step(lambda x: model(x).square().mean(), part, samples=len(part))
        run.sum(1.0)
    if kind == "leader after the loop" and run.leader:
        run.for_evaluation()
    if kind == "calls after the loop":
        run.sum(1.0) if run.leader else run.part(x)  # which looks at it after a save
"""
LEFT = "rank 1 left the loop over its batches after step 6, while rank "
SKIPPED = "rank 1 asked for the next batch without a step after step 6, while rank "
SAYS = {
    "break": LEFT, "break from a sum": LEFT, "continue": SKIPPED,
    "fewer steps": "rank 1 asked for the next batch after step 7, while rank ",
    "more steps": "rank 1 takes another step of its batch after step 8, while rank ",
    "second step": "rank 1 takes another step of its batch after step 7, while rank ",
    "exit": "rank 1 left the loop over the epochs after step 6, while rank ",
    "ways": "after step 6: rank 1 left the loop over its batches, and rank 0 asked for the next batch without a step",
    "leader after the loop": "rank 0 called run.for_evaluation() after the loop, and rank 1 did not: all ranks make the same calls",
    "calls after the loop": "rank 1 called run.part() after the loop, and rank 0 called run.sum(): all ranks make the same calls",
}  # fmt: skip


@pytest.mark.promise("named-rank")
@pytest.mark.parametrize(
    ("kind", "sync"),
    [
        *((kind, "flat") for kind in SAYS),
        ("break", "ddp"),
        ("continue", product.FSDP),
        ("continue after the loss", product.FSDP),
    ],
)
def test_a_rank_that_leaves_alone_is_named_within_seconds(tmp_path: Path, kind: str, sync: str) -> None:
    """`script` waits 240 s, and `collective_timeout` is 600 s."""
    ranks = 2 if kind == "ways" or "after the loop" in kind else 3
    done = script(ranks, SCRIPT, tmp_path / "run", kind, sync)
    sentence = SAYS.get(kind, SKIPPED)
    assert done.code == 1 and done.output.count(sentence) == 1, "said once, and not by every rank"
    assert ("run.leader" if "after the loop" in kind else "run.stop(reason)") in done.output, done.output
    assert not any(words in done.output for words in ("Traceback", "did not arrive", "lost rank", "[c10d]")), (
        done.output
    )
    status = status_of(tmp_path / "run")
    assert status["code"] == 1 and sentence in status["reason"]


def test_ranks_that_leave_alike_continue(tmp_path: Path) -> None:
    done = script(3, SCRIPT, tmp_path / "run", "all break", "flat")
    assert done.code == 0 and "rank 1" not in done.output.replace("rank 1: port", ""), done.output
