"""Every strategy on two GPUs of the stand-in: the numbers of the CPU, and nothing that makes the host wait but what is listed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import product
from tests.gpu_rehearsal.conftest import OnCpu
from tests.gpu_rehearsal.emulation import STEP
from tests.gpu_rehearsal.rehearsal import differing, rehearsing, settings, trained
from tests.processes import ROOT
from tests.runs import LOSSY_START

pytestmark = pytest.mark.promise("gpu-standin")

LOOK_FOR_NAN = "cudaStreamSynchronize by run/step.py:_is_usable"
"""Whether the gradient is finite, before it moves a weight: a step waits once for that (`nonfinite=ignore` does without)."""
DDPS_OWN = {
    "cudaEventSynchronize by recipe/loop.py:loss",  # torch's logger times its first steps
    "copy cpu->cuda pageable by recipe/loop.py:loss",  # the order of the buckets, once
    "copy cuda->cpu pageable blocking by recipe/loop.py:loss",
    "cudaStreamSynchronize by recipe/loop.py:loss",
}
READING = {"copy cuda->cpu pinned by observe/steps.py:_to_host", "cudaEventSynchronize by observe/steps.py:poll"}
"""The losses of the first and the last step, on a separate stream. The host reads them once they have arrived."""
RESIDENT = "copy cpu->cuda pageable by data/batches.py:batch"
"""The numbers of the samples: staged by the driver at the call, so nothing waits."""
APPLIES = "cudaStreamSynchronize by sync/exact.py:apply"
"""An eager step of `exact` reads how many parts have used each parameter: one that no part has used gets no gradient."""
READ_BY_EXACT = (
    "sync/exact.py:apply",
    "run/logical_workers.py:finish",
    "run/proof.py:prove",
    "parallel/packing.py:tensor_bytes",
)
"""Where such a step reads, too, whether the counts of the parts agree. The last two are those of the first steps, which are proved."""
EXACTS_OWN = {
    f"{how} by {place}"
    for how in ("cudaStreamSynchronize", "copy cuda->cpu pageable blocking")
    for place in READ_BY_EXACT
}
STRATEGIES = [name for name in product.strategies() if name != product.DATA_PARALLEL]


def changes_of(strategy: str) -> dict[str, object]:
    return {
        "sync__name": strategy,
        **{name.replace(".", "__"): value for name, value in LOSSY_START.get(strategy, {}).items()},
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_gpus_compute_what_two_cpus_do(tmp_path: Path, data_root: Path, on_cpu: OnCpu, strategy: str) -> None:
    gang, actual = trained(tmp_path, data_root, **changes_of(strategy))
    assert differing(actual, on_cpu(**changes_of(strategy))) == []
    allowed = {LOOK_FOR_NAN, RESIDENT} | READING | (DDPS_OWN if strategy in ("ddp", product.POWERSGD) else set())
    allowed |= EXACTS_OWN if strategy == "exact" else set()
    for rank in gang.ranks:
        assert rank.lines("COMMUNICATOR"), "nothing went through NCCL"
        assert set(rank.counts["step"]) <= allowed
        assert rank.counts["step"][LOOK_FOR_NAN] == 8, "once a step"


@pytest.mark.parametrize("late", ["oldest", "newest"])
@pytest.mark.parametrize("strategy", ["flat", "ddp", product.HOOKS, "zero1", product.FSDP])
def test_work_that_runs_as_late_as_it_may_changes_no_number(
    tmp_path: Path, data_root: Path, on_cpu: OnCpu, strategy: str, late: str
) -> None:
    """Code that reads before it waits, or lets a stream not wait for another, reads old numbers."""
    _, actual = trained(tmp_path, data_root, options={"STANDIN_LATE": late}, **changes_of(strategy))
    assert differing(actual, on_cpu(**changes_of(strategy))) == []


def test_the_functions_of_a_step_are_where_the_rehearsal_looks_for_them() -> None:
    """A function that was moved would be in no step, and nothing that it waits for would be seen."""
    for file, function in STEP:
        sources = [path.read_text() for path in (ROOT / "training").rglob(file)]
        assert any(re.search(rf"^ *def {function}\(", source, re.M) for source in sources), (file, function)


def test_without_the_look_for_nan_no_step_waits(tmp_path: Path, data_root: Path, on_cpu: OnCpu) -> None:
    gang, actual = trained(tmp_path, data_root, nonfinite="ignore")
    assert differing(actual, on_cpu()) == []
    assert [set(rank.counts["step"]) - READING for rank in gang.ranks] == [{RESIDENT}] * 2


def test_powersgd_on_the_cpu_while_gpus_are_visible_is_refused_before_anything_is_trained(
    tmp_path: Path, data_root: Path
) -> None:
    """torch's hook fails there in the first step that it compresses."""
    changes = settings(data_root, device="cpu", sync__name=product.POWERSGD)
    words = ["run", "smoke", "--run-dir", str(tmp_path / "run"), *changes]
    with rehearsing(tmp_path, words) as gang:
        assert gang.wait(240) == [2, 2], gang.output
    assert f"sync.name={product.POWERSGD} cannot compress on the CPU while GPUs are visible" in gang.output
