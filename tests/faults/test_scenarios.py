"""Random scenarios: any rank, killed at any step, several times over, ends in the undisturbed weights.

3 seeds by default, `LOCKSTEP_SCENARIOS=50` (make test-nightly) for the long form.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.conftest import Undisturbed
from tests.events import assert_adds_up
from tests.runs import FINAL, Job, assert_same

pytestmark = pytest.mark.promise("kill-resume")
SEEDS = range(int(os.environ.get("LOCKSTEP_SCENARIOS", "3")))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_kills(job: Job, undisturbed: Undisturbed, seed: int) -> None:
    chance = random.Random(seed)
    every = chance.choice([1, 2, 3])
    job.words.append(f"checkpoint.every_steps={every}")
    reached = 0
    for _ in range(chance.randint(1, 3)):
        remaining = FINAL - reached
        if not remaining:  # stopped at the last step of all
            break
        at = chance.randint(1, remaining)
        rank, name = chance.randrange(2), chance.choice(["KILL", "KILL", "SEGV", "TERM", "HUP"])
        fate = f"{rank}:{at}:{name}"
        result = job.go(LOCKSTEP_TEST_FATE=fate)
        assert result.code == (75 if name in ("TERM", "HUP") else 1), (fate, result.output)
        steps = job.steps()
        last = reached + at - 1
        if steps:  # lost work is at most one interval, and the save under way when the kill came
            assert steps[0] >= last - 2 * every, (fate, steps, result.output)
            reached = steps[0]
        else:
            assert last < 2 * every, (fate, result.output)
    result = job.go()
    assert result.code == 0, result.output
    assert_adds_up(job.run_dir)
    assert_same(job.run_dir, undisturbed(2))
