"""float16: gradients that would vanish do not, an overflow costs no sample, and the scale goes through a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import product
from tests.product import checkpoint
from tests.runs import FINAL, LOSSY_START, Job, assert_same, tensors

pytestmark = pytest.mark.promise("half-precision")


@pytest.mark.parametrize("strategy", ["flat", product.FSDP])
def test_a_killed_float16_run_resumes_to_the_same_bits(data_root: Path, tmp_path: Path, strategy: str) -> None:
    changes = {"precision": "float16", "sync.name": strategy, "loss.reduction": "sum", "lr": 0.002}
    whole, killed = (
        Job(tmp_path / name, data_root, 2, **changes, **LOSSY_START.get(strategy, {})) for name in ("whole", "killed")
    )
    assert whole.go().code == 0
    assert killed.go(LOCKSTEP_TEST_FATE="1:13:KILL").code != 0
    resumed = killed.go()
    assert resumed.code == 0 and "Resuming at step" in resumed.output
    scales = [
        checkpoint(job.run_dir / f"checkpoints/step-{FINAL:08d}")["shared"]["kept"]["objects"]["scaler"]
        for job in (whole, killed)
    ]
    assert scales[0] == scales[1] and scales[0]["_growth_tracker"] > 0  # counts steps since an overflow
    expected = tensors(whole.run_dir)
    assert_same(killed.run_dir, expected)
    assert all(bool(torch.isfinite(t).all()) for t in expected.values() if t.is_floating_point())


def test_half_precision_trains_every_sample_and_close_to_float32_and_a_nan_is_named(
    data_root: Path, tmp_path: Path
) -> None:
    losses = {}
    for precision in ("float32", "float16", "bfloat16"):
        job = Job(tmp_path / precision, data_root, 2, **{"precision": precision, "model": "tests.nets:SmallConv"})
        assert job.go().code == 0
        shared = checkpoint(job.run_dir / f"checkpoints/step-{FINAL:08d}")["shared"]
        losses[precision] = shared["history"]["train_loss"]
        assert {tensor.dtype for tensor in shared["model"].values()} == {torch.float32}, "weights are kept whole"
    assert len(set(losses.values())) == 3, "products are rounded"
    assert losses["float16"] == pytest.approx(losses["float32"], rel=5e-3)
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=5e-2)
    done = Job(tmp_path / "nan", data_root, 2, precision="float16").go(LOCKSTEP_TEST_FATE="1:7:NAN")
    assert done.code == 1 and "step 7: rank 1: gradient of head.bias is not finite" in done.output, done.output
