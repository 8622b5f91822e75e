"""Steps over several batches of a user's loader give the sums of the plain loop, also clipped by hand, after a kill, or an error."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.nets import DyingPlain
from tests.own.job import assert_weights, script
from tests.processes import Result

pytestmark = pytest.mark.promise("session-same")

RANKS, SIZE, ACCUMULATE, EPOCHS = 2, 10, 4, 2
"""A rank's 95 samples make ten batches, the last one of five samples: the third step of an epoch has two batches."""
CODE = """
from tests.nets import DyingPlain
from tests.own import loop
torch.set_default_dtype(torch.float64)
run_dir, accumulate, *overrides = sys.argv[1:]
accumulate, passes = int(accumulate), 0
with Session(run_dir, *overrides) as run:
    torch.manual_seed(3)
    data = loop.Noisy()
    model = run.replicate(DyingPlain())
    run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
    run.keep()
    own = list(range(len(data)))[run.rank :: run.size]
    loader = DataLoader(torch.utils.data.Subset(data, own), SIZE)
    for _ in run.epochs(EPOCHS):
        for batches in run.iterate(loader, accumulate=accumulate):
            for x, y in run.accumulate(batches):
                run.backward(F.cross_entropy(model(x), y), samples=len(y))
                passes += 1
                if passes == int(os.environ.get("LEAVE", "0")):
                    sys.exit()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            run.update()
""".replace("SIZE", str(SIZE)).replace("EPOCHS", str(EPOCHS))


def _go(run_dir: Path, sync: str, accumulate: int = ACCUMULATE, **variables: str) -> Result:
    words = (str(accumulate), f"sync.name={sync}", "checkpoint.every_steps=1")
    return script(RANKS, CODE, run_dir, *words, LOOP_EXACT="1", **variables)


@functools.cache
def _plain() -> dict[str, torch.Tensor]:
    """The same samples of both ranks in each step, as one batch of one process."""
    from tests.own import loop

    state = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(3)
        data = loop.Noisy()
        model = DyingPlain()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        parts = [torch.arange(len(data))[rank::RANKS].split(SIZE * ACCUMULATE) for rank in range(RANKS)]
        for _ in range(EPOCHS):
            for step in zip(*parts, strict=True):
                ids = torch.cat(step)
                optimizer.zero_grad()
                F.cross_entropy(model(data.images[ids]), data.labels[ids]).backward()
                assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
                optimizer.step()
        return {name: parameter.detach() for name, parameter in model.named_parameters()}
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_rng_state(state)


def test_killed_within_a_step_of_several_batches_it_ends_in_the_weights_of_the_plain_loop(tmp_path: Path) -> None:
    """The kill comes in the second step of epoch 2, with a checkpoint after every step."""
    died = _go(tmp_path / "run", "flat", LOCKSTEP_TEST_FATE="1:16:KILL")
    assert died.code != 0, died.output
    other = _go(tmp_path / "run", "flat", accumulate=3)
    assert other.code == 2 and "divided differently (accumulate: 4 → 3)" in other.output, other.output
    done = _go(tmp_path / "run", "flat")
    assert done.code == 0 and "Resuming at step 4 (epoch 2, batch 1)" in done.output, done.output
    assert_weights(tmp_path / "run", _plain())


def test_a_script_that_leaves_within_a_step_saves_nothing_of_it(tmp_path: Path) -> None:
    """A save would hold statistics, generators and a loader's position of batches without an update."""
    left = _go(tmp_path / "run", "ddp", LEAVE="16")
    assert left.code == 1 and "RuntimeError: the run ends with gradients that no update()" in left.output
    done = _go(tmp_path / "run", "ddp")
    assert done.code == 0 and "Resuming at step 4 (epoch 2, batch 1)" in done.output, done.output
    assert_weights(tmp_path / "run", _plain())
